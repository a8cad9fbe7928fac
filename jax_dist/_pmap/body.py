"""A call with its arguments flattened, and the mapped function of one slice as a jaxpr."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Sharding

from jax_dist import _compat
from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.meshes import InnerAxis
from jax_dist._pmap.options import Options as Options
from jax_dist._rewrite import captures
from jax_dist._rewrite.captures import Lifted
from jax_dist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with its arguments flattened."""

    fun: Callable
    rebuild: Callable[[Sequence[Any]], tuple[tuple, dict]]  # leaves -> (args, kwargs)
    leaves: list[Any]
    axes: tuple[Axis, ...]  # of each leaf
    owners: tuple[int | str, ...]  # of each leaf: the position or keyword of its argument
    paths: Callable[[], list[str]]  # the name of each leaf
    fun_name: str
    structure: Any = None  # of the arguments that are not static
    static: tuple[Any, ...] = ()  # the values of those that are

    @functools.cached_property
    def size(self) -> int:
        """The size of the mapped axis. Raises MappedAxisError if there is no one size."""
        return axes.mapped_size(self.leaves, self.axes, self.paths, self.fun_name)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the user's function on slices of the leaves."""
        args, kwargs = self.rebuild(leaves)
        return self.fun(*args, **kwargs)

    @classmethod
    def bind(
        cls, options: Options, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "Call":
        """Flatten the arguments, and find the mapped axis of each leaf.

        Raises:
          MappedAxisError: in_axes is no prefix of the arguments.
          ArgumentError: a static argument is not among `args`, or cannot be hashed.
        """
        check_static(options, fun, args)
        numbers = [number for number in range(len(args)) if number not in options.static]
        mapped_args = tuple(args[number] for number in numbers)
        in_axes = options.in_axes
        names_static = isinstance(in_axes, tuple | list) and len(in_axes) > len(numbers)
        if options.static and names_static and all(number < len(in_axes) for number in numbers):
            in_axes = tuple(in_axes[number] for number in numbers)

        def rebuild(leaves: Sequence[Any]) -> tuple[tuple, dict]:
            values, keywords = jax.tree.unflatten(structure, leaves)
            positional = list(args)
            for number, value in zip(numbers, values, strict=True):
                positional[number] = value
            return tuple(positional), keywords

        def paths() -> list[str]:
            return axes.argument_paths(fun, mapped_args, kwargs, numbers)

        leaves, structure = jax.tree.flatten((mapped_args, kwargs))
        leaf_axes = axes.spread_in_axes(in_axes, mapped_args, kwargs, options.fun_name)
        trees = [*zip(numbers, mapped_args, strict=True), *sorted(kwargs.items())]
        owners = tuple(owner for owner, tree in trees for _ in jax.tree.leaves(tree))
        static = tuple(args[number] for number in options.static)
        name = options.fun_name
        return cls(fun, rebuild, leaves, leaf_axes, owners, paths, name, structure, static)

    @classmethod
    def of_taken(
        cls, taken: _compat.TakenPmap, leaves: Sequence[Any], fun: Callable, name: str
    ) -> "Call":
        """Return the call of an intercepted `jax.pmap`, with `fun` in place of its function."""

        def rebuild(values: Sequence[Any]) -> tuple[tuple, dict]:
            return jax.tree.unflatten(taken.in_tree, list(values))

        args, kwargs = rebuild(leaves)
        numbers, keywords = rebuild(range(len(leaves)))
        trees = [*enumerate(numbers), *keywords.items()]
        owner_of = {place: owner for owner, tree in trees for place in jax.tree.leaves(tree)}
        owners = tuple(owner_of[place] for place in range(len(leaves)))
        paths = lambda: axes.argument_paths(fun, args, kwargs, range(len(args)))
        return cls(fun, rebuild, list(leaves), taken.in_axes, owners, paths, name)


def check_static(options: Options, fun: Callable, args: tuple[Any, ...]) -> None:
    """Raise ArgumentError for a static argument that is missing or cannot be hashed."""
    static, name = options.static, options.fun_name
    if static and static[-1] >= len(args):
        raise ArgumentError(
            f"pmap of '{name}' has static_broadcasted_argnums {static}, but the call has only "
            f"{len(args)} positional arguments."
        ) from None
    for number in static:
        try:
            hash(args[number])
        except TypeError:
            path, value = axes.argument_name(fun, number), args[number]
            raise ArgumentError(
                f"Non-hashable static arguments are not supported by pmap of '{name}': {path} is a "
                f"{type(value).__name__}, {value!r}."
            ) from None


def any_tracer(leaves: Iterable[Any]) -> bool:
    """Return whether the call is part of an outer trace."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def type_of(leaf: Any, shape: Sequence[int] | None = None, sharding: Sharding | None = None) -> Any:
    """Return the type of an array, or that of another shape, without its sharding.

    Raises:
      TypeError: `leaf` is no array.
    """
    is_described = hasattr(leaf, "shape") and not isinstance(leaf, jax.Array | np.ndarray)
    aval: Any = leaf if is_described else jax.typeof(leaf)
    weak = bool(getattr(aval, "weak_type", False))
    sizes: Sequence[int] = aval.shape if shape is None else shape
    is_array = not is_described or isinstance(leaf, ShapedArray)
    canonical = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    if is_array and aval.dtype != canonical and sharding is None:
        # One of 64 bits while x64 is off, which a ShapeDtypeStruct cannot say.
        return ShapedArray(tuple(sizes), aval.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(sizes, aval.dtype, weak_type=weak, sharding=sharding)


# --- the body alone, for `global_view`, which evaluates it without a map


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Body:
    """The jaxpr of the function of one slice.

    Its inputs are the captured arrays that are lifted, then a slice `[*s]` of each argument leaf.
    """

    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    inner: tuple[InnerAxis, ...]  # the axes of pmaps inside

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.lifted.jaxpr

    @classmethod
    def of(cls, options: Options, call: Call) -> "Body":
        """Trace the function on slices of global arguments that have types."""
        frame = meshes.Frame((options.axis_name,))
        outputs: list[tuple[Any, tuple[Axis, ...]]] = []

        def body(*slices: jax.Array) -> list[Any]:
            with frame.active():
                output = call.run(slices)
            leaves, structure = jax.tree.flatten(output)
            out_axes = axes.spread_out_axes(options.out_axes, output, options.fun_name)
            outputs.append((structure, out_axes))
            return leaves

        body.__name__ = body.__qualname__ = options.fun_name
        body.__wrapped__ = call.fun  # pyright: ignore[reportFunctionMemberAccess]  # JAX names its line
        environment = [(options.axis_name, call.size)]
        types = []
        for leaf, axis in zip(call.leaves, call.axes, strict=True):
            shape = list(type_of(leaf).shape)
            if axis is not None:
                del shape[axis]
            types.append(type_of(leaf, shape))
        trace = functools.partial(jax.make_jaxpr(body, axis_env=environment), *types)
        with captures.tracing(options.captures):
            jaxpr = _trace_on_mesh_if_needed(trace, options, call)
        structure, out_axes = outputs[-1]
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        return cls(lifted, structure, out_axes, tuple(frame.wanted))


def _trace_on_mesh_if_needed(
    trace: Callable[[], ClosedJaxpr], options: Options, call: Call
) -> ClosedJaxpr:
    """Trace a body without a mesh; or on one, if it says something of its mesh, as `pcast` does."""
    try:
        return trace()
    except (AssertionError, RuntimeError) as error:
        signs = ("ManualAxisType", "requires a non-empty mesh in context")
        if not any(sign in str(error) for sign in signs):
            raise
    mesh = options.choice.lay_out(call.size, whole=True).mesh.abstract_mesh
    mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
    if options.other_axes:
        axis_types = (*mesh.axis_types, *(AxisType.Auto for _ in options.other_axes))
        names, sizes = zip(*mesh.shape_tuple, *options.other_axes, strict=True)
        mesh = AbstractMesh(sizes, names, axis_types=axis_types)
    with meshes.context_of(mesh):
        return trace()
