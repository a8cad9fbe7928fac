"""`flax.nnx.pmap` on `jax_dist.pmap`: arguments and results may hold modules.

nnx takes a call apart into arrays and the structure of its modules, and puts it together again;
only the function between the two is another one.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jax_dist.errors import refusal
from jax_dist.pmap import pmap

_TAG = "jax_dist.nnx_pmap"  # by which nnx tells calls within calls apart


def nnx_pmap(
    f: Callable[..., Any] | None = None,
    *,
    axis_name: Hashable | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    **options: Any,
) -> Any:
    """Maps a function of Flax NNX modules and other trees over devices.

    Takes the place of `flax.nnx.pmap`, with its arguments and its numbers, on `jax_dist.pmap`.
    What the function changes in a module is changed in the module of the caller: variables, and
    its structure. Two arguments may share a module or a variable.

    Args:
      f: called with positional arguments only. Without it, `nnx_pmap` returns a decorator.
      axis_name: names the mapped axis for collectives.
      in_axes: an integer, None, `nnx.StateAxes`, or a tree of these that is a prefix of the
        arguments. With None, a module is one copy for all devices; after the call, it has what the
        first device made of it.
      out_axes: the same for the results.
      **options: those of `jax_dist.pmap`.

    Returns:
      The mapped function.

    Raises:
      ValueError: `f` is a bound method of a module, or a module is given twice, with different
        axes; see also `pmap`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> call = nnx_pmap(lambda model, x: model(x), in_axes=(None, 0))
    >>> call(model, jnp.ones((4, 2))).shape
    (4, 3)

    `transform_metadata`, `graph` and `graph_updates` of `flax.nnx.pmap` are not taken.
    """
    if f is None:
        return functools.partial(
            nnx_pmap, axis_name=axis_name, in_axes=in_axes, out_axes=out_axes, **options
        )
    from flax import nnx  # where it is not installed, nobody calls this

    inner = f
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.ismethod(inner) and isinstance(inner.__self__, nnx.Module):
        raise refusal(
            ValueError,
            what="nnx_pmap does not support bound methods",
            which=[f"{inner.__qualname__} belongs to a {type(inner.__self__).__name__}"],
            why="a module is mapped as an argument, so that its changes come back",
            do="Map the method of the class, and pass the module as its first argument.",
        )
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes

    is_module = lambda state: isinstance(state, nnx.NodeStates)

    @functools.wraps(f)
    def body(*states: Any) -> Any:
        args = nnx.from_tree(states, ctxtag=_TAG, is_inner=True)
        result = f(*args)
        modules = jax.tree.map(  # only they can have changed
            lambda state, arg: arg if is_module(state) else None, states, args, is_leaf=is_module
        )
        return nnx.to_tree(
            (modules, result),
            prefix=(in_axes, out_axes),
            split_fn=_split,
            ctxtag=_TAG,
        )

    axes_of_states, axes_of_results = _of_states(in_axes), _of_states(out_axes)
    mapped = pmap(
        body,
        axis_name=axis_name,
        in_axes=axes_of_states,
        out_axes=(axes_of_states, axes_of_results),
        **options,
    )

    @functools.wraps(f)
    @nnx.update_context(_TAG)
    def call(*args: Any) -> Any:
        states = nnx.to_tree(args, prefix=in_axes, split_fn=_split, ctxtag=_TAG)
        found = mapped(*states)
        return nnx.from_tree(found, ctxtag=_TAG, is_inner=False)[1]

    return call


def _split(context: Any, path: Any, axes: Any, module: Any) -> Any:
    """A module as its arrays, apart by the filters of `nnx.StateAxes`, and its structure."""
    from flax import nnx

    filters = axes.filters if isinstance(axes, nnx.StateAxes) else ()
    return nnx.NodeStates.from_split(*context.split(module, *filters), metadata=axes)


def _of_states(axes: Any) -> Any:
    """Axes of modules as axes of what `_split` makes of them."""
    from flax import nnx

    def of_one(axis: Any) -> Any:
        if not isinstance(axis, nnx.StateAxes):
            return axis
        return nnx.NodeStates.from_prefixes(axis.axes, metadata=axis)

    return jax.tree.map(of_one, axes)
