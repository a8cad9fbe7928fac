# SPDX-License-Identifier: 0BSD
"""Maps functions over devices, by jax.jit and jax.shard_map."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer  #: processes
from jax.sharding import Mesh, NamedSharding, PartitionSpec


#: if again
def _once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the same result for the same arguments: it is compiled."""
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
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),  #: static
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,  #: devices
    backend: str | None = None,  #: devices
    axis_size: int | None = None,  #: devices
) -> Any:
    """Runs `fun` on one slice of its arguments per device, as jax.pmap does.

    An axis of None is for what all devices share.
    Each process gives and gets the slices of its own devices.  #: processes
    Map once: each result compiles by itself.  #: not again
    """
    name = getattr(fun, "__name__", "the function")
    axis_name = "_mapped" if axis_name is None else axis_name
    in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    #: if static
    static = static_broadcasted_argnums
    static = (static,) if isinstance(static, int) else tuple(static)
    #: end
    #: if devices
    if devices is not None and not len(devices):
        raise ValueError("devices is empty; None stands for all of them")
    #: end
    is_moving = False  # arguments may lie elsewhere, which jit refuses

    def each(change: Any, axes: Any, tree: Any) -> Any:
        def of_part(axis: int | None, part: Any) -> Any:
            one = functools.partial(change, axis=axis)
            return part if axis is None else jax.tree.map(one, part)

        return jax.tree.map(of_part, axes, tree, is_leaf=lambda x: x is None)

    def specs(axes: Any) -> Any:
        def spec(axis: int | None) -> PartitionSpec:
            if axis is not None and axis < 0:
                raise ValueError(f"{name}: {axis} is no axis from the front")
            dims = () if axis is None else (*[None] * axis, axis_name)
            return PartitionSpec(*dims)

        return jax.tree.map(spec, axes, is_leaf=lambda x: x is None)

    #: if static
    def dynamic(args: Any) -> Any:
        return tuple(x for i, x in enumerate(args) if i not in static)

    def with_static(args: Any, arrays: Any) -> list[Any]:
        rest = iter(arrays)
        return [x if i in static else next(rest) for i, x in enumerate(args)]

    #: end
    #: if processes
    @functools.cache
    def groups() -> list[list[Any]]:
        """The devices of each process, asked for by the first call."""
        #: not devices: found = jax.devices()
        found = devices or jax.devices(backend)  #: devices
        groups: dict[int, list[Any]] = {}
        for device in found:
            groups.setdefault(device.process_index, []).append(device)
        return [groups[process] for process in sorted(groups)]

    #: end
    #: not processes: def layout(args: Any, kwargs: Any) -> tuple[Any, Any, Mesh]:
    #: if processes
    def layout(
        args: Any, kwargs: Any, processes: int = 1
    ) -> tuple[Any, Any, Mesh]:
    #: end
        #: not static: arrays, axes = (args, kwargs), (in_axes, 0)
        #: if static
        arrays, axes = (dynamic(args), kwargs), (in_axes, 0)
        if static and isinstance(in_axes, tuple):
            axes = dynamic(in_axes[: len(args)]), 0
        #: end
        sizes: set[Any] = set()
        size_of = lambda x, axis: sizes.add(jnp.shape(x)[axis : axis + 1])
        each(size_of, axes, arrays)
        size = sum(*sizes) if len(sizes) == 1 else 0
        #: not processes & not devices: found = jax.devices()
        #: not processes & devices: found = devices or jax.devices(backend)
        #: not processes: most, chosen = len(found), found[:size]
        #: if processes
        size //= processes
        most = min(map(len, groups()))
        chosen = [device for group in groups() for device in group[:size]]
        #: end
        if not 0 < size <= most:
            raise ValueError(
                f"{name} takes arrays with a slice for each of up to {most} "
                f"devices, not of the sizes {sizes or 'of none'}"
            )
        #: if devices
        if axis_size not in (None, len(chosen)):
            raise ValueError(f"{name} got {len(chosen)} slices; {axis_size=}")
        #: end
        #: not processes: if len({device.process_index for device in found}) > 1:
        #: not processes:     raise NotImplementedError(
        #: not processes:         f"{name} is for one process: migrate with --helpers full"
        #: not processes:     )
        return arrays, axes, Mesh(chosen, (axis_name,))

    def program(*args: Any, **kwargs: Any) -> Any:
        #: not processes: arrays, axes, mesh = layout(args, kwargs)
        arrays, axes, mesh = layout(args, kwargs, len(groups()))  #: processes

        def body(*blocks: Any) -> Any:  # of size 1 along their axes
            own, by_name = each(jnp.squeeze, axes, blocks)
            own = with_static(args, own)  #: static
            return each(jnp.expand_dims, out_axes, fun(*own, **by_name))

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=specs(axes),
            out_specs=specs(out_axes),
            check_vma=False,  # gradients as jax.pmap has them
        )(*arrays)

    program.__name__ = name
    #: not static: jitted = jax.jit(program, donate_argnums=donate_argnums)
    #: if static
    jitted = jax.jit(
        program, static_argnums=static, donate_argnums=donate_argnums
    )
    #: end

    #: if processes
    def placed(args: Any, kwargs: Any) -> tuple[Any, Any, Mesh]:
        arrays, axes, mesh = layout(args, kwargs)
        place = functools.partial(NamedSharding, mesh.local_mesh)
        own = jax.device_put(arrays, jax.tree.map(place, specs(axes)))
        own = over(mesh, axes, own)
        #: not static: return *own, mesh
        return with_static(args, own[0]), own[1], mesh  #: static

    def over(mesh: Mesh, axes: Any, tree: Any) -> Any:
        """The slices of this process, as arrays over another mesh."""

        def of_part(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(lambda x: of_leaf(spec, x), part)

        def of_leaf(spec: PartitionSpec, x: Any) -> jax.Array:
            if isinstance(x, Tracer):
                raise NotImplementedError(
                    f"{name}, run by several processes, is called "
                    "inside jit, grad or vmap, where a process has only its "
                    "own slices: put these inside the function"
                )
            shape = list(x.shape)
            if len(spec):
                shape[len(spec) - 1] = mesh.size
            return jax.make_array_from_single_device_arrays(
                tuple(shape),
                NamedSharding(mesh, spec),
                [shard.data for shard in x.addressable_shards],
            )

        if len(groups()) == 1:
            return tree
        return jax.tree.map(of_part, specs(axes), tree)

    #: end
    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_moving
        #: not processes: if not is_moving:
        if not is_moving and len(groups()) == 1:  #: processes
            try:
                return jitted(*args, **kwargs)
            except ValueError:  # jit takes nothing that lies elsewhere
                is_moving = True
        #: not processes: arrays, axes, mesh = layout(args, kwargs)
        #: not processes: place = functools.partial(NamedSharding, mesh)
        #: not processes: own = jax.device_put(arrays, jax.tree.map(place, specs(axes)))
        #: not processes & not static: return jitted(*own[0], **own[1])
        #: not processes & static: return jitted(*with_static(args, own[0]), **own[1])
        #: if processes
        args, kwargs, mesh = placed(args, kwargs)
        return over(mesh.local_mesh, out_axes, jitted(*args, **kwargs))
        #: end

    #: if processes
    def lower(*args: Any, **kwargs: Any) -> Any:
        if len(groups()) > 1:
            args, kwargs, _ = placed(args, kwargs)
        return jitted.lower(*args, **kwargs)

    #: end
    #: not processes: vars(call)["lower"] = jitted.lower
    vars(call)["lower"] = lower  #: processes
    return call
