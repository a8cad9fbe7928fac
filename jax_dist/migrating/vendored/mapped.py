# SPDX-License-Identifier: 0BSD
"""What `jax.pmap` does, by `jax.jit` and `jax.shard_map`.

`mapped` takes the arguments of `jax.pmap` and keeps its contract: each device
runs the function on one slice of the arguments, and each of several processes
gives and gets the slices of its own devices. It uses public names of JAX 0.8
or newer, and asks for devices when a mapped function is first called.

Where devices and layouts are known, plain JAX needs none of this:

    jax.jit(jax.shard_map(fun, mesh=..., in_specs=..., out_specs=...))
"""

import dataclasses
import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def mapped(
    fun: Callable[..., Any],
    axis_name: Hashable = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Maps a function over devices, one slice of its arguments on each.

    Args:
      fun: The function of one slice. Mapped again in the same way, it is not
        compiled again for as long as it lives.
      axis_name: What collectives in `fun` call the mapped axis.
      in_axes: The mapped dimension of each positional argument, None for what
        all devices share, or a tree of these that is a prefix of the
        arguments. Arguments by keyword are mapped over dimension 0.
      out_axes: Where that dimension goes in each result; None for a result
        that is the same on all devices.
      static_broadcasted_argnums: Positions of hashable Python values.
      donate_argnums: Positions of arguments whose memory the results may take.
      devices: The devices to use, the same in every process; all by default.
      backend: Whose devices to use where `devices` are not given: "cpu".
      axis_size: The number of slices over all processes, to be checked.

    Returns:
      A function of stacked arguments, with a method `lower` as jax.jit gives.
    """
    if not callable(fun):
        raise TypeError(f"mapped takes a function, not {fun!r}")
    for axis in jax.tree.leaves((in_axes, out_axes)):
        if type(axis) is not int:
            raise ValueError(f"{axis!r} among the axes is no int")
    if devices is not None and not len(devices):
        raise ValueError("devices is empty; None stands for all of them")
    program = _program(
        fun,
        "mapped" if axis_name is None else axis_name,
        _axes(in_axes),
        _axes(out_axes),
        _positions(static_broadcasted_argnums),
        _positions(donate_argnums),
        None if devices is None else tuple(devices),
        backend,
        axis_size,
    )

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return program.run(fun, args, kwargs)

    call.lower = functools.partial(program.lower, fun)  # type: ignore
    return call


_SHARED = "shared"  # for None among axes, which would be no leaf of a tree


def _axes(tree: Any) -> Any:
    is_none = lambda axis: axis is None  # noqa: E731
    return jax.tree.map(
        lambda axis: _SHARED if axis is None else axis, tree, is_leaf=is_none
    )


def _positions(numbers: int | Iterable[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


@dataclasses.dataclass(eq=False)
class _Program:
    """A function that is mapped in one way: one `jax.jit` for all its calls.

    The mesh is found while JAX traces, from the sizes of the arguments, so
    that a call costs what a call of `jax.jit` does. The function is held
    weakly, for `_programs` keeps this as long as the function lives.
    """

    fun: Callable[[], Any]  # gives the function
    name: str
    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]
    chosen: tuple[Any, ...] | None  # devices
    backend: str | None
    axis_size: int | None
    has_strays: bool = False  # some arguments of the last call lay elsewhere

    def __post_init__(self) -> None:
        # With several processes, each call asks for these.
        self.layout = functools.cache(self.layout)  # type: ignore
        self.broadcast = functools.cache(self.broadcast)  # type: ignore

    @functools.cached_property
    def jitted(self) -> Any:
        # Not functools.wraps: by the signature of the function, jit would
        # donate and hold static what is given by keyword; pmap does not.
        def traced(*args: Any, **kwargs: Any) -> Any:
            return self.trace(args, kwargs)

        traced.__name__ = traced.__qualname__ = self.name
        return jax.jit(
            traced, static_argnums=self.static, donate_argnums=self.donated
        )

    @functools.cached_property
    def devices(self) -> Sequence[Any]:
        """Those that may be used; asked for by the first call."""
        if self.chosen is not None:
            return self.chosen
        devices = jax.devices(self.backend)
        return sorted(devices, key=lambda device: device.process_index)

    @functools.cached_property
    def processes(self) -> int:
        """How many processes own them."""
        return len({device.process_index for device in self.devices})

    def run(self, fun: Any, args: Any, kwargs: Any) -> Any:
        del fun  # the reference of the caller keeps it alive
        if self.processes > 1 or self.has_strays:
            return self.run_placed(args, kwargs)
        try:
            return self.jitted(*args, **kwargs)
        except ValueError as error:
            # jit takes no arrays that lie on other devices, and pmap takes
            # some. Every other error is the caller's.
            try:
                self.placed(args, kwargs)
            except ValueError:
                raise error from None
            if not self.has_strays:
                raise
        return self.run_placed(args, kwargs)

    def run_placed(self, args: Any, kwargs: Any) -> Any:
        leaves, tree, mesh = self.placed(args, kwargs)
        results = self.apply(self.jitted, args, tree, leaves)
        if self.processes == 1:
            return results
        leaves, tree = jax.tree.flatten(results)
        local = mesh.local_mesh
        for i, axis in enumerate(self.broadcast("out_axes", tree)):
            whole = self.checked(leaves[i])
            leaves[i] = _shared(whole, _sharding(local, axis), axis)
            _wholes[leaves[i]] = whole  # for a state that is fed back
        return tree.unflatten(leaves)

    def lower(self, fun: Any, *args: Any, **kwargs: Any) -> Any:
        """As jit's; with several processes, for the arguments of all."""
        del fun
        if self.processes == 1:
            return self.jitted.lower(*args, **kwargs)
        leaves, tree, _ = self.placed(args, kwargs)
        return self.apply(self.jitted.lower, args, tree, leaves)

    def placed(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Mesh]:
        """The leaves where they belong, as arrays of all processes."""
        leaves, tree = self.flatten(args, kwargs)
        if self.processes > 1:
            leaves = list(map(self.checked, leaves))
        axes, mesh = self.layout(tree, tuple(map(jax.numpy.shape, leaves)))
        self.has_strays = False
        local = mesh.local_mesh
        for i, axis in enumerate(axes):
            leaf, place = leaves[i], _sharding(mesh, axis)
            whole = _wholes.get(leaf) if self.processes > 1 else None
            if whole is None or whole.sharding != place:
                here = _sharding(local, axis)
                is_put = self.processes > 1 or _is_committed(leaf)
                if is_put and not _is_at(leaf, here):
                    leaf, self.has_strays = jax.device_put(leaf, here), True
                whole = leaf
                if self.processes > 1:
                    whole = _shared(leaf, place, axis)
            leaves[i] = whole
        return leaves, tree, mesh

    def checked(self, leaf: Any) -> Any:
        if isinstance(leaf, Tracer):
            raise NotImplementedError(
                f"{self.name}, mapped over {self.processes} processes, is "
                "called inside jit, grad or vmap, where a process has only "
                "its own slices: put these inside the function"
            )
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return jax.numpy.zeros(leaf.shape, bool)  # no device holds float0
        return leaf

    def trace(self, args: Any, kwargs: Any) -> Any:
        """The shard_map for these arguments, which are those of all."""
        leaves, tree = self.flatten(args, kwargs)
        shapes = tuple(map(jax.numpy.shape, leaves))
        axes, mesh = self.layout(tree, shapes, self.processes)

        def body(*blocks: Any) -> Any:
            slices = [
                block if axis is _SHARED else jax.numpy.squeeze(block, axis)
                for block, axis in zip(blocks, axes)
            ]
            results = self.apply(self.fun(), args, tree, slices)
            leaves, out_tree = jax.tree.flatten(results)
            out_axes = self.broadcast("out_axes", out_tree)
            return out_tree.unflatten(
                leaf if axis is _SHARED else jax.numpy.expand_dims(leaf, axis)
                for leaf, axis in zip(leaves, out_axes)
            )

        spec = lambda axis: _sharding(mesh, axis).spec  # noqa: E731
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(map(spec, axes)),
            out_specs=jax.tree.map(spec, self.out_axes),
            check_vma=False,  # with it, gradients would be summed once more
        )(*leaves)

    def flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """The leaves of the arguments that are not static, and their tree."""
        dynamic = [x for i, x in enumerate(args) if i not in self.static]
        return jax.tree.flatten((dynamic, kwargs))

    def apply(self, fun: Any, args: Any, tree: Any, leaves: Any) -> Any:
        """Calls a function with new leaves, and the static ones of `args`."""
        arguments, kwargs = tree.unflatten(leaves)
        for i in sorted(self.static):
            arguments[i:i] = args[i : i + 1]
        return fun(*arguments, **kwargs)

    def layout(
        self, tree: Any, shapes: tuple[Any, ...], processes: int = 1
    ) -> tuple[list[Any], Mesh]:
        """The mapped dimension of each leaf, and the mesh for their sizes.

        The leaves have the slices of so many processes.
        """
        axes = self.broadcast("in_axes", tree)
        numbers = tree.unflatten(range(tree.num_leaves))
        found: dict[str, str] = {}  # what was seen, and where first
        size = 0
        for path, i in jax.tree.leaves_with_path(numbers):
            axis, shape = axes[i], shapes[i]
            if axis is _SHARED:
                continue
            where = ("args", "kwargs")[path[0].idx]
            where += jax.tree_util.keystr(path[1:])
            if axis < len(shape):
                size = shape[axis] // processes
                found.setdefault(f"{size} slices", where)
            else:
                found[f"no dimension {axis}"] = where
        if len(found) != 1 or not size:
            seen = ", ".join(f"{n} in {where}" for n, where in found.items())
            raise ValueError(
                f"{self.name} maps over as many devices as its arguments have "
                "slices, all the same; None in in_axes marks those that all "
                f"devices share. Found {seen or 'no argument that is mapped'}."
            )
        return axes, self.mesh(size)

    def broadcast(self, name: str, tree: Any) -> list[Any]:
        """in_axes or out_axes: one for each leaf of a tree."""
        axes = getattr(self, name)
        if name == "in_axes":
            if isinstance(axes, tuple):
                axes = [x for i, x in enumerate(axes) if i not in self.static]
            axes = (axes, 0)  # keyword arguments
        numbers = tree.unflatten(range(tree.num_leaves))
        try:
            leaves = jax.tree.leaves(jax.tree.broadcast(axes, numbers))
        except ValueError as error:
            raise ValueError(
                f"{self.name}: {name} does not fit. Its first part is for the "
                "arguments by position; each argument passed by keyword is "
                f"mapped over dimension 0. {error}"
            ) from None
        for axis in leaves:
            if axis is not _SHARED and axis < 0:
                raise ValueError(
                    f"{self.name}: {axis} in {name}; axes count from the front"
                )
        return leaves

    def mesh(self, size: int) -> Mesh:
        """A mesh of the first `size` devices of each process."""
        total = size * self.processes
        if self.axis_size not in (None, total):
            stated = f"axis_size={self.axis_size}"
            raise ValueError(
                f"{self.name} has {stated}, and got {total} slices"
            )
        own = defaultdict(list)
        for device in self.devices:
            own[device.process_index].append(device)
        fewest = min(map(len, own.values()))
        if size > fewest:
            slices = f"{size} slices, one for each of {fewest} devices"
            raise ValueError(f"{self.name} got {slices}")
        chosen = [d for d in self.devices if d in own[d.process_index][:size]]
        return Mesh(chosen, (self.axis_name,))


@functools.lru_cache(maxsize=4096)
def _sharding(mesh: Mesh, axis: Any) -> NamedSharding:
    """One slice of a dimension on each device, or all of it."""
    if axis is _SHARED:
        return NamedSharding(mesh, PartitionSpec())
    spec = PartitionSpec(*[None] * axis, *mesh.axis_names)
    return NamedSharding(mesh, spec)


def _is_committed(x: Any) -> bool:
    is_tracer = isinstance(x, Tracer)
    return isinstance(x, jax.Array) and not is_tracer and x.committed


def _is_at(x: Any, place: NamedSharding) -> bool:
    is_array = isinstance(x, jax.Array)
    return is_array and x.sharding.is_equivalent_to(place, x.ndim)


def _shared(array: jax.Array, place: NamedSharding, axis: Any) -> jax.Array:
    """The same slices as an array over another mesh; nothing is copied."""
    shape = list(array.shape)
    if axis is not _SHARED:
        shape[axis] = place.mesh.size
    slices = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(
        tuple(shape), place, slices
    )


class _Memory:
    """Values by object, not by equality, for as long as the objects live."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}

    def get(self, owner: Any) -> Any:
        alive, value = self.known.get(id(owner), (lambda: None, None))
        return value if alive() is owner else None

    def __setitem__(self, owner: Any, value: Any) -> None:
        key = id(owner)
        forget = lambda _: self.known.pop(key, None)  # noqa: E731
        self.known[key] = weakref.ref(owner, forget), value


_programs = _Memory()  # by function, or a method's object: {options: program}
_wholes = _Memory()  # by the array of one process: that of all processes


def _program(fun: Any, *options: Any) -> _Program:
    """The program for these options, the same for as long as `fun` lives."""
    is_method = inspect.ismethod(fun)
    owner = fun.__self__ if is_method else fun
    name = getattr(fun, "__name__", type(fun).__name__)
    programs = _programs.get(owner)
    if programs is None:
        programs = {}
        try:
            _programs[owner] = programs
        except TypeError:  # an object that cannot be held weakly
            return _Program(lambda: fun, name, *options)
    leaves, tree = jax.tree.flatten(options)
    how = (fun.__func__ if is_method else None, tree, *leaves)
    if how not in programs:
        weakly = weakref.WeakMethod if is_method else weakref.ref
        programs[how] = _Program(weakly(fun), name, *options)
    return programs[how]


def device_put_sharded(shards: Sequence[Any], devices: Sequence[Any]) -> Any:
    """Stacks trees, one on each device: `[...]` becomes `[devices, ...]`."""
    if len(shards) != len(devices):
        raise ValueError(f"{len(shards)} shards for {len(devices)} devices")
    mesh = Mesh(list(devices), ("devices",))
    sharding = NamedSharding(mesh, PartitionSpec("devices"))

    def put(*leaves: Any) -> jax.Array:
        rows = [
            jax.device_put(jax.numpy.expand_dims(leaf, 0), device)
            for leaf, device in zip(leaves, devices)
        ]
        shape = (len(rows), *rows[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(put, *shards)


def device_put_replicated(x: Any, devices: Sequence[Any]) -> Any:
    """Stacks a copy for each device: `[...]` becomes `[devices, ...]`."""
    return device_put_sharded([x] * len(devices), devices)


def per_device(
    fun: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """`fun` for jax.shard_map: its blocks have the mapped axes, of size 1.

    `in_axes` and `out_axes` are those of jax.pmap; None for what all devices
    share.
    """

    def change(how: Callable[..., Any], axes: Any, tree: Any) -> Any:
        def one(axis: int | None, part: Any) -> Any:
            if axis is None:
                return part
            return jax.tree.map(lambda x: how(x, axis), part)

        return jax.tree.map(one, axes, tree, is_leaf=lambda axis: axis is None)

    @functools.wraps(fun)
    def body(*args: Any) -> Any:
        args = change(jax.numpy.squeeze, in_axes, args)
        return change(jax.numpy.expand_dims, out_axes, fun(*args))

    return body


def replicated(tree: Any, devices: Sequence[Any] | None = None) -> Any:
    """A whole copy of each leaf on every device, without an axis over them."""
    mesh = Mesh(jax.devices() if devices is None else list(devices), ("i",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and x.is_fully_replicated:
            x = x.addressable_data(0)  # the first copy counts, if they differ
        x = jax.numpy.array(x, jax.numpy.result_type(x))  # `tree` is not to
        return jax.device_put(x, sharding)  # be donated with it

    return jax.tree.map(put, tree)


def with_device_axis(tree: Any) -> Any:
    """The copy of each device as a slice: `[...]` becomes `[devices, ...]`."""

    def put(x: jax.Array) -> jax.Array:
        shards = x.addressable_shards
        mesh = Mesh([shard.device for shard in shards], ("devices",))
        sharding = NamedSharding(mesh, PartitionSpec("devices"))
        rows = [jax.numpy.expand_dims(shard.data, 0) for shard in shards]
        shape = (len(rows), *x.shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, rows)

    return jax.tree.map(put, tree)
