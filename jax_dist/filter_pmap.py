"""`equinox.filter_pmap` on `jax_dist.pmap`: arguments and results may have leaves of any type."""

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
    donate_argnums = () if donate == "none" else 1  # the arrays; argument 0 is `_Static`

    @functools.cache
    def map_body(axes: tuple[int | None, ...]) -> Any:
        """Return the pmap of `_make_body`, whose arguments are `_Static` and a list of arrays."""
        axes_of_body = {"in_axes": (None, list(axes)), "out_axes": (None, None, 0)}
        return pmap(_make_body(name), donate_argnums=donate_argnums, **axes_of_body, **options)

    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, Any]]:
        """Return the mapped body for a call, and the two arguments to call it with."""
        if kwargs:
            raise ArgumentTypeError(f"filter_pmap got keyword arguments: {', '.join(kwargs)}.")
        leaves, tree = jax.tree.flatten((fun, args))
        axes_of_args = _resolve_axes(in_axes, args, "in_axes", name)
        axes_of_fun = [None] * (len(leaves) - len(axes_of_args))
        return map_body((*axes_of_fun, *axes_of_args)), _split_static(leaves, tree, out_axes)

    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        import equinox as eqx  # not at the top: it may not be installed

        mapped_body, body_args = prepare(args, kwargs)
        with warnings.catch_warnings():
            if donate == "all":
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            static, replicated, mapped = mapped_body(*body_args)
        pairs = zip(mapped, static.axes, strict=True)  # from out_axes=0 of the body
        mapped = [jnp.moveaxis(leaf, 0, axis) if axis else leaf for leaf, axis in pairs]
        return static.tree.unflatten(eqx.combine(mapped, replicated, static.leaves))

    def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
        mapped_body, body_args = prepare(args, kwargs)
        return mapped_body.lower(*body_args)

    call.lower = lower  # pyright: ignore[reportAttributeAccessIssue]
    return call


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """All of a call, or of its results, but the arrays: one static argument, compared by `key`."""

    key: Any  # hashable
    tree: Any = dataclasses.field(compare=False)  # with all leaves, also the arrays
    leaves: list[Any] = dataclasses.field(compare=False)  # None in the place of an array
    axes: Any = dataclasses.field(compare=False)  # the out_axes; in results, one for each leaf


def _split_static(leaves: list[Any], tree: Any, out_axes: Any) -> tuple[_Static, list[Any]]:
    """Split the leaves of a call into the static ones and the arrays, with None for the others."""
    import equinox as eqx

    arrays, static_leaves = eqx.partition(leaves, _is_array)
    # 1, 1.0 and True are equal in Python, as 0.0 and -0.0 are; the program may depend on which.
    numbers = tuple(repr(x) for x in static_leaves if isinstance(x, int | float | complex))
    axes, axes_tree = jax.tree.flatten(out_axes, is_leaf=is_none)
    key = tree, tuple(static_leaves), numbers, tuple(axes), axes_tree
    try:
        hash(key)
    except TypeError as error:
        reason = f"leaves other than arrays must be hashable: {error}"
        raise ArgumentTypeError(reason) from error
    return _Static(key, tree, static_leaves, out_axes), arrays


@functools.cache
def _make_body(name: str) -> Callable[..., Any]:
    """Return the function under pmap for user functions of a name: it calls the one in `static`."""
    import equinox as eqx

    def body(static: _Static, arrays: list[Any]) -> tuple[_Static, list, list]:
        """Call the user's function; return what is static, replicated and mapped of its result."""
        function, args = static.tree.unflatten(eqx.combine(arrays, static.leaves))
        result = function(*args)
        leaves, tree = jax.tree.flatten(result)
        axes = _resolve_axes(static.axes, result, "out_axes", name)
        mapped, unmapped = eqx.partition(leaves, [axis is not None for axis in axes])
        replicated, static_leaves = eqx.partition(unmapped, _is_array)
        return _Static(object(), tree, static_leaves, axes), replicated, mapped

    body.__name__ = body.__qualname__ = name
    return body


def _resolve_axes(prefix: Any, tree: Any, argument: str, name: str) -> list[Any]:
    """Return the axis of each leaf; `prefix` has axes, or functions that return a leaf's axis."""
    axes_and_leaves = zip(spread(prefix, tree, argument, name), jax.tree.leaves(tree), strict=True)
    return [axis(leaf) if callable(axis) else axis for axis, leaf in axes_and_leaves]
