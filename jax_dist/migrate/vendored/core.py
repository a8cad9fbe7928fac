# SPDX-License-Identifier: 0BSD
"""Maps functions over devices, by jax.jit and jax.shard_map."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec


#: if again
def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the same result for the same arguments: it is compiled already."""
    known: dict[Any, Any] = {}

    @functools.wraps(make)
    def kept(fun: Any, *args: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, options))
        key = (fun, tree, *leaves)
        if key not in known:
            known[key] = make(fun, *args, **options)
        return known[key]

    return kept


@_once
#: end
def mapped(
    fun: Callable[..., Any],
    axis_name: Hashable = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,  #: devices
    backend: str | None = None,  #: devices
    axis_size: int | None = None,  #: devices
) -> Any:
    """Runs `fun` on one slice of its arguments per device, as jax.pmap does.

    Each array has one for each of the first devices, along dimension 0.
    Map a function once: each result compiles by itself.  #: not again
    """
    name = getattr(fun, "__name__", "the function")
    axis = "_mapped" if axis_name is None else axis_name
    #: if devices
    if devices is not None and not len(devices):
        raise ValueError("devices is empty; None stands for all of them")
    #: end

    def program(*args: Any, **kwargs: Any) -> Any:
        #: not devices: found = jax.devices()
        found = devices or jax.devices(backend)  #: devices
        if len({device.process_index for device in found}) > 1:
            raise NotImplementedError(
                f"{name} is for one process: migrate with --helpers full"
            )
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves((args, kwargs))}
        size: Any = sum(*sizes) if len(sizes) == 1 else 0
        if not 0 < size <= len(found):
            raise ValueError(
                f"{name} takes arrays with a slice for each of up to "
                f"{len(found)} devices, not of the sizes {sizes or 'of none'}"
            )
        #: if devices
        if axis_size not in (None, size):
            raise ValueError(f"{name} got {size} slices; {axis_size=}")
        #: end

        def body(*blocks: Any) -> Any:  # of size 1 along dimension 0
            own, by_name = jax.tree.map(lambda x: jnp.squeeze(x, 0), blocks)
            results = fun(*own, **by_name)
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), results)

        return jax.shard_map(
            body,
            mesh=Mesh(found[:size], (axis,)),
            in_specs=PartitionSpec(axis),
            out_specs=PartitionSpec(axis),
            check_vma=False,  # gradients as jax.pmap has them
        )(args, kwargs)

    program.__name__ = name
    jitted = jax.jit(program, donate_argnums=donate_argnums)
    return functools.update_wrapper(jitted, fun, updated=())
