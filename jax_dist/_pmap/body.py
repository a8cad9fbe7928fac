"""A call with its arguments flattened, and the mapped function of one slice as a jaxpr.

The user's Python runs here, once per signature.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, AxisType, Sharding

from jax_dist import _compat
from jax_dist._exceptions import text_of
from jax_dist._pmap import axes, meshes
from jax_dist._pmap.axes import Axis, AxisPrefix
from jax_dist._pmap.meshes import DeviceChoice, InnerAxis
from jax_dist._rewrite import captures, constants
from jax_dist._rewrite.captures import Captures, Lifted
from jax_dist._rewrite.gathers import Gathers
from jax_dist._rewrite.programs import Memo
from jax_dist._usage import counted
from jax_dist.errors import StaticArgumentError, UnboundAxisError, refusal


@dataclasses.dataclass(frozen=True)
class Options:
    """What was said to pmap, checked."""

    axis_name: Any  # None where the user gave none
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    static: tuple[int, ...]  # positions, ascending
    donated: tuple[int, ...]
    choice: DeviceChoice
    arrays: str  # "local" or "global"
    captures: Captures
    gathers: Gathers
    further: tuple[tuple[Any, int], ...] = ()  # axes of the mesh that a body may name, with sizes


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
        """Of the mapped axis. Raises MappedAxisError or AxesError where there is no one size."""
        return axes.mapped_size(self.leaves, self.axes, self.paths, self.fun_name)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The body, on its arguments as it sees them."""
        args, kwargs = self.rebuild(leaves)
        return self.fun(*args, **kwargs)

    @classmethod
    def bind(
        cls, options: Options, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "Call":
        """Flattens the arguments, and finds the mapped axis of each leaf.

        Raises:
          AxesError: in_axes is no prefix of the arguments.
          StaticArgumentError: a static argument is not among `args`, or cannot be hashed.
        """
        name = options.choice.fun_name
        check_static(options, fun, args)
        numbers = [number for number in range(len(args)) if number not in options.static]
        mapped_args = tuple(args[number] for number in numbers)
        in_axes = options.in_axes
        is_each = isinstance(in_axes, tuple | list) and len(in_axes) > len(numbers)
        if options.static and is_each and all(number < len(in_axes) for number in numbers):
            in_axes = tuple(in_axes[number] for number in numbers)

        def rebuild(leaves: Sequence[Any]) -> tuple[tuple, dict]:
            values, keywords = jax.tree.unflatten(structure, leaves)
            whole = list(args)
            for number, value in zip(numbers, values, strict=True):
                whole[number] = value
            return tuple(whole), keywords

        def paths() -> list[str]:
            return axes.argument_paths(fun, mapped_args, kwargs, numbers)

        leaves, structure = jax.tree.flatten((mapped_args, kwargs))
        leaf_axes = axes.spread_in_axes(in_axes, mapped_args, kwargs, name)
        owned = [*zip(numbers, mapped_args, strict=True), *sorted(kwargs.items())]
        owners = tuple(owner for owner, tree in owned for _ in jax.tree.leaves(tree))
        static = tuple(args[number] for number in options.static)
        return cls(fun, rebuild, leaves, leaf_axes, owners, paths, name, structure, static)

    @classmethod
    def of_taken(
        cls, taken: _compat.TakenPmap, leaves: Sequence[Any], fun: Callable, name: str
    ) -> "Call":
        """The call of a `jax.pmap` that was taken over; `fun` has the place of its function."""

        def rebuild(values: Sequence[Any]) -> tuple[tuple, dict]:
            return jax.tree.unflatten(taken.in_tree, list(values))

        args, kwargs = rebuild(leaves)
        numbers, keywords = rebuild(range(len(leaves)))
        owned = [*enumerate(numbers), *keywords.items()]
        owner_of = {place: owner for owner, tree in owned for place in jax.tree.leaves(tree)}
        owners = tuple(owner_of[place] for place in range(len(leaves)))
        paths = lambda: axes.argument_paths(fun, args, kwargs, range(len(args)))
        return cls(fun, rebuild, list(leaves), taken.in_axes, owners, paths, name)


def check_static(options: Options, fun: Callable, args: tuple[Any, ...]) -> None:
    """Raises StaticArgumentError for a static argument that is not there, or has no hash."""
    static, name = options.static, options.choice.fun_name
    if static and static[-1] >= len(args):
        given = counted(len(args), "positional argument")
        which = [f"static_broadcasted_argnums is {static}", f"the call has {given}"]
        do, most = "Pass them by position.", axes.positional_count(fun)
        if most is not None and static[-1] >= most:
            which.append(f"the function takes {counted(most, 'positional argument')}")
            do = f"Count from 0: the last position is {most - 1}." if most else "Leave it out."
        raise refusal(
            StaticArgumentError,
            what=f"pmap of '{name}' was called without one of its static arguments",
            which=which,
            why="static arguments are found by their position",
            do=do,
        ) from None
    for number in static:
        try:
            hash(args[number])
        except TypeError:
            path, value = axes.argument_name(fun, number), args[number]
            raise refusal(
                StaticArgumentError,
                what=f"Non-hashable static arguments are not supported by pmap of '{name}'",
                which=[f"{path} is a {type(value).__name__}: {value!r}"],
                why="each new value of a static argument is compiled for, and found again by "
                "its hash",
                do="Pass a hashable value (a tuple for a list), or map it with in_axes=None.",
            ) from None


def any_tracer(leaves: Iterable[Any]) -> bool:
    """Whether the call is part of a trace outside."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Body:
    """The function of one slice, for one signature.

    The inputs of its jaxpr are the captured arrays that are lifted, and then a slice `[*s]` of each
    leaf of the arguments. Collectives in it name axes as the user does.
    """

    name: str  # of the function, for messages
    axis: Any  # the name of the mapped axis in it
    lifted: Lifted
    out_tree: Any
    out_axes: tuple[Axis, ...]
    inner: tuple[InnerAxis, ...]  # what pmaps inside want, by depth
    regions: frozenset[str]  # the abstract axes of their shard_maps
    names_meshes: bool  # in types, as captured arrays that lie on several devices have them

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.lifted.jaxpr

    def result(self, size: int) -> Any:
        """The types of the whole output, for so many slices."""
        types = []
        for aval, axis in zip(self.jaxpr.out_avals, self.out_axes, strict=True):
            shape = axes.stacked(aval.shape, axis, size)
            types.append(jax.ShapeDtypeStruct(shape, aval.dtype))
        return jax.tree.unflatten(self.out_tree, types)

    @classmethod
    def of(cls, options: Options, call: Call) -> "Body":
        """Traces the function of one slice, for whole arguments that have types."""
        name = options.choice.axis_name if options.axis_name is None else options.axis_name
        around = meshes.Frame.around()
        if around is not None and options.axis_name is None:
            name = around.free_name(None)
        frame = meshes.Frame((*(around.names if around else ()), name))
        output_of: list[tuple[Any, tuple[Axis, ...]]] = []

        def body(*slices: jax.Array) -> list[Any]:
            with frame.entered():
                output = call.run(slices)
            out_axes = axes.spread_out_axes(options.out_axes, output, options.choice.fun_name)
            leaves, structure = jax.tree.flatten(output)
            # Where the mapped dimension goes: the slices have one dimension less.
            ranks = [jnp.ndim(leaf) + 1 for leaf in leaves]
            pairs = zip(out_axes, ranks, strict=True)
            output_of.append((structure, tuple(a if a is None else a % rank for a, rank in pairs)))
            return leaves

        body.__name__ = body.__qualname__ = options.choice.fun_name
        body.__wrapped__ = call.fun  # pyright: ignore[reportFunctionMemberAccess]  # JAX names its line
        environment = [(name, call.size)]
        types = []
        for leaf, axis in zip(call.leaves, call.axes, strict=True):
            shape = list(type_of(leaf).shape)
            if axis is not None:
                del shape[axis]
            types.append(type_of(leaf, shape))
        policy = options.captures if _compat.CAN_REWRITE else "allow"
        trace = functools.partial(jax.make_jaxpr(body, axis_env=environment), *types)
        with captures.tracing(policy):
            jaxpr = _jaxpr_of(trace, options, call, frame)
        names_meshes = any(
            constants.lies_on_many(each.value) for each in constants.baked_arrays(jaxpr).values()
        )
        structure, out_axes = output_of[-1]
        lifted = captures.lift(jaxpr, call.fun, options.choice.fun_name, policy)
        return cls(
            call.fun_name,
            name,
            lifted,
            structure,
            out_axes,
            tuple(frame.inner),
            frozenset(frame.regions),
            names_meshes,
        )


def tracer(options: Options, fun: Callable[[], Callable]) -> Callable[[Call], Body]:
    """Gives the body for whole arguments of some types; their values do not matter.

    `fun` gives the function: held weakly, where this is cached on its account.
    """
    memo = Memo(
        options.choice.fun_name,
        lambda args, kwargs: Body.of(options, Call.bind(options, fun(), args, kwargs)),
        _compat.JitOptions(static_argnums=options.static),
    )

    def body(call: Call) -> Body:
        args, kwargs = call.rebuild([type_of(leaf) for leaf in call.leaves])
        with meshes.outside_of_meshes():
            return memo.of(args, kwargs)

    return body


def _jaxpr_of(
    trace: Callable[[], ClosedJaxpr], options: Options, call: Call, frame: meshes.Frame
) -> ClosedJaxpr:
    """What `trace` makes of a body, or says that it cannot.

    There is no mesh while a body is traced, for a pmap inside could not have another one. One that
    says something of the mesh that it runs on, as `pcast` and a constraint do, is traced again, as
    if on a mesh.
    """
    try:
        return trace()
    except (AssertionError, RuntimeError) as error:
        signs = ("ManualAxisType", "requires a non-empty mesh in context")
        said = "" if meshes.Frame.around() is not None else text_of(error)
        if not any(sign in said for sign in signs):
            raise
        mesh = options.choice.lay_out(call.size, whole=True).mesh.abstract_mesh
        mesh = mesh.update_axis_types(dict.fromkeys(mesh.axis_names, AxisType.Manual))
        if options.further:
            axis_types = (*mesh.axis_types, *(AxisType.Auto for _ in options.further))
            names, sizes = zip(*mesh.shape_tuple, *options.further, strict=True)
            mesh = AbstractMesh(sizes, names, axis_types=axis_types)
        with meshes.context_of(mesh):
            return trace()
    except NameError as error:
        if isinstance(error, UnboundAxisError) or not (found := _UNBOUND.search(text_of(error))):
            raise
        axis = found["axis"]
        raise refusal(
            UnboundAxisError,
            what=f"Found an unbound axis name: {axis}, in pmap of '{options.choice.fun_name}'",
            which=[f"axis_name={each!r} is mapped" for each in frame.given_names()]
            or ["this pmap was given no axis_name"],
            why="a collective goes over an axis that a pmap or vmap around it has named",
            do=f"Give axis_name={axis!r} to pmap, or use the name that it has.",
        ).with_traceback(error.__traceback__) from None


_UNBOUND = re.compile(r"unbound axis name: (?P<axis>\S+?)\.?(?: |$)")


def type_of(leaf: Any, shape: Sequence[int] | None = None, sharding: Sharding | None = None) -> Any:
    """Its type, or that of another shape, wherever it lies. TypeError for what is no array."""
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
