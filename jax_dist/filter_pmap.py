"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything."""

import dataclasses
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from jax_dist.errors import ArgumentTypeError, MappedAxisError
from jax_dist.pmap import pmap

_AXES = (None, *range(-32, 33))  # of results: the body returns a list of arrays for each
_HOLE = object()  # where an array was


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _first(leaf: Any) -> int | None:
    return 0 if _is_array(leaf) else None


def filter_pmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = _first,
    out_axes: Any = _first,
    axis_name: str | None = None,
    axis_size: int | None = None,
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
      axis_name: names the mapped axis for collectives.
      axis_size: needed where no argument is mapped.
      donate: "all" donates the memory of every array; "warn" too, and warns where it is of no use.
      **options: those of `jax_dist.pmap`, but for static and donated positions.

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
    options.update(axis_name=axis_name, axis_size=axis_size)
    if fun is None:
        return functools.partial(
            filter_pmap, in_axes=in_axes, out_axes=out_axes, donate=donate, **options
        )
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"donate must be 'all', 'warn' or 'none', not {donate!r}.")
    for name in {"static_broadcasted_argnums", "donate_argnums"} & options.keys():
        raise ArgumentTypeError(f"filter_pmap takes no {name}: arrays are mapped, the rest static.")
    filtered = _Filtered(fun, in_axes, out_axes, donate, options)
    return functools.update_wrapper(filtered, fun, updated=())


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constants:
    """All of a call but its arrays; equal ones share a program."""

    tree: Any  # of the function and the arguments
    rest: tuple[Any, ...]  # the leaves, with _HOLE for arrays
    numbers: tuple[str, ...]  # tell 1, 1.0 and True apart
    in_axes: tuple[int | None, ...]
    out_axes: tuple[Any, Any]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """All of the results of a program but their arrays."""

    tree: Any
    rest: list[Any]
    lists: list[int]  # for each array, the index of its axis in _AXES


class _Filtered:
    """A function mapped by `filter_pmap`."""

    def __init__(self, fun: Any, in_axes: Any, out_axes: Any, donate: str, options: dict) -> None:
        self.__wrapped__, self._in_axes, self._donate, self._options = fun, in_axes, donate, options
        # Weakly, for programs live on in the caches of JAX.
        self._function = weakref.ref(fun) if isinstance(fun, types.FunctionType) else fun
        leaves, tree = jax.tree.flatten(out_axes, is_leaf=lambda axis: axis is None)
        self._out_axes = tuple(leaves), tree
        self._by_axes: dict[tuple[int | None, ...], Any] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._partition(args, kwargs)
        if self._donate != "all":
            return _combine(self._mapped(call[0])(*call))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return _combine(self._mapped(call[0])(*call))

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the program for these arguments; arrays may be `jax.ShapeDtypeStruct`s."""
        call = self._partition(args, kwargs)
        return self._mapped(call[0]).lower(*call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _mapped(self, constants: _Constants) -> Any:
        axes = constants.in_axes
        if axes not in self._by_axes:
            name = getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__)
            donated = () if self._donate == "none" else range(1, 1 + len(axes))
            options = {"in_axes": (None, *axes), "out_axes": (None, _AXES)} | self._options
            self._by_axes[axes] = pmap(_body(name), donate_argnums=donated, **options)
        return self._by_axes[axes]

    def _partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the constants and the arrays of a call."""
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
        axes = [None] * (len(leaves) - len(axes)) + axes
        pairs: list[Any] = [pair for pair in zip(leaves, axes, strict=True) if _is_array(pair[0])]
        if (size := self._options["axis_size"]) is not None:  # in case that nothing is mapped
            pairs.append((np.broadcast_to(np.int32(0), size), 0))
        rest = tuple(_HOLE if _is_array(leaf) else leaf for leaf in leaves)
        numbers = tuple(repr(leaf) for leaf in rest if isinstance(leaf, int | float | complex))
        in_axes = tuple(axis for _, axis in pairs)
        constants = _Constants(tree, rest, numbers, in_axes, self._out_axes)
        try:
            hash(constants)
        except TypeError as error:
            text = str(error)  # of static fields, too, which are no leaves
            for path, leaf in jax.tree.leaves_with_path(args):
                if not _is_array(leaf) and type(leaf).__hash__ is None:
                    text = f"got {type(leaf).__name__} at args{jax.tree_util.keystr(path)}"
            raise ArgumentTypeError(f"non-array leaves must be hashable: {text}") from error
        return constants, *(array for array, _ in pairs)


@functools.cache
def _body(name: str) -> Callable[..., Any]:
    """Return what is mapped for all functions of a name, which is that of the program."""

    def body(constants: _Constants, *arrays: Any) -> tuple[Any, ...]:
        function, args = _fill(constants.tree, constants.rest, arrays)
        if isinstance(function, weakref.ref):
            function: Any = function()
        result = function(*args)
        leaves, tree = jax.tree.flatten(result)
        axes = _resolve("out_axes", constants.out_axes[1].unflatten(constants.out_axes[0]), result)
        structure, arrays_of = _Structure(tree, [], []), [[] for _ in _AXES]
        for leaf, axis in zip(leaves, axes, strict=True):
            is_mapped = axis is not None or _is_array(leaf)
            structure.rest.append(_HOLE if is_mapped else leaf)
            if is_mapped:  # an axis that is too far off comes last, and pmap raises
                index = 0 if axis is None else 33 + max(-32, min(axis, 32))
                structure.lists.append(index)
                arrays_of[index].append(leaf)
        return structure, tuple(arrays_of)

    body.__name__ = body.__qualname__ = name
    return body


def _combine(results: tuple[_Structure, tuple[list[Any], ...]]) -> Any:
    structure, arrays_of = results
    iterators = list(map(iter, arrays_of))
    arrays = (next(iterators[index]) for index in structure.lists)
    return _fill(structure.tree, structure.rest, arrays)


def _fill(tree: Any, rest: Iterable[Any], arrays: Iterable[Any]) -> Any:
    iterator = iter(arrays)
    return tree.unflatten(next(iterator) if leaf is _HOLE else leaf for leaf in rest)


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
