"""Conversion of `in_axes` and `out_axes` to `PartitionSpec`s, and the names of arguments.

Shapes: `N` is the size of the mapped axis, one slice a device; `*s` is the rest.
"""

import contextlib
import functools
import inspect
import operator
import reprlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dist.errors import ArgumentTypeError, MappedAxisError

Axis: TypeAlias = int | None  # the mapped dimension of one array; None: not mapped
AxisPrefix: TypeAlias = Any  # a tree of Axis, each standing for all leaves below it


def argument_numbers(argument: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Return the positions in `value` ascending, each once; raise ValueError for a negative one."""
    with contextlib.suppress(TypeError):
        values = value if isinstance(value, Iterable) else (value,)
        numbers = {operator.index(number) for number in values}
        if min(numbers, default=0) >= 0:
            return tuple(sorted(numbers))
    raise ValueError(f"pmap {argument} must hold non-negative integers, got {value!r}.")


def spread_prefix(prefix: Any, tree: Any) -> tuple[Any, ...]:
    """Return `(0, 0, 1)` for the prefix `(0, 1)` of `((x, y), z)`; ValueError if it is none."""
    values, structure = jax.tree.flatten(prefix, is_leaf=is_none)
    pairs = zip(values, structure.flatten_up_to(tree), strict=True)
    return tuple(value for value, subtree in pairs for _ in jax.tree.leaves(subtree))


def spread(
    prefix: AxisPrefix, tree: Any, argument: str, fun_name: str, *, has_keywords: bool = False
) -> tuple[Any, ...]:
    """Return the axis of each leaf of `tree` from `prefix`; MappedAxisError if it is no prefix.

    `argument`, which is "in_axes" or "out_axes", and what follows are for the text of the error.
    """
    try:
        return spread_prefix(prefix, tree)
    except ValueError:
        reason = _describe_mismatch(prefix, tree, argument)
        if has_keywords:
            reason += " Note that each argument passed by keyword is mapped over its leading axis."
        what = "output" if argument == "out_axes" else "positional arguments"
        raise MappedAxisError(
            f"pmap of '{fun_name}': {argument} {prefix!r} is not a tree prefix of the {what}: "
            + reason
        ) from None


def _describe_mismatch(prefix: AxisPrefix, tree: Any, argument: str) -> str:
    """Return JAX's text on where `prefix` differs from `tree`, with the path."""
    pair = (prefix, tree) if argument == "out_axes" else ((prefix, 0), (tree, {}))  # with kwargs
    try:
        jax.tree.broadcast(*pair, is_leaf=is_none)
    except ValueError as error:
        return str(error).replace("broadcast_prefix prefix_tree", f"pmap {argument}")
    return ""


def spread_in_axes(
    in_axes: AxisPrefix, args: tuple[Any, ...], kwargs: dict[str, Any], fun_name: str
) -> tuple[Axis, ...]:
    """Return one axis for each leaf of `(args, kwargs)`.

    `in_axes` is for positional arguments; keyword arguments are mapped over dimension 0.
    """
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    positional = spread(in_axes, args, "in_axes", fun_name, has_keywords=bool(kwargs))
    return positional + (0,) * len(jax.tree.leaves(kwargs))


def spread_out_axes(out_axes: AxisPrefix, output: Any, fun_name: str) -> tuple[Axis, ...]:
    """Return the dimension in which each leaf of one device's `output` is stacked, not negative."""
    axes = spread(out_axes, output, "out_axes", fun_name)
    leaves, _ = jax.tree.flatten_with_path(output)
    normalized: list[Axis] = []
    for (path, leaf), axis in zip(leaves, axes, strict=True):
        name = f"output{jax.tree_util.keystr(path)}"
        if not _is_array_like(leaf):
            raise ArgumentTypeError(
                f"pmap of '{fun_name}' returned a non-array value: {name} is a "
                f"{type(leaf).__name__} ({reprlib.repr(leaf)})."
            )
        rank = jnp.ndim(leaf) + 1  # of the stacked result
        if axis is not None and not -rank <= axis < rank:
            raise MappedAxisError(
                f"pmap of '{fun_name}': out_axes {axis} is out of range for {name} of shape "
                f"{jnp.shape(leaf)} on each device."
            )
        normalized.append(None if axis is None else axis % rank)
    return tuple(normalized)


def spec_of_axis(axis: Axis, name: Hashable) -> P:
    """Return the spec that shards dimension `axis`, which is not negative, over mesh axis `name`.

    >>> spec_of_axis(2, "i") == P(None, None, "i")
    True
    """
    return P() if axis is None else P(*[None] * axis, name)


def resize(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """Return `shape` with dimension `axis` of another size."""
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def stack(shape: Sequence[int], axis: Axis, size: int) -> tuple[int, ...]:
    """Return the shape of `size` slices stacked along a new dimension `axis`; unchanged if None."""
    return tuple(shape) if axis is None else (*shape[:axis], size, *shape[axis:])


def mapped_size(
    leaves: Sequence[Any], axes: Sequence[Axis], paths: Callable[[], list[str]], fun_name: str
) -> int:
    """Return the one size of all leaves along their mapped axes; errors name leaves by `paths`."""
    sizes: dict[int, int] = {}  # by the index of a mapped leaf
    for index, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        if not _is_array_like(leaf):
            raise ArgumentTypeError(
                f"pmap of '{fun_name}' got a non-array argument: {paths()[index]} is a "
                f"{type(leaf).__name__} ({reprlib.repr(leaf)}). Mark it static with "
                "static_broadcasted_argnums or bind it with functools.partial."
            )
        if axis is None:
            continue
        shape = jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise MappedAxisError(
                f"pmap of '{fun_name}': in_axes {axis} is out of range for {paths()[index]}, which "
                f"has shape {shape}."
            )
        sizes[index] = shape[axis]
    if not sizes:
        unmapped = f"not mapped: {', '.join(paths())}" if leaves else "it got no arrays"
        raise MappedAxisError(
            f"pmap of '{fun_name}' requires at least one argument with a mapped axis ({unmapped}). "
            "Map one, such as jax.numpy.arange(size)."
        )
    distinct_sizes = set(sizes.values())
    if len(distinct_sizes) > 1:
        names = paths()
        sizes_by_name = ", ".join(f"{names[index]}: {size}" for index, size in sizes.items())
        raise MappedAxisError(
            f"pmap of '{fun_name}' got arguments of different sizes along the mapped axis; all "
            f"must be equal ({sizes_by_name})."
        )
    if distinct_sizes == {0}:
        raise MappedAxisError(f"pmap of '{fun_name}' got an empty mapped axis (size 0).")
    return distinct_sizes.pop()


def function_name(fun: Callable) -> str:
    """Return a name without a memory address: it is part of the key in the compilation cache."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def argument_name(fun: Callable, argument: int | str) -> str:
    """Return the name of an argument: "x"; "args[2]" for a position without one."""
    if isinstance(argument, str):  # passed by keyword
        return argument
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with contextlib.suppress(TypeError, ValueError):  # builtins have no signature
        parameters = inspect.signature(fun).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        if argument < len(names):
            return names[argument]
    return f"args[{argument}]"


def _is_array_like(value: Any) -> bool:
    """Return whether JAX takes `value` as an array, as it does not for NumPy's texts and times."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind not in "OSUmM"
    is_number = isinstance(value, bool | int | float | complex)
    return is_number or hasattr(value, "shape") or hasattr(value, "__jax_array__")


def is_none(value: Any) -> bool:
    """Return whether `value` is None; for trees of axes, in which None is a leaf."""
    return value is None
