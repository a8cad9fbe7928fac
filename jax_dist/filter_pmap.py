"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything."""

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist._pmap.axes import is_none, spread
from jax_dist.errors import ArgumentTypeError
from jax_dist.pmap import pmap


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
        `equinox.if_array(0)`, or a tree of these that is a prefix of the arguments. By default,
        arrays are mapped over dimension 0.
      out_axes: the same for the results. None for an array gives the value of the first device.
      donate: "all" donates the memory of every array; "warn" too, and warns where it is of no use.
      **options: those of `jax_dist.pmap`, such as `axis_name`, but for static and donated
        positions.

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
        options |= {"in_axes": in_axes, "out_axes": out_axes, "donate": donate}
        return functools.partial(filter_pmap, **options)
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
    axes: Any = dataclasses.field(compare=False)  # of results


class _Filtered:
    """A function mapped by `filter_pmap`."""

    def __init__(self, fun: Any, in_axes: Any, out_axes: Any, donate: str, options: dict) -> None:
        self.__wrapped__, self._in_axes, self._out_axes = fun, in_axes, out_axes
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._donate, self._options = donate, options
        self._mapped = functools.cache(self._map)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        import equinox as eqx

        function, *call = self._partition(args, kwargs)
        with warnings.catch_warnings():
            if self._donate == "all":
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            static, shared, mapped = function(*call)
        pairs = zip(mapped, static.axes, strict=True)
        moved = [jnp.moveaxis(leaf, 0, axis) if axis else leaf for leaf, axis in pairs]
        return static.tree.unflatten(eqx.combine(moved, shared, static.leaves))

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the program for these arguments; arrays may be `jax.ShapeDtypeStruct`s."""
        function, *call = self._partition(args, kwargs)
        return function.lower(*call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _map(self, axes: tuple[int | None, ...]) -> Any:
        axes_of_body = {"in_axes": (None, list(axes)), "out_axes": (None, None, 0)}
        donated = () if self._donate == "none" else 1
        return pmap(_body(self._name), donate_argnums=donated, **axes_of_body, **self._options)

    def _partition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the mapped body, and its arguments: constants and arrays."""
        import equinox as eqx  # where it is not installed, nobody calls this

        if kwargs:
            raise ArgumentTypeError(f"filter_pmap got keyword arguments: {', '.join(kwargs)}.")
        axes = _resolve(self._in_axes, args, "in_axes", self._name)
        leaves, tree = jax.tree.flatten((self.__wrapped__, args))
        arrays, rest = eqx.partition(leaves, _is_array)
        # 1, 1.0 and True are equal, as 0.0 and -0.0 are.
        numbers = tuple(repr(leaf) for leaf in rest if isinstance(leaf, int | float | complex))
        out_axes, out_tree = jax.tree.flatten(self._out_axes, is_leaf=is_none)
        key = tree, tuple(rest), numbers, tuple(out_axes), out_tree
        try:
            hash(key)
        except TypeError as error:
            raise ArgumentTypeError(
                f"leaves other than arrays must be hashable: {error}"
            ) from error
        of_function = [None] * (len(leaves) - len(axes))
        function = self._mapped((*of_function, *axes))
        return function, _Static(key, tree, rest, self._out_axes), arrays


@functools.cache
def _body(name: str) -> Callable[..., Any]:
    """Return what is mapped for all functions of a name, which is that of the program."""
    import equinox as eqx

    def body(static: _Static, arrays: list[Any]) -> tuple[_Static, list, list]:
        function, args = static.tree.unflatten(eqx.combine(arrays, static.leaves))
        result = function(*args)
        leaves, tree = jax.tree.flatten(result)
        axes = _resolve(static.axes, result, "out_axes", name)
        mapped, rest = eqx.partition(leaves, [axis is not None for axis in axes])
        shared, rest = eqx.partition(rest, _is_array)
        return _Static(object(), tree, rest, axes), shared, mapped

    body.__name__ = body.__qualname__ = name
    return body


def _resolve(prefix: Any, tree: Any, argument: str, name: str) -> list[Any]:
    """Return an axis for each leaf, from a prefix of the tree."""
    pairs = zip(spread(prefix, tree, argument, name), jax.tree.leaves(tree), strict=True)
    return [axis(leaf) if callable(axis) else axis for axis, leaf in pairs]
