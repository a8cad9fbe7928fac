"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything.

A call is split in two: arrays, which the mapped function takes, and the rest, which stands in the
structure of its arguments, so that another value compiles again. Results come back the same way.
"""

import dataclasses
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist._pmap.axes import is_none
from jax_dist.errors import ArgumentTypeError, AxesError, refusal
from jax_dist.pmap import pmap

_AXES = (None, *range(-32, 33))  # of results; there is a list of arrays for each


def _first(leaf: Any) -> int | None:
    """The default: arrays are mapped over their leading dimension, and nothing else is."""
    return 0 if _is_array(leaf) else None


def filter_pmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = _first,
    out_axes: Any = _first,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    donate: Literal["all", "warn", "none"] = "none",
    **options: Any,
) -> Any:
    """Maps a function of Equinox modules and other trees over devices.

    Takes the place of `equinox.filter_pmap`, with its arguments and its numbers, on
    `jax_dist.pmap`: it is right inside jit, scan and grad with several processes. Arrays are
    mapped, and everything else, such as activation functions and strings, is a constant: another
    value compiles again. Arrays that `fun` itself holds, where it is a module, go to all devices.

    Args:
      fun: called with positional arguments only. Without it, `filter_pmap` returns a decorator.
      in_axes: an integer, None, a function of a leaf that gives one of these, such as
        `equinox.if_array(0)`, or a tree of these that is a prefix of the arguments; or a dictionary
        from names of parameters to these. By default, arrays are mapped over their leading
        dimension.
      out_axes: the same for the results, as a prefix of their tree. None for an array gives the
        value that the first device has.
      axis_name: names the mapped axis for collectives.
      axis_size: needed where no argument is mapped.
      donate: "all" donates the memory of every array; "warn" too, and warns where that is of no
        use; "none" donates nothing.
      **options: those of `jax_dist.pmap`, but for static and donated positions.

    Returns:
      The mapped function, with `__wrapped__`, which is `fun`, and `lower` as jit objects have it:
      compiled, it takes and returns what `fun` does.

    Raises:
      TypeError: in_axes or out_axes hold something else than integers, None and functions; what is
        no array in an argument cannot be hashed.
      ValueError: `donate` is none of its choices; in_axes names no parameter; see also `pmap`.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> make = filter_pmap(lambda key: eqx.nn.Linear(2, 3, key=key))
    >>> models = make(jax.random.split(jax.random.key(0), 4))
    >>> filter_pmap(lambda model, x: model(x))(models, jnp.ones((4, 2))).shape
    (4, 3)

    See the documentation of Equinox on `filter_pmap` and `filter_shard_map`.
    """
    if fun is None:
        return functools.partial(
            filter_pmap,
            in_axes=in_axes,
            out_axes=out_axes,
            axis_name=axis_name,
            axis_size=axis_size,
            donate=donate,
            **options,
        )
    if donate not in ("all", "warn", "none"):
        raise refusal(
            ValueError,
            what="'donate' argument to filter_pmap is none of its choices",
            which=[f"donate={donate!r}"],
            why="it says whether the memory of all arrays may be taken over",
            do="Choose one of 'all', 'warn', 'none'.",
        )
    for name in ("static_broadcasted_argnums", "donate_argnums"):
        if name in options:
            raise refusal(
                ArgumentTypeError,
                what=f"filter_pmap takes no {name}",
                which=[f"{name}={options[name]!r}"],
                why="it finds out by itself what is an array; the rest is static",
                do="Leave it out; donate='all' donates all arrays.",
            )
    options["axis_name"] = axis_name
    filtered = _Filtered(fun, in_axes, out_axes, axis_size, donate, options)
    return functools.update_wrapper(filtered, fun, updated=())


class _Filtered:
    """What the user calls."""

    def __init__(
        self,
        fun: Callable[..., Any],
        in_axes: Any,
        out_axes: Any,
        size: int | None,
        donate: str,
        options: dict[str, Any],
    ) -> None:
        self._fun, self._in_axes = fun, in_axes
        self._size, self._donate, self._options = size, donate, options
        leaves, tree = jax.tree.flatten(out_axes, is_leaf=is_none)
        self._out_axes = tuple(leaves), tree
        self._body = _body_of(fun)
        self._by_axes: dict[tuple[int | None, ...], Any] = {}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._split(args, kwargs)
        if self._donate != "all":
            return _joined(self._mapped(call)(*call))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return _joined(self._mapped(call)(*call))

    def lower(self, /, *args: Any, **kwargs: Any) -> "_Stage":
        """The program for these arguments; `jax.ShapeDtypeStruct` will do for arrays."""
        call = self._split(jax.tree.map(_standing_in, args), kwargs)
        return _Stage(self._split, self._mapped(call).lower(*call))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _mapped(self, call: "_Call") -> Any:
        axes = call[0].in_axes
        if axes not in self._by_axes:
            self._by_axes[axes] = pmap(
                self._body,
                in_axes=(None, *axes),
                out_axes=(None, _AXES),
                axis_size=self._size,
                donate_argnums=range(1, 1 + len(axes)) if self._donate != "none" else (),
                **self._options,
            )
        return self._by_axes[axes]

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        if kwargs:
            raise refusal(
                ArgumentTypeError,
                what="a function of filter_pmap takes no keyword arguments",
                which=[f"{name} is one" for name in kwargs],
                why="in_axes are given by position",
                do="Pass them by position; in_axes may be a dictionary of names.",
            )
        of_args = _resolved("in_axes", self._named_axes(args), args)
        leaves, tree = jax.tree.flatten((self._fun if _is_tree(self._fun) else None, args))
        axes = [*[None] * (len(leaves) - len(of_args)), *of_args]
        pairs = [pair for pair in zip(leaves, axes, strict=True) if _is_array(pair[0])]
        if self._size is not None:  # carries the size where nothing is mapped
            pairs.append((np.broadcast_to(np.int32(0), self._size), 0))
        constants = _Constants(
            tree,
            rest=tuple(_HOLE if _is_array(leaf) else leaf for leaf in leaves),
            numbers=tuple(map(_of_number, leaves)),
            in_axes=tuple(axis for _, axis in pairs),
            out_axes=self._out_axes,
        )
        _check_hash(constants)
        return constants, *(leaf for leaf, _ in pairs)

    def _named_axes(self, args: tuple[Any, ...]) -> Any:
        axes = self._in_axes
        if not isinstance(axes, dict):
            return axes
        names = list(inspect.signature(self._fun).parameters)
        unknown = [name for name in axes if name not in names[: len(args)]]
        if unknown:
            raise refusal(
                AxesError,
                what="in_axes of filter_pmap name arguments that the call does not have",
                which=[f"{name!r}: {axes[name]!r}" for name in unknown],
                why=f"it was called with {', '.join(names[: len(args)]) or 'nothing'}",
                do="Name parameters of the function, and pass them by position.",
            )
        return tuple(axes.get(name, _first) for name, _ in zip(names, args, strict=False))


_Call: TypeAlias = tuple[Any, ...]  # `_Constants`, and the arrays
_HOLE = object()  # where an array was


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Constants:
    """What is no array in a call: equal ones have one program."""

    tree: Any  # of the function, if it is a module, and the arguments
    rest: tuple[Any, ...]  # the leaves, with _HOLE for arrays
    numbers: tuple[Hashable, ...]  # of each leaf, what tells it from equal ones
    in_axes: tuple[int | None, ...]  # of the arrays
    out_axes: tuple[tuple[Any, ...], Any]  # leaves and tree

    def filled(self, arrays: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        """The function, if it is a module, and the arguments."""
        left = iter(arrays)
        return self.tree.unflatten(next(left) if x is _HOLE else x for x in self.rest)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
    """What is no array in the results of one program."""

    tree: Any
    rest: list[Any]  # the leaves; of an array, which of the lists has it next


class _In(NamedTuple):
    number: int


_BODIES: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()


def _body_of(fun: Callable[..., Any]) -> Callable[..., Any]:
    """What is mapped: the same for equal modules, and for a function each time it is decorated."""
    if _is_tree(fun):
        return _BODIES.setdefault(type(fun), _body(lambda module: module, type(fun)))
    if isinstance(fun, types.FunctionType):
        living = weakref.ref(fun)  # else what is kept for it would hold it
        return _BODIES.setdefault(fun, _body(lambda _: living(), fun))
    return _body(lambda _: fun, fun)


def _body(function: Callable[[Any], Any], named: Any) -> Callable[..., Any]:
    def body(constants: _Constants, *arrays: Any) -> tuple[Any, ...]:
        module, args = constants.filled(arrays)
        result = function(module)(*args)
        leaves, tree = jax.tree.flatten(result)
        axes = _resolved("out_axes", constants.out_axes[1].unflatten(constants.out_axes[0]), result)
        rest, arrays_of = [], tuple([] for _ in _AXES)
        for leaf, axis in zip(leaves, axes, strict=True):
            if axis is None and not _is_array(leaf):
                rest.append(leaf)
                continue
            # One that is too far off comes to the last, which pmap refuses.
            number = 0 if axis is None else 33 + max(-32, min(axis, 32))
            rest.append(_In(number))
            arrays_of[number].append(leaf)
        return _Result(tree, rest), arrays_of

    body.__name__ = getattr(named, "__name__", type(named).__name__)
    body.__qualname__ = getattr(named, "__qualname__", body.__name__)
    return body


def _joined(results: tuple[_Result, tuple[list[Any], ...]]) -> Any:
    """The results as the function gives them."""
    result, arrays_of = results
    left = list(map(iter, arrays_of))
    return result.tree.unflatten(
        next(left[x.number]) if isinstance(x, _In) else x for x in result.rest
    )


class _Stage:
    """A stage of JAX; compiled, it takes and returns what the function does."""

    def __init__(self, split: Callable, stage: Any):
        self._split, self._stage = split, stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._split, self._stage.compile(*args, **kwargs))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _joined(self._stage(*self._split(args, kwargs)))


def _is_tree(fun: Any) -> bool:
    return not jax.tree_util.treedef_is_leaf(jax.tree.structure(fun))


def _check_hash(constants: _Constants) -> None:
    try:
        hash(constants)
    except TypeError as error:
        leaves = (*constants.rest, *constants.out_axes[0])
        odd = [leaf for leaf in leaves if type(leaf).__hash__ is None]
        which = [f"{leaf!r}, of type {type(leaf).__name__}" for leaf in odd]
        raise refusal(
            ArgumentTypeError,
            what="filter_pmap keeps what is no array as a constant, and cannot hash it",
            which=which or [f"the tree {constants.tree}"],
            why="another value compiles another program, which is looked up by it",
            do="Make it an array, or give the object __hash__ and __eq__.",
        ) from error


def _of_number(leaf: Any) -> Hashable:
    """What tells a number from equal ones: its type, its bits, attributes of a class of its own."""
    if not isinstance(leaf, int | float | complex):
        return None
    is_plain = type(leaf) in (bool, int, float, complex)
    return type(leaf), repr(leaf) if is_plain else id(leaf)  # which lives on, in what is compiled


def _is_array(leaf: Any) -> bool:
    """What Equinox takes for an array: that of JAX or of NumPy, also a scalar of NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _standing_in(leaf: Any) -> Any:
    """For a type, an array of it, which the user's axes take for one; it has one element."""
    is_type = isinstance(leaf, jax.ShapeDtypeStruct)
    if not is_type or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _resolved(argument: str, axes: Any, tree: Any) -> list[int | None]:
    """An axis for each leaf, from a prefix of the tree."""
    found: list[int | None] = []

    def resolve(spec: Any, part: Any) -> None:
        for number, leaf in enumerate(jax.tree.leaves(part)):
            axis = spec(leaf) if callable(spec) else spec
            if axis is not None and not isinstance(axis, int):
                path = jax.tree.leaves_with_path(part)[number][0]
                raise refusal(
                    ArgumentTypeError,
                    what=f"{argument} of filter_pmap hold something else than axes",
                    which=[f"{axis!r} for {jax.tree_util.keystr(path) or 'a leaf'}"],
                    why="an axis is an integer, or None for what is not mapped",
                    do="Give integers, None, or functions of a leaf, as equinox.if_array(0).",
                )
            found.append(axis)

    try:
        jax.tree.map(resolve, axes, tree, is_leaf=is_none)
    except ValueError as error:
        raise refusal(
            AxesError,
            what=f"{argument} of filter_pmap do not fit",
            which=[f"{argument}={axes!r}", f"for the tree {jax.tree.structure(tree)}"],
            why="they are a prefix of that tree",
            do="Give one axis for all, or a tree that is a prefix.",
        ) from error
    return found
