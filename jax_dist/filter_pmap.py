"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may have leaves of any type."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist._pmap.axes import function_name, spread
from jax_dist.errors import ArgumentTypeError
from jax_dist.pmap import pmap

_ARRAYS = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
_is_array = lambda leaf: isinstance(leaf, _ARRAYS)


def _zero_if_array(leaf: Any) -> int | None:
    """Map arrays over dimension 0, and nothing else: the default of in_axes and out_axes."""
    return 0 if _is_array(leaf) else None


def filter_pmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: Any = _zero_if_array,
    out_axes: Any = _zero_if_array,
    donate: Literal["all", "warn", "none"] = "none",
    **options: Any,
) -> Any:
    """Map a function of Equinox modules and other trees over devices.

    Takes the place of `equinox.filter_pmap`, with its arguments and its numbers. Arrays are mapped,
    and everything else, such as activation functions and strings, is a constant: another value
    compiles again. If `fun` is a module, its own arrays are replicated.

    Args:
      fun: called with positional arguments only. Without it, `filter_pmap` returns a decorator.
      in_axes: an integer, None, a function of a leaf that returns one of these, or a tree of these
        that is a prefix of the arguments. Default: `equinox.if_array(0)`, dimension 0 of arrays.
      out_axes: the same for the results. None for an array gives the value of the first device.
      donate: "all" donates the memory of every array; "warn" too, and warns where it is of no use.
      **options: those of `jax_dist.pmap`, but for the positions of static and donated arguments.

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
        options |= {"in_axes": in_axes, "out_axes": out_axes}
        return functools.partial(filter_pmap, donate=donate, **options)
    if donate not in ("all", "warn", "none"):
        raise ValueError(f"donate must be 'all', 'warn' or 'none', not {donate!r}.")
    for option in {"static_broadcasted_argnums", "donate_argnums"} & options.keys():
        raise ArgumentTypeError(f"filter_pmap takes no {option}: arrays are mapped, others static.")
    import equinox as eqx  # where it is not installed, nobody calls this

    name = function_name(fun)
    options["donate_argnums"] = () if donate == "none" else 1  # the arrays; argument 0 is static

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the mapped body, with its two arguments for a call of `fun`."""
        if kwargs:
            raise ArgumentTypeError(f"filter_pmap got keyword arguments: {', '.join(kwargs)}.")
        leaves, tree = jax.tree.flatten((out_axes, fun, args))
        axes_of_args = _resolve_axes(in_axes, args, "in_axes", name)
        axes = [None] * (len(leaves) - len(axes_of_args)) + axes_of_args
        arrays, constants = eqx.partition(leaves, _is_array)
        # 1, 1.0 and True are equal in Python, as 0.0 and -0.0 are; the program may depend on which.
        numbers = tuple(repr(x) for x in constants if isinstance(x, int | float | complex))
        static = _Static(key=(tree, tuple(constants), numbers), value=(tree, constants))
        hash(static)  # a TypeError for a set, say, which could change after the trace
        mapped = pmap(_make_body(name), in_axes=(None, axes), out_axes=(None, None, 0), **options)
        return functools.partial(mapped, static, arrays)

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            if donate == "all":
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            static, replicated, mapped = bind(args, kwargs)()
        tree, constants, axes = static.value
        pairs = zip(mapped, axes, strict=True)  # from out_axes=0 of the body
        mapped = [jnp.moveaxis(leaf, 0, axis) if axis else leaf for leaf, axis in pairs]
        return tree.unflatten(eqx.combine(mapped, replicated, constants))

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        program = bind(args, kwargs)
        return program.func.lower(*program.args)

    call.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """The part of a call or result that is no array; JAX compares it by `key`, unlike `value`."""

    key: Hashable  # of a result an `object()`, equal to no other: its constants may have no hash
    value: Any = dataclasses.field(compare=False)  # the tree; its leaves, None for arrays; axes


@functools.cache
def _make_body(name: str) -> Callable[..., Any]:
    """Return the function that is mapped. It has a name of a user's function, but calls any."""
    import equinox as eqx

    def body(static: _Static, arrays: list[Any]) -> tuple[_Static, list, list]:
        """Call the user's function; return its result as constants, replicated, mapped arrays."""
        tree, constants = static.value
        out_axes, function, args = tree.unflatten(eqx.combine(arrays, constants))
        result = function(*args)
        leaves, result_tree = jax.tree.flatten(result)
        axes = _resolve_axes(out_axes, result, "out_axes", name)
        mapped, unmapped = eqx.partition(leaves, [axis is not None for axis in axes])
        replicated, result_constants = eqx.partition(unmapped, _is_array)  # None where another is
        return _Static(object(), (result_tree, result_constants, axes)), replicated, mapped

    body.__name__ = body.__qualname__ = name
    return body


def _resolve_axes(prefix: Any, tree: Any, argument: str, name: str) -> list[Any]:
    """Return the axis of each leaf; `prefix` has axes, or functions that return a leaf's axis."""
    axes_and_leaves = zip(spread(prefix, tree, argument, name), jax.tree.leaves(tree), strict=True)
    return [axis(leaf) if callable(axis) else axis for axis, leaf in axes_and_leaves]
