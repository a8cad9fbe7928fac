"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything.

A call is split in two: arrays, which the mapped function takes, and the rest, which decides which
mapped function that is. One is made for each kind of call, and kept: as long as a plain function
lives, and for modules, which are equal by content, if it is one of the last.
"""

import contextlib
import functools
import inspect
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.errors import ArgumentTypeError, AxesError, refusal
from jax_dist.mapping.pmap import pmap

_AXIS = "<filter_pmap>"  # of a function that names none
_KEPT = 256  # kinds of calls of modules
_HOLE = object()  # where an array was


class _FirstOfArrays:
    """The default: arrays are mapped over their leading dimension, and nothing else is."""

    def __call__(self, leaf: Any) -> int | None:
        return 0 if _is_array(leaf) else None

    def __repr__(self) -> str:
        return "if_array(0)"


_FIRST = _FirstOfArrays()


def filter_pmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
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
      TypeError: in_axes or out_axes hold something else than integers, None and functions; `fun`
        or what is no array in an argument cannot be hashed.
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
    axes = _Axes(in_axes, out_axes, axis_name, axis_size)
    return functools.update_wrapper(_Filtered(fun, axes, donate, options), fun, updated=())


class _Axes(NamedTuple):
    """What was said of axes."""

    inputs: Any
    outputs: Any
    name: Hashable | None
    size: int | None


class _Call(NamedTuple):
    """One call, in two parts. What `kind` holds decides what is compiled."""

    arrays: list[Any]
    tree: Any  # of the function and the arguments
    rest: tuple[Any, ...]  # the leaves, with _HOLE for arrays
    axes: tuple[int | None, ...]  # of the arrays

    @property
    def kind(self) -> Hashable:
        types = tuple((leaf.shape, leaf.dtype) for leaf in self.arrays)
        return self.tree, self.rest, self.axes, types, tuple(map(_of_number, self.rest))


class _Filtered:
    """What the user calls."""

    def __init__(self, fun: Callable[..., Any], axes: _Axes, donate: str, options: dict[str, Any]):
        self._fun, self._axes, self._donate, self._options = fun, axes, donate, options
        leaves, tree = jax.tree.flatten((axes.inputs, axes.outputs), is_leaf=lambda x: x is None)
        said = (*leaves, tree, axes.name, axes.size, donate, *sorted(options.items()))
        self._setting = said if _is_hashable(said) else None  # it cannot be compared
        self._is_shared = self._setting is not None and isinstance(fun, types.FunctionType)
        self._kinds: dict[Hashable, _Kind] = {}
        if self._is_shared:
            self._kinds = _OF_FUNCTIONS.setdefault(fun, {})
        elif self._setting and not jax.tree_util.treedef_is_leaf(jax.tree.structure(fun)):
            self._kinds = _OF_MODULES

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._split(args, kwargs)
        kind = self._kind(call)
        if self._donate != "all":
            return kind.joined(kind.mapped(*call.arrays))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return kind.joined(kind.mapped(*call.arrays))

    def lower(self, /, *args: Any, **kwargs: Any) -> "_Stage":
        """The program for these arguments; `jax.ShapeDtypeStruct` will do for arrays."""
        call = self._split(jax.tree.map(_standing_in, args), kwargs)
        kind = self._kind(call)
        return _Stage(self._split, kind, kind.mapped.lower(*call.arrays))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if kwargs:
            raise refusal(
                ArgumentTypeError,
                what="a function of filter_pmap takes no keyword arguments",
                which=[f"{name} is one" for name in kwargs],
                why="in_axes are given by position",
                do="Pass them by position; in_axes may be a dictionary of names.",
            )
        of_args = _resolved("in_axes", self._named_axes(args), args)
        leaves, tree = jax.tree.flatten((self._fun, args))
        of_fun = len(leaves) - len(of_args)
        axes: list[int | None] = [*[None] * of_fun, *of_args]
        is_array = [_is_array(leaf) for leaf in leaves]
        rest = tuple(_HOLE if _is_array(leaf) else leaf for leaf in leaves)
        if self._is_shared:
            rest = (None, *rest[1:])  # else what is kept for the function would hold it
        arrays = list(itertools.compress(leaves, is_array))
        chosen = tuple(itertools.compress(axes, is_array))
        if self._axes.size is not None:  # carries the size where nothing is mapped
            arrays.append(np.broadcast_to(np.int32(0), self._axes.size))
            chosen = (*chosen, 0)
        return _Call(arrays, tree, rest, chosen)

    def _named_axes(self, args: tuple[Any, ...]) -> Any:
        axes = self._axes.inputs
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
        return tuple(axes.get(name, _FIRST) for name, _ in zip(names, args, strict=False))

    def _kind(self, call: _Call) -> "_Kind":
        key = (self._setting, call.kind)
        try:
            found = self._kinds.get(key)
        except TypeError as error:
            odd = [leaf for leaf in call.rest if not _is_hashable(leaf)]
            which = [f"{leaf!r}, of type {type(leaf).__name__}" for leaf in odd]
            raise refusal(
                ArgumentTypeError,
                what="filter_pmap keeps what is no array as a constant, and cannot hash it",
                which=which or [f"the tree {call.tree}"],
                why="another value compiles another program, which is looked up by it",
                do="Make it an array, or give the object __hash__ and __eq__.",
            ) from error
        if found is None:
            fun = weakref.ref(self._fun) if self._is_shared else None
            found = self._kinds[key] = _Kind(self._axes, call, self._donate, self._options, fun)
        return found


class _Kind:
    """The mapped function of one kind of call.

    Attributes:
      key: tells this kind from others.
      mapped: takes the arrays of a call, and gives those of the results.
    """

    def __init__(
        self,
        axes: _Axes,
        call: _Call,
        donate: str,
        options: dict[str, Any],
        fun: weakref.ref | None = None,
    ):
        """`fun` takes the place of the first leaf, where the call does not hold the function."""
        self.key = call.kind
        self._axes, self._call, self._fun = axes, call._replace(arrays=[]), fun
        self._result: tuple[Any, list[Any]] | None = None  # its tree, and leaves that are no array
        self._out_axes: tuple[int | None, ...] = ()
        pairs = zip(call.arrays, call.axes, strict=True)
        mapped = [(leaf.shape, axis) for leaf, axis in pairs if axis is not None]
        fits = all(-len(shape) <= axis < len(shape) for shape, axis in mapped)
        if fits and len({shape[axis] for shape, axis in mapped}) == 1:
            # Traces the function once, for the tree of its results and where their axes go. If the
            # sizes do not fit, pmap says what is wrong.
            name = _AXIS if axes.name is None else axes.name
            jax.eval_shape(jax.vmap(self._body, call.axes, axis_name=name), *call.arrays)

        def body(*arrays: Any) -> tuple[Any, ...]:
            return self._body(*arrays)

        of_user = self._function(call.arrays)[0]
        body.__name__ = getattr(of_user, "__name__", type(of_user).__name__)
        body.__qualname__ = getattr(of_user, "__qualname__", body.__name__)
        numbers = tuple(range(len(call.arrays)))
        self.mapped = pmap(
            body,
            axis_name=axes.name,
            in_axes=call.axes,
            out_axes=self._out_axes,
            axis_size=axes.size,
            donate_argnums=() if donate == "none" else numbers,
            **options,
        )

    def joined(self, arrays: tuple[Any, ...]) -> Any:
        """The results as the function gives them."""
        assert self._result is not None
        return _filled(*self._result, arrays)

    def _body(self, *arrays: Any) -> tuple[Any, ...]:
        fun, args = self._function(arrays)
        result = fun(*args)
        leaves, tree = jax.tree.flatten(result)
        axes = _resolved("out_axes", self._axes.outputs, result)
        pairs = list(zip(leaves, axes, strict=True))
        kept = [_is_array(leaf) or axis is not None for leaf, axis in pairs]
        self._out_axes = tuple(itertools.compress(axes, kept))
        self._result = tree, [_HOLE if k else leaf for leaf, k in zip(leaves, kept, strict=True)]
        return tuple(itertools.compress(leaves, kept))

    def _function(self, arrays: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fun, args = _filled(self._call.tree, self._call.rest, arrays)
        if self._fun is None:
            return fun, args
        function = self._fun()
        assert function is not None  # somebody calls it
        return function, args


class _Recent(dict[Hashable, _Kind]):
    """The last kinds that were made: another object equal to a module is the same function."""

    def __setitem__(self, key: Hashable, kind: _Kind) -> None:
        super().__setitem__(key, kind)
        while len(self) > _KEPT:
            with contextlib.suppress(KeyError, RuntimeError):  # another thread was faster
                del self[next(iter(self))]


_OF_FUNCTIONS: weakref.WeakKeyDictionary[Callable, dict[Hashable, _Kind]] = (
    weakref.WeakKeyDictionary()
)
_OF_MODULES = _Recent()


class _Stage:
    """A stage of JAX for the arrays of one kind of call.

    Compiled, it takes arguments of the same kind, and returns what the function does.
    """

    def __init__(self, split: Callable, kind: _Kind, stage: Any):
        self._split, self._kind, self._stage = split, kind, stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def compile(self, *args: Any, **kwargs: Any) -> "_Stage":
        return _Stage(self._split, self._kind, self._stage.compile(*args, **kwargs))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._split(args, kwargs)
        wanted = self._kind.key
        if call.kind != wanted:
            raise refusal(
                ArgumentTypeError,
                what="a compiled function of filter_pmap was called with other arguments",
                which=[f"now {_described(call.kind)}", f"compiled for {_described(wanted)}"],
                why="it holds the program of one kind of call",
                do="Call the function itself, or lower it for these arguments.",
            )
        return self._kind.joined(self._stage(*call.arrays))


def _described(kind: Any) -> str:
    _, rest, axes, types_, _ = kind
    arrays = [f"{dtype}{list(shape)}" for shape, dtype in types_]
    others = [repr(leaf) for leaf in rest if not (leaf is None or leaf is _HOLE or callable(leaf))]
    return f"{', '.join([*arrays, *others]) or 'nothing'}, mapped over {list(axes)}"


def _of_number(leaf: Any) -> Hashable:
    """What tells a number from equal ones: its type, its bits, attributes of a class of its own."""
    if not isinstance(leaf, int | float | complex):
        return None
    is_plain = type(leaf) in (bool, int, float, complex)
    return type(leaf), repr(leaf) if is_plain else id(leaf)  # which lives on, in what is compiled


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_array(leaf: Any) -> bool:
    """What Equinox takes for an array: that of JAX or of NumPy, also a scalar of NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _standing_in(leaf: Any) -> Any:
    """For a type, an array of it, which the user's axes take for one; it has one element."""
    is_type = isinstance(leaf, jax.ShapeDtypeStruct)
    if not is_type or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _filled(tree: Any, rest: Sequence[Any], arrays: Iterable[Any]) -> Any:
    """A tree whose holes are filled by arrays, in order."""
    remaining = iter(arrays)
    return jax.tree.unflatten(tree, [next(remaining) if x is _HOLE else x for x in rest])


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
        jax.tree.map(resolve, axes, tree, is_leaf=lambda each: each is None)
    except ValueError as error:
        raise refusal(
            AxesError,
            what=f"{argument} of filter_pmap do not fit",
            which=[f"{argument}={axes!r}", f"for the tree {jax.tree.structure(tree)}"],
            why="they are a prefix of that tree",
            do="Give one axis for all, or a tree that is a prefix.",
        ) from error
    return found
