# SPDX-License-Identifier: 0BSD
# Written by jax-dist migrate --to vendored. It is yours to keep and to edit.
"""`mapped`: `jax.pmap` by `jax.jit` and `jax.shard_map`.

An argument `[devices, ...]` is sharded over a mesh of so many devices. Each
gets a block `[1, ...]`, drops that axis for the function, and adds it back to
the results.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mapped(
    fun: Callable[..., Any],
    axis_name: Hashable = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
) -> Any:
    """Run `fun` on one slice of its arguments per device, as jax.pmap does.

    An axis of None is for what all devices share; keywords are mapped over
    dimension 0. With several processes, each passes and gets the slices of
    its own devices. The same function, mapped again in the same way, is not
    compiled again.
    """
    if devices is not None and not len(devices):
        raise ValueError("devices is empty; use None for all devices")
    as_tuple = lambda numbers: (numbers,) if isinstance(numbers, int) else tuple(numbers)
    program = _program(
        fun,
        "_mapped" if axis_name is None else axis_name,
        tuple(in_axes) if isinstance(in_axes, list) else in_axes,
        out_axes,
        as_tuple(static_broadcasted_argnums),
        as_tuple(donate_argnums),
        None if devices is None else tuple(devices),
        backend,
        axis_size,
    )

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return program.call(*args, **kwargs)

    vars(call).update(lower=program.lower, fun=fun)  # `fun` lives with `call`
    return call


# By function, then by options. A program holds its function weakly.
_programs: Any = weakref.WeakKeyDictionary()


def _program(fun: Any, *options: Any) -> "_Program":
    """Return the program of a function with these options, the same one each time."""
    name = getattr(fun, "__name__", type(fun).__name__)
    leaves, tree = jax.tree.flatten(options, is_leaf=lambda x: x is None)
    try:
        if inspect.ismethod(fun):  # a new object at each access
            owner, method, get_fun = fun.__self__, fun.__func__, weakref.WeakMethod(fun)
        else:
            owner, method, get_fun = fun, None, weakref.ref(fun)
        known, key = _programs.setdefault(owner, {}), (method, tree, *leaves)
        if key not in known:
            known[key] = _Program(get_fun, name, *options)
        return known[key]
    except TypeError:  # it cannot be hashed or held weakly
        return _Program(lambda: fun, name, *options)


class _Program:
    """One function with its options, on global arrays of all processes."""

    def __init__(self, get_fun: Callable[[], Any], name: str, *options: Any):
        self.get_fun, self.name = get_fun, name
        self.axis_name, self.in_axes, self.out_axes, self.static, donated, *rest = options
        self.devices, self.backend, self.axis_size = rest
        self.must_place = False  # an argument was on other devices, which jit rejects
        run = lambda *args, **kwargs: self.run(args, kwargs)
        run.__name__ = name
        self.jitted = jax.jit(run, static_argnums=self.static, donate_argnums=donated)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Run the function on each device, with its slices; jit traces this."""
        arrays, axes, mesh = self.layout(args, kwargs, len(self.devices_by_process))

        def body(*blocks: Any) -> Any:  # of size 1 along their axes
            slices, by_name = _map_axes(jnp.squeeze, axes, blocks)
            results = self.get_fun()(*self.with_static(args, slices), **by_name)
            return _map_axes(jnp.expand_dims, self.out_axes, results)

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=self.specs(axes),
            out_specs=self.specs(self.out_axes),
            check_vma=False,  # gradients as jax.pmap has them
        )(*arrays)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program with the slices of this process, and return its own of the results."""
        if len(self.devices_by_process) == 1 and not self.must_place:
            try:
                return self.jitted(*args, **kwargs)
            except ValueError as error:
                if "incompatible devices" not in str(error):
                    raise
                self.must_place = True
        args, kwargs, mesh = self.place(args, kwargs)
        results = self.jitted(*args, **kwargs)
        return self.to_mesh(mesh.local_mesh, results, self.out_axes)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.devices_by_process) > 1:
            args, kwargs, _ = self.place(args, kwargs)
        return self.jitted.lower(*args, **kwargs)

    @functools.cached_property
    def devices_by_process(self) -> list[list[Any]]:
        """A list of devices for each process; read by the first call."""
        groups: dict[int, list[Any]] = {}
        for device in self.devices or jax.devices(self.backend):
            groups.setdefault(device.process_index, []).append(device)
        return [groups[process] for process in sorted(groups)]

    def specs(self, axes: Any) -> Any:
        """Return `P(None, axis_name)` for an axis 1, and `P()` for None."""

        def spec(axis: int | None) -> PartitionSpec:
            if axis is None:
                return PartitionSpec()
            if axis < 0:
                raise ValueError(f"{self.name}: axis {axis} counts from the end")
            return PartitionSpec(*[None] * axis, self.axis_name)

        return jax.tree.map(spec, axes, is_leaf=lambda x: x is None)

    def with_static(self, args: Any, arrays: Any) -> list[Any]:
        """Return `args` with these arrays for those that are not static."""
        rest = iter(arrays)
        return [x if i in self.static else next(rest) for i, x in enumerate(args)]

    def layout(self, args: Any, kwargs: Any, processes: int = 1) -> Any:
        """Return the arrays, their axes, and a mesh with a device for each slice."""
        dynamic = lambda xs: tuple(x for i, x in enumerate(xs) if i not in self.static)
        arrays, axes = (dynamic(args), kwargs), (self.in_axes, 0)
        if self.static and isinstance(self.in_axes, tuple):
            axes = dynamic(self.in_axes[: len(args)]), 0
        self.specs(axes)  # raises for axes from the end
        sizes: set[Any] = set()  # of mapped axes: (8,), or () of a number
        _map_axes(lambda x, axis: sizes.add(jnp.shape(x)[axis : axis + 1]), axes, arrays)
        slices = sum(*sizes) // processes if len(sizes) == 1 else 0  # in each process
        most = min(map(len, self.devices_by_process))
        if not 0 < slices <= most:
            raise ValueError(
                f"{self.name} takes arrays with one slice for each of up to {most} devices "
                f"along their mapped axes; it got the sizes {sorted(sizes)}"
            )
        chosen = [device for devices in self.devices_by_process for device in devices[:slices]]
        if self.axis_size not in (None, len(chosen)):
            raise ValueError(f"{self.name} got {len(chosen)} slices; axis_size={self.axis_size}")
        return arrays, axes, Mesh(chosen, (self.axis_name,))

    def place(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments on the devices of the program, and its mesh."""
        arrays, axes, mesh = self.layout(args, kwargs)
        shard = functools.partial(NamedSharding, mesh.local_mesh)
        arrays = jax.device_put(arrays, jax.tree.map(shard, self.specs(axes)))
        arrays, kwargs = self.to_mesh(mesh, arrays, axes)
        return self.with_static(args, arrays), kwargs, mesh

    def to_mesh(self, mesh: Mesh, tree: Any, axes: Any) -> Any:
        """Return arrays over a mesh of all processes, or of this one, of the same slices here."""
        if len(self.devices_by_process) == 1:
            return tree

        def make_array(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            if isinstance(x, Tracer):
                raise NotImplementedError(
                    f"{self.name} is called inside jit, grad or vmap in several "
                    "processes, where each has its own slices: call it outside"
                )
            shape = list(x.shape)
            if len(spec):  # P(None, "i"): the mapped axis is the last one of the spec
                shape[len(spec) - 1] = mesh.size
            slices = [shard.data for shard in x.addressable_shards]
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, slices)

        make_part = lambda spec, part: jax.tree.map(lambda x: make_array(x, spec), part)
        return jax.tree.map(make_part, self.specs(axes), tree)


def _map_axes(change: Any, axes: Any, tree: Any) -> Any:
    """Return `change(leaf, axis)` of each leaf; those of axis None stay."""

    def map_part(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(lambda x: change(x, axis), part)

    return jax.tree.map(map_part, axes, tree, is_leaf=lambda x: x is None)


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Stack trees, one on each device: `[...]` becomes `[devices, ...]`."""
    if len(shards) != len(devices):
        raise ValueError(f"{len(shards)} shards for {len(devices)} devices")
    sharding = NamedSharding(Mesh(list(devices), ("devices",)), PartitionSpec("devices"))

    def put(*leaves: Any) -> jax.Array:
        rows = [jax.device_put(x, d)[None] for x, d in zip(leaves, devices, strict=True)]
        shape = (len(rows), *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(put, *shards)


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Stack a copy for each device: `[...]` becomes `[devices, ...]`."""
    return device_put_sharded([x] * len(devices), devices)
