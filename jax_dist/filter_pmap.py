"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may hold anything."""

import dataclasses
import functools
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
    name = getattr(fun, "__name__", type(fun).__name__)
    donated = () if donate == "none" else 1

    @functools.cache
    def map_body(axes: tuple[int | None, ...]) -> Any:
        axes_of_body = {"in_axes": (None, list(axes)), "out_axes": (None, None, 0)}
        return pmap(_body(name), donate_argnums=donated, **axes_of_body, **options)

    def partition(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Static, list[Any]]:
        if kwargs:
            raise ArgumentTypeError(f"filter_pmap got keyword arguments: {', '.join(kwargs)}.")
        axes = _resolve(in_axes, args, "in_axes", name)
        leaves, tree = jax.tree.flatten((fun, args))
        static, arrays = _Static.of(leaves, tree, out_axes)
        of_function = [None] * (len(leaves) - len(axes))
        return map_body((*of_function, *axes)), static, arrays

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        import equinox as eqx  # where it is not installed, nobody calls this

        function, *parts = partition(args, kwargs)
        with warnings.catch_warnings():
            if donate == "all":
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            static, shared, mapped = function(*parts)
        pairs = zip(mapped, static.axes, strict=True)
        moved = [jnp.moveaxis(leaf, 0, axis) if axis else leaf for leaf, axis in pairs]
        return static.tree.unflatten(eqx.combine(moved, shared, static.leaves))

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        function, *parts = partition(args, kwargs)
        return function.lower(*parts)

    call.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """All of a call, or of its results, but the arrays; calls of equal keys share a program."""

    key: Any
    tree: Any = dataclasses.field(compare=False)
    leaves: list[Any] = dataclasses.field(compare=False)  # None for arrays
    axes: Any = dataclasses.field(compare=False)  # of results

    @classmethod
    def of(cls, leaves: list[Any], tree: Any, out_axes: Any) -> "tuple[_Static, list[Any]]":
        """Return what is static of a call, and its arrays."""
        import equinox as eqx

        arrays, rest = eqx.partition(leaves, _is_array)
        # 1, 1.0 and True are equal, as 0.0 and -0.0 are.
        numbers = tuple(repr(leaf) for leaf in rest if isinstance(leaf, int | float | complex))
        axes, axes_tree = jax.tree.flatten(out_axes, is_leaf=is_none)
        key = tree, tuple(rest), numbers, tuple(axes), axes_tree
        try:
            hash(key)
        except TypeError as error:
            reason = f"leaves other than arrays must be hashable: {error}"
            raise ArgumentTypeError(reason) from error
        return cls(key, tree, rest, out_axes), arrays


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
