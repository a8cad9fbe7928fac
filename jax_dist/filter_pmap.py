"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything."""

import dataclasses
import functools
import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jax_dist.errors import ArgumentTypeError, MappedAxisError
from jax_dist.pmap import pmap

_AXES = (None, *range(-32, 33))  # of results: the body returns a list of arrays for each


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _first(leaf: Any) -> int | None:
    return 0 if _is_array(leaf) else None


def filter_pmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = _first,
    out_axes: Any = _first,
    donate: Literal["all", "warn", "none"] = "none",
    **options: Any,
) -> Any:
    """Map a function of Equinox modules and other trees over devices.

    Takes the place of `equinox.filter_pmap`, with its arguments and its numbers. Arrays are mapped,
    and everything else, such as activation functions and strings, is a constant: another value
    compiles again. Arrays that `fun` itself holds, where it is a module, go to all devices.

    Args:
      fun: called with positional arguments only. Without it, `filter_pmap` returns a decorator.
      in_axes: an integer, None, a function of a leaf that gives one of these, such as
        `equinox.if_array(0)`, or a tree of these that is a prefix of the arguments; or a dictionary
        from names of parameters to these. By default, arrays are mapped over dimension 0.
      out_axes: the same for the results. None for an array gives the value of the first device.
      donate: "all" donates the memory of every array; "warn" too, and warns where it is of no use.
      **options: those of `jax_dist.pmap`, such as `axis_name`, but for static and donated
        positions. `axis_size` is needed where no argument is mapped.

    Returns:
      The mapped function, with `__wrapped__` and `lower`.

    Raises:
      TypeError: an axis is no integer, None or function; a leaf that is no array cannot be hashed.
      ValueError: `donate` is none of its choices; the axes do not fit; see also `pmap`.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> make = filter_pmap(lambda key: eqx.nn.Linear(2, 3, key=key))
    >>> models = make(jax.random.split(jax.random.key(0), 4))
    >>> filter_pmap(lambda model, x: model(x))(models, jnp.ones((4, 2))).shape
    (4, 3)
    """
    if fun is None:
        axes = {"in_axes": in_axes, "out_axes": out_axes}
        return functools.partial(filter_pmap, **axes, donate=donate, **options)
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"donate must be 'all', 'warn' or 'none', not {donate!r}.")
    for name in {"static_broadcasted_argnums", "donate_argnums"} & options.keys():
        raise ArgumentTypeError(f"filter_pmap takes no {name}: arrays are mapped, the rest static.")
    filtered = _Filtered(fun, in_axes, out_axes, donate, options)
    return functools.update_wrapper(filtered, fun, updated=())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """All of a call, or of its results, but the arrays; calls of equal keys share a program."""

    key: Any
    tree: Any = dataclasses.field(compare=False)
    leaves: list[Any] = dataclasses.field(compare=False)  # None for arrays
    positions: Sequence[int] = dataclasses.field(default=(), compare=False)  # of arrays of results


class _Filtered:
    """A function mapped by `filter_pmap`."""

    def __init__(self, fun: Any, in_axes: Any, out_axes: Any, donate: str, options: dict) -> None:
        self.__wrapped__, self._in_axes, self._donate, self._options = fun, in_axes, donate, options
        # Weakly, for programs live on in the caches of JAX.
        self._function = weakref.ref(fun) if isinstance(fun, types.FunctionType) else fun
        leaves, tree = jax.tree.flatten(out_axes, is_leaf=lambda axis: axis is None)
        self._out_axes = tuple(leaves), tree
        self._mapped = functools.cache(self._map)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        mapped, *call = self._partition(args, kwargs)
        if self._donate != "all":
            return _combine(*mapped(*call))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return _combine(*mapped(*call))

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the program for these arguments; arrays may be `jax.ShapeDtypeStruct`s."""
        mapped, *call = self._partition(args, kwargs)
        return mapped.lower(*call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _map(self, axes: tuple[int | None, ...]) -> Any:
        name = getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__)
        donated = () if self._donate == "none" else 1
        options = {"in_axes": (None, list(axes), 0), "out_axes": (None, _AXES)} | self._options
        return pmap(_body(name), donate_argnums=donated, **options)

    def _partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the mapped body, and its arguments: constants, arrays and an array to map."""
        import equinox as eqx  # where it is not installed, nobody calls this

        if kwargs:
            raise ArgumentTypeError(f"filter_pmap got keyword arguments: {', '.join(kwargs)}.")
        axes = self._in_axes
        if isinstance(axes, dict):
            names = list(inspect.signature(self.__wrapped__).parameters)[: len(args)]
            for name in axes.keys() - names:
                raise MappedAxisError(f"in_axes names {name!r}, which is no argument of the call.")
            axes = tuple(axes.get(name, _first) for name in names)
        axes = _resolve("in_axes", axes, args)
        leaves, tree = jax.tree.flatten((self._function, args))
        arrays, rest = eqx.partition(leaves, _is_array)
        # 1, 1.0 and True are equal, as 0.0 and -0.0 are.
        numbers = tuple(repr(leaf) for leaf in rest if isinstance(leaf, int | float | complex))
        static = _Static((tree, tuple(rest), numbers, self._out_axes), tree, rest)
        try:
            hash(static)
        except TypeError as error:
            text = str(error)  # of static fields, too, which are no leaves
            for path, leaf in jax.tree.leaves_with_path(args):
                if not _is_array(leaf) and type(leaf).__hash__ is None:
                    text = f"got {type(leaf).__name__} at args{jax.tree_util.keystr(path)}"
            raise ArgumentTypeError(f"non-array leaves must be hashable: {text}") from error
        size = self._options.get("axis_size")
        filler = None if size is None else np.broadcast_to(np.int32(0), size)
        mapped = self._mapped((*[None] * (len(leaves) - len(axes)), *axes))
        return mapped, static, arrays, filler


@functools.cache
def _body(name: str) -> Callable[..., Any]:
    """Return what is mapped for all functions of a name, which is that of the program."""
    import equinox as eqx

    def body(static: _Static, arrays: list[Any], filler: Any) -> tuple[Any, ...]:
        function, args = static.tree.unflatten(eqx.combine(arrays, static.leaves))
        if isinstance(function, weakref.ref):
            function: Any = function()
        result = function(*args)
        leaves, tree = jax.tree.flatten(result)
        axes, axes_tree = static.key[-1]
        axes = _resolve("out_axes", axes_tree.unflatten(axes), result)
        positions, results = list[int](), [[] for _ in _AXES]
        # An axis that is too far off counts as the last, and pmap raises.
        indices = [0 if axis is None else 33 + max(-32, min(axis, 32)) for axis in axes]
        for position in sorted(range(len(leaves)), key=indices.__getitem__):
            if axes[position] is not None or _is_array(leaves[position]):
                positions.append(position)
                results[indices[position]].append(leaves[position])
                leaves[position] = None
        return _Static(object(), tree, leaves, positions), tuple(results)

    body.__name__ = body.__qualname__ = name
    return body


def _combine(static: _Static, results: tuple[list[Any], ...]) -> Any:
    leaves = list(static.leaves)
    for position, array in zip(static.positions, itertools.chain(*results), strict=True):
        leaves[position] = array
    return static.tree.unflatten(leaves)


def _resolve(argument: str, axes: Any, tree: Any) -> list[Any]:
    """Return an axis for each leaf, from a prefix of the tree."""
    resolved: list[Any] = []

    def resolve(axis: Any, part: Any) -> None:
        leaves = jax.tree.leaves(part)
        resolved.extend(axis(leaf) if callable(axis) else axis for leaf in leaves)

    try:
        jax.tree.map(resolve, axes, tree, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        text = f"a prefix of {jax.tree.structure(tree)}, not {axes!r}"
        raise MappedAxisError(f"{argument} of filter_pmap must be {text}.") from error
    for axis in resolved:
        if axis is not None and not isinstance(axis, int):
            text = f"integers, None or functions such as equinox.if_array(0), not {axis!r}"
            raise ArgumentTypeError(f"{argument} of filter_pmap must be {text}.")
    return resolved
