"""`flax.nnx.pmap` on `jax_dist.pmap`: arguments and results may hold modules."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_dist.pmap import pmap


def nnx_pmap(
    f: Callable[..., Any] | None = None, *, in_axes: Any = 0, out_axes: Any = 0, **options: Any
) -> Any:
    """Map a function of Flax NNX modules and other trees over devices.

    Takes the place of `flax.nnx.pmap`, with its arguments (but `transform_metadata`, `graph` and
    `graph_updates`) and its numbers. What the function changes in a module is changed in the module
    of the caller: variables, and its structure. Two arguments may share a module or a variable.

    Args:
      f: called with positional arguments only. Without it, `nnx_pmap` returns a decorator.
      in_axes: an integer, None, `nnx.StateAxes`, or a tree of these that is a prefix of the
        arguments. With None, a module is replicated; after the call, it holds the values of the
        first device.
      out_axes: the same for the results.
      **options: those of `jax_dist.pmap`, such as `axis_name`.

    Raises:
      ValueError: `f` is a bound method, or a module is given twice with two axes; see also `pmap`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> call = nnx_pmap(lambda model, x: model(x), in_axes=(None, 0))
    >>> call(model, jnp.ones((4, 2))).shape
    (4, 3)
    """
    if f is None:
        return functools.partial(nnx_pmap, in_axes=in_axes, out_axes=out_axes, **options)
    from flax import nnx  # where it is not installed, nobody calls this

    if isinstance(getattr(f, "__self__", None), nnx.Module):
        remedy = f"map {f.__qualname__} of the class, and pass the module as its first argument"
        raise ValueError(f"nnx_pmap does not support bound methods: {remedy}.")
    tag = "jax_dist.nnx_pmap"  # names our context, since nnx contexts can be nested

    def split_module(context: Any, path: Any, axes: Any, module: Any) -> Any:
        """Return a module as a tree of its states, one for each filter of `nnx.StateAxes`."""
        filters = axes.filters if isinstance(axes, nnx.StateAxes) else ()
        return nnx.NodeStates.from_split(*context.split(module, *filters), metadata=axes)

    def axes_of_states(axis: Any) -> Any:
        """Return the axes of a module's states, as a prefix for `pmap`; other axes unchanged."""
        is_axes = isinstance(axis, nnx.StateAxes)
        return nnx.NodeStates.from_prefixes(axis.axes, metadata=axis) if is_axes else axis

    # pmap sees no modules: `to_tree` replaces each by its states, `from_tree` makes it again.
    to_tree = functools.partial(nnx.to_tree, split_fn=split_module, ctxtag=tag)
    state_axes = jax.tree.map(axes_of_states, (in_axes, out_axes))
    is_module = lambda state: isinstance(state, nnx.NodeStates)

    @functools.partial(pmap, in_axes=state_axes[0], out_axes=state_axes, **options)
    @functools.wraps(f)
    def mapped(*states: Any) -> Any:
        """Call `f` on one device; return the modules of its arguments, and its result."""
        args = nnx.from_tree(states, ctxtag=tag, is_inner=True)
        result = f(*args)
        # Only modules can have been changed by `f`; other arguments need not be returned.
        keep_module = lambda state, arg: arg if is_module(state) else None
        modules = jax.tree.map(keep_module, states, args, is_leaf=is_module)
        return to_tree((modules, result), prefix=(in_axes, out_axes))

    @functools.wraps(f)
    @nnx.update_context(tag)
    def call(*args: Any) -> Any:
        """Call `f` on all devices; in this context, `from_tree` updates the caller's modules."""
        output = mapped(*to_tree(args, prefix=in_axes))
        return nnx.from_tree(output, ctxtag=tag, is_inner=False)[1]  # [0]: the modules

    return call
