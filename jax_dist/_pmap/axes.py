"""pmap's in_axes and out_axes, said in shard_map's words.

Shapes: `N` is the size of the mapped axis, spread one slice a device; `*s` is the rest.
"""

import collections
import contextlib
import functools
import inspect
import operator
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_dist.errors import ArgumentTypeError, AxesError, MappedAxisError, refusal

Axis: TypeAlias = int | None  # where the mapped axis sits in one array; None: not mapped
AxisPrefix: TypeAlias = Any  # a tree of Axis, each standing for all leaves below it


def check_function(fun: object) -> None:
    """Raises TypeError for what cannot be mapped."""
    if not callable(fun):
        raise refusal(
            TypeError,
            what="pmap needs a function",
            which=[f"fun is a {type(fun).__name__}: {fun!r}"],
            why="it maps a function over devices",
            do="Pass the function first, as in pmap(step, axis_name='i').",
        )


def check_name(axis_name: Any) -> None:
    """Raises ArgumentTypeError unless a collective can find an axis by this name."""
    try:
        hash(axis_name)
    except TypeError:
        holds_one = isinstance(axis_name, list) and len(axis_name) == 1
        name = axis_name[0] if holds_one else "i"
        raise refusal(
            ArgumentTypeError,
            what="'axis_name' argument to pmap must be hashable",
            which=[f"axis_name={axis_name!r}, of type {type(axis_name).__name__}"],
            why="collectives find the axis by its name",
            do=f"Give one name, as in axis_name={name!r}.",
        ) from None


def argument_numbers(argument: str, value: int | Iterable[int]) -> tuple[int, ...]:
    """Ascending, each once. Raises ValueError unless they are positions."""
    with contextlib.suppress(TypeError):
        numbers = {operator.index(n) for n in (value if isinstance(value, Iterable) else (value,))}
        if min(numbers, default=0) >= 0:
            return tuple(sorted(numbers))
    raise refusal(
        ValueError,
        what=f"pmap {argument} must hold non-negative integers",
        which=[f"{argument}={value!r}"],
        why="arguments are counted from the first one, which is 0",
        do="Count the position of the argument from the left.",
    )


def check_axes(argument: str, prefix: AxisPrefix) -> None:
    """Raises ArgumentTypeError unless all leaves of `prefix` are integers or None."""
    for leaf in jax.tree.leaves(prefix):
        if type(leaf) is not int:
            raise refusal(
                ArgumentTypeError,
                what=f"pmap {argument} must be an int, None, or a container of these",
                which=[f"{argument}={prefix!r} holds {leaf!r}, of type {type(leaf).__name__}"],
                why="it says which dimension of each array is mapped",
                do="Give the number of the dimension, or None for what is not mapped.",
            )


def spread_in_axes(
    in_axes: AxisPrefix, args: tuple[Any, ...], kwargs: dict[str, Any], fun_name: str
) -> tuple[Axis, ...]:
    """One axis for each leaf of `(args, kwargs)`, in their order.

    `in_axes` speaks of the positional arguments; what is passed by keyword is mapped over its
    leading axis.
    """
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    positional = _spread(in_axes, args, "in_axes", fun_name, keywords=bool(kwargs))
    return (*positional, *[0] * len(jax.tree.leaves(kwargs)))


def spread_out_axes(out_axes: AxisPrefix, output: Any, fun_name: str) -> tuple[Axis, ...]:
    """One axis for each leaf of `output`; a negative one counts from the end of the result."""
    axes = _spread(out_axes, output, "out_axes", fun_name, keywords=False)
    leaves, _ = jax.tree.flatten_with_path(output)
    for (path, leaf), axis in zip(leaves, axes, strict=True):
        name = f"output{jax.tree_util.keystr(path)}"
        if not _is_array_like(leaf):
            raise refusal(
                ArgumentTypeError,
                what=f"pmap of '{fun_name}' cannot return a value that is no array",
                which=[f"{name} is a {type(leaf).__name__}: {leaf!r}"],
                why="each device computes its own value, and they are put together along out_axes",
                do="Return arrays, numbers, and containers of them.",
            )
        rank = jnp.ndim(leaf) + 1
        if axis is not None and not -rank <= axis < rank:
            which = [f"{name} has shape {jnp.shape(leaf)} on each device, out_axes {axis}"]
            raise _out_of_range(fun_name, which, "out_axes")
    return axes


def spec_of_axis(axis: Axis, ndim: int, name: Hashable) -> P:
    """Cuts dimension `axis` of a rank-`ndim` array over the mesh axis `name`.

    >>> spec_of_axis(-1, 3, "i") == P(None, None, "i")
    True
    """
    if axis is None:
        return P()
    return P(*[None] * (axis % ndim), name)


def resized(shape: Sequence[int], axis: Axis, size: int) -> tuple[int, ...]:
    """A shape with another size along its mapped axis, if it has one."""
    if axis is None:
        return tuple(shape)
    axis %= len(shape)
    return (*shape[:axis], size, *shape[axis + 1 :])


def stacked(shape: Sequence[int], axis: Axis, size: int) -> tuple[int, ...]:
    """The shape of so many slices like this one, stacked along an axis, if there is one."""
    return tuple(shape) if axis is None else (*shape[:axis], size, *shape[axis:])


def mapped_size(
    leaves: Sequence[Any], axes: Sequence[Axis], paths: Callable[[], list[str]], fun_name: str
) -> int:
    """The one size that all mapped leaves have along their axis.

    Raises:
      MappedAxisError: no leaf is mapped, or their sizes differ.
      AxesError: a leaf has no such dimension.
    """
    _check_arrays(leaves, paths, fun_name)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    pairs = list(zip(shapes, axes, strict=True))
    short = [i for i, (s, a) in enumerate(pairs) if a is not None and not -len(s) <= a < len(s)]
    if short:
        names = paths()
        _check_lists([(names[i], leaves[i]) for i in short], fun_name)
        which = [f"{names[i]} has shape {shapes[i]}, in_axes {axes[i]}" for i in short]
        raise _out_of_range(fun_name, which, "in_axes")
    sizes = {i: shape[axis] for i, (shape, axis) in enumerate(pairs) if axis is not None}
    distinct = set(sizes.values())
    if not distinct:
        raise refusal(
            MappedAxisError,
            what=f"pmap of '{fun_name}' requires at least one argument with a mapped axis",
            which=[f"{path} has in_axes=None" for path in paths()]
            or ["there is no array argument"],
            why="the size of the mapped axis is read from the arguments",
            do="Map one argument, for example jax.numpy.arange(size) with in_axes=0.",
        )
    if len(distinct) > 1:
        names = paths()
        raise mapped_sizes_differ(fun_name, {names[i]: n for i, n in sizes.items()})
    if distinct == {0}:
        names = paths()
        raise refusal(
            MappedAxisError,
            what=f"pmap of '{fun_name}' got a mapped axis without any slice",
            which=[f"{names[i]} has size 0 along its mapped axis" for i in sizes],
            why="each device takes one slice",
            do="Pass at least one slice, or do not call it for an empty batch.",
        )
    return distinct.pop()


def mapped_sizes_differ(fun_name: str, sizes: Mapping[str, int]) -> MappedAxisError:
    """`sizes`: argument path to size, as in `{"batch['x']": 8, "mask": 7}`."""
    return refusal(
        MappedAxisError,
        what=f"pmap of '{fun_name}' got arguments of different sizes along the mapped axis",
        which=[f"{path} has size {size}" for path, size in sizes.items()],
        why="every device takes one slice of each mapped argument",
        do="Slice them alike, or give in_axes=None to what all devices share.",
    )


def _out_of_range(fun_name: str, which: Sequence[str], argument: str) -> AxesError:
    return refusal(
        AxesError,
        what=f"pmap of '{fun_name}' got an {argument} that is out of range",
        which=which,
        why="the mapped axis must be one of the dimensions of the array",
        do=f"Change {argument}, or give None to what is not mapped.",
    )


def _check_arrays(leaves: Sequence[Any], paths: Callable[[], list[str]], fun_name: str) -> None:
    kinds = {}  # what it is instead, where JAX takes it for no array
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray | np.generic):
            if leaf.dtype.kind in "OSUmM":
                kinds[i] = f"an array of {leaf.dtype}"
        elif not (_is_array_like(leaf) or hasattr(leaf, "__jax_array__")):
            kinds[i] = f"a {type(leaf).__name__}"
    if kinds:
        names = paths()
        raise refusal(
            ArgumentTypeError,
            what=f"pmap of '{fun_name}' cannot take a value that is no array",
            which=[f"{names[i]} is {kinds[i]}: {reprlib.repr(leaves[i])}" for i in kinds],
            why="arguments are cut into slices, or copied to all devices",
            do="Bind it by functools.partial, or name its position in static_broadcasted_argnums.",
        )


def _check_lists(short: Sequence[tuple[str, Any]], fun_name: str) -> None:
    """Finds what is a list of numbers, and was meant to be an array."""
    numbers = [name for name, leaf in short if isinstance(leaf, bool | int | float | complex)]
    elements = [_ELEMENT.fullmatch(name) for name in numbers]
    lists = collections.Counter(found["list"] for found in elements if found)
    for name, length in lists.items():
        if length > 1:
            raise refusal(
                AxesError,
                what=f"pmap of '{fun_name}' got a list of numbers where an array is mapped",
                which=[f"{name} is a list of {length} numbers, each of shape ()"],
                why="a list is a tree of arguments, each of which would have to be cut into slices",
                do=f"Pass one array: jax.numpy.asarray({name}).",
            )


_ELEMENT = re.compile(r"(?P<list>.+)\[\d+\]")


def argument_paths(
    fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Sequence[int]
) -> list[str]:
    """The name of each leaf of `(args, kwargs)`, as in `["batch['x']", "mask"]`.

    `args` are those that are not static, and `numbers` their positions in the call.
    """
    paths = []
    for number, arg in zip(numbers, args, strict=True):
        paths += _leaf_paths(argument_name(fun, number), arg)
    for name in sorted(kwargs):  # a dict is flattened in the order of its sorted keys
        paths += _leaf_paths(name, kwargs[name])
    return paths


def kept(tree: Any) -> Any:
    """The axes as they are now: the containers may be changed later."""
    return jax.tree.map(lambda axis: axis, tree, is_leaf=lambda axis: axis is None)


def function_name(fun: Callable) -> str:
    """Without an address in it, for it is part of the program and of its cache key."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def argument_name(fun: Callable, number: int) -> str:
    """The name of the positional argument at `number`: "x", or "args[2]" where it has none."""
    names, _ = _positions(fun)
    return names[number] if number < len(names) else f"args[{number}]"


def positional_count(fun: Callable) -> int | None:
    """How many positional arguments it takes at most; None if any number, or unknown."""
    names, is_open = _positions(fun)
    return None if is_open else len(names)


def _positions(fun: Callable) -> tuple[list[str], bool]:
    """The names of its positional parameters, and whether it may take more."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # builtins have no signature
        return [], True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds]
    return names, any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)


def _leaf_paths(name: str, tree: Any) -> list[str]:
    return [name + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def _spread(
    prefix: AxisPrefix, tree: Any, argument: str, fun_name: str, *, keywords: bool
) -> tuple[Axis, ...]:
    axes = jax.tree.leaves(prefix, is_leaf=is_none)
    subtrees = _subtrees(prefix, tree)
    if subtrees is None:
        at, below, value = _first_mismatch(prefix, tree)
        full = "positional arguments" if argument == "in_axes" else "output"
        do = f"Make {argument} a tree prefix of the {full}: "
        do += "an integer or None stands for all below it."
        if keywords:
            do += " Note that each argument passed by keyword is mapped over its leading axis."
        raise refusal(
            AxesError,
            what=f"pmap of '{fun_name}' got an {argument} that does not fit its {full}",
            which=[f"{argument}{at} is {below!r}, but there stands {value}"],
            why=f"{argument} must have the structure of the {full}, down to its integers and None",
            do=do,
        )
    counts = [len(jax.tree.leaves(subtree)) for subtree in subtrees]
    return tuple(axis for axis, count in zip(axes, counts, strict=True) for _ in range(count))


def _subtrees(prefix: AxisPrefix, tree: Any) -> list[Any] | None:
    """What stands in `tree` at each leaf of `prefix`; None if that is no prefix."""
    try:
        return jax.tree.structure(prefix, is_leaf=is_none).flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        return None


def _first_mismatch(prefix: AxisPrefix, tree: Any, at: str = "") -> tuple[str, Any, str]:
    """Where `prefix` stops being a prefix of `tree`: the path, what it holds, what stands there."""
    below, kind = _children(prefix)
    values, other_kind = _children(tree)
    if kind != other_kind:
        return at, prefix, _in_words(tree, len(values))
    for (path, part), (_, value) in zip(below, values, strict=True):
        if _subtrees(part, value) is None:
            return _first_mismatch(part, value, at + jax.tree_util.keystr(path))
    return at, prefix, _in_words(tree, len(values))


def _children(tree: Any) -> tuple[list, Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)


def _in_words(value: Any, children: int) -> str:
    if _is_array_like(value):
        return f"an array of shape {jnp.shape(value)}"
    return f"a {type(value).__name__} of length {children}"


def _is_array_like(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, bool | int | float | complex)


def is_none(value: Any) -> bool:
    """For trees of axes, in which None is a leaf."""
    return value is None
