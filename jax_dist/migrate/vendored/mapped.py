# SPDX-License-Identifier: 0BSD
"""What `jax.pmap` does, by `jax.jit` and `jax.shard_map`.

`mapped` takes the arguments of `jax.pmap` and keeps its contract: each device
runs the function on one slice of the arguments, and each of several processes
gives and gets the slices of its own devices. It uses public names of JAX 0.8
or newer, and asks for devices when a mapped function is first called.

Where devices and layouts are known, plain JAX needs none of this:

    jax.jit(jax.shard_map(fun, mesh=..., in_specs=..., out_specs=...))
"""

import collections
import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

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
    if devices is not None and not len(devices):
        raise ValueError("devices is empty; None stands for all of them")
    options = _Options(
        "_mapped" if axis_name is None else axis_name,
        _axes(tuple(in_axes) if isinstance(in_axes, list) else in_axes),
        _axes(out_axes),
        _positions(static_broadcasted_argnums),
        _positions(donate_argnums),
        None if devices is None else tuple(devices),
        backend,
        axis_size,
    )
    program = _program(fun, options)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        if program.processes == 1 and not program.has_strays:
            try:
                return program.jitted(*args, **kwargs)
            except ValueError:
                # jit takes no arrays that lie on other devices, and pmap takes
                # some. Every other error is the caller's.
                with contextlib.suppress(ValueError):
                    program.place(args, kwargs)
                if not program.has_strays:
                    raise
        return program.run(args, kwargs)

    @functools.wraps(fun)  # so that it, too, keeps the function alive
    def lower(*args: Any, **kwargs: Any) -> Any:
        if program.processes > 1:
            args, kwargs, _ = program.place(args, kwargs)
        return program.jitted.lower(*args, **kwargs)

    vars(call)["lower"] = lower
    return call


class _Options(NamedTuple):
    """How a function is mapped; JAX takes it apart as a tree."""

    axis_name: Hashable
    in_axes: Any
    out_axes: Any
    static: tuple[int, ...]
    donated: tuple[int, ...]
    devices: tuple[Any, ...] | None
    backend: str | None
    axis_size: int | None


_MARK = object()  # for a leaf; of a number, a node may make an array
_SHARED = "shared"  # for None among axes, which would be no leaf of a tree


def _axes(tree: Any) -> Any:
    def one(axis: Any) -> Any:
        if axis is not None and type(axis) is not int:
            raise ValueError(f"{axis!r} among the axes is no int")
        return _SHARED if axis is None else axis

    return jax.tree.map(one, tree, is_leaf=lambda axis: axis is None)


def _positions(numbers: int | Iterable[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


class _Program:
    """A function that is mapped in one way: one `jax.jit` for all its calls.

    The mesh is found while JAX traces, from the sizes of the arguments, so
    that a call costs what a call of `jax.jit` does. The function is held
    weakly, for `_programs` keeps this as long as the function lives.
    """

    def __init__(
        self, fun: Callable[[], Any], name: str, options: _Options
    ) -> None:
        # Not functools.wraps: by the signature of the function, jit would
        # donate and hold static what is given by keyword; pmap does not. And
        # jit takes a keyword called as the positions are for one of these.
        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            return self.trace(flat_args, kwargs)

        self.fun, self.options, self.has_strays = fun, options, False
        self.name = traced.__name__ = traced.__qualname__ = name
        self.jitted = jax.jit(
            traced,
            static_argnums=options.static,
            donate_argnums=options.donated,
        )
        # With several processes, each call asks for these.
        self.layout = functools.cache(self.find_layout)
        self.spread = functools.cache(self.find_spread)

    @functools.cached_property
    def devices(self) -> Sequence[Any]:
        """Those that may be used; asked for by the first call."""
        return self.options.devices or sorted(
            jax.devices(self.options.backend), key=lambda x: x.process_index
        )

    @functools.cached_property
    def processes(self) -> int:
        """How many own them."""
        owners = {device.process_index for device in self.devices}
        # Of a topology, whose programs are only compiled, no process is here.
        return len(owners) if max(owners) < jax.process_count() else 1

    def trace(self, args: Any, kwargs: Any) -> Any:
        """The shard_map for these arguments, which are those of all."""
        leaves, shapes, tree = self.flatten(args, kwargs)
        axes, mesh = self.layout(tree, shapes, self.processes)

        def body(*blocks: Any) -> Any:
            slices = _each(jax.numpy.squeeze, blocks, axes)
            own, by_name = self.unflatten(tree, slices, args)
            results, out_tree = jax.tree.flatten(self.fun()(*own, **by_name))
            out_axes = self.spread("out_axes", out_tree)
            stacked = _each(jax.numpy.expand_dims, results, out_axes)
            return out_tree.unflatten(stacked)

        def spec(axis: Any) -> PartitionSpec:
            return _sharding(mesh, axis).spec

        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(map(spec, axes)),
            out_specs=jax.tree.map(spec, self.options.out_axes),
            check_vma=False,  # with it, gradients would be summed once more
        )(*leaves)

    def run(self, args: Any, kwargs: Any) -> Any:
        """A call whose arguments may lie elsewhere, or in one process only."""
        args, kwargs, mesh = self.place(args, kwargs)
        results = self.jitted(*args, **kwargs)
        if self.processes == 1:
            return results
        leaves, tree = jax.tree.flatten(results)
        self.refuse_traced(leaves)
        axes = self.spread("out_axes", tree)
        places = _shardings(mesh.local_mesh, axes)
        return tree.unflatten(list(map(_part, leaves, places, axes)))

    def place(self, args: Any, kwargs: Any) -> tuple[Any, Any, Mesh]:
        """The arguments where they belong, as arrays of all processes."""
        leaves, shapes, tree = self.flatten(args, kwargs)
        if self.processes > 1:
            self.refuse_traced(leaves)
        axes, mesh = self.layout(tree, shapes)
        change = _whole if self.processes > 1 else _moved
        new = list(map(change, leaves, _shardings(mesh, axes), axes))
        self.has_strays = any(x is not y for x, y in zip(leaves, new))
        return *self.unflatten(tree, new, args), mesh

    def refuse_traced(self, leaves: list[Any]) -> None:
        if any(issubclass(kind, Tracer) for kind in set(map(type, leaves))):
            raise NotImplementedError(
                f"{self.name}, mapped over {self.processes} processes, is "
                "called inside jit, grad or vmap, where a process has only "
                "its own slices: put these inside the function"
            )

    def flatten(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any]:
        """Leaves of what is not static, their shapes, and the tree."""
        static = self.options.static
        args = [None if i in static else x for i, x in enumerate(args)]
        leaves, tree = jax.tree.flatten((tuple(args), kwargs))
        return leaves, tuple(getattr(x, "shape", ()) for x in leaves), tree

    def unflatten(self, tree: Any, leaves: Any, args: Any) -> tuple[Any, Any]:
        """Arguments of new leaves, and of what is static in `args`."""
        new, kwargs = tree.unflatten(leaves)
        static = self.options.static
        new = [args[i] if i in static else x for i, x in enumerate(new)]
        return new, kwargs

    def find_layout(
        self, tree: Any, shapes: tuple[Any, ...], processes: int = 1
    ) -> tuple[tuple[Any, ...], Mesh]:
        """The mapped dimension of each leaf, and the mesh for their sizes.

        The leaves have the slices of so many processes.
        """
        axes = self.spread("in_axes", tree)
        marks = tree.unflatten([_MARK] * tree.num_leaves)
        found: dict[Any, str] = {}  # by size: where it was seen first
        for i, (path, _) in enumerate(jax.tree.leaves_with_path(marks)):
            if axes[i] is not _SHARED:
                size = shapes[i][axes[i] : axes[i] + 1]  # () where it has none
                where = ("args", "kwargs")[path[0].idx]
                found.setdefault(size, where + jax.tree_util.keystr(path[1:]))
        if len(found) != 1 or not any(*found):
            seen = ", ".join(
                f"{n[0] // processes if n else 'no'} slices in {where}"
                for n, where in found.items()
            )
            raise ValueError(
                f"{self.name} maps over as many devices as its arguments have "
                "slices, all the same; None in in_axes marks those that all "
                f"devices share. Found {seen or 'no argument that is mapped'}."
            )
        ((total,),) = found
        return axes, self.mesh(total // processes)

    def find_spread(self, name: str, tree: Any) -> tuple[Any, ...]:
        """in_axes or out_axes: one for each leaf of a tree."""
        axes, static = getattr(self.options, name), self.options.static
        marks = tree.unflatten([_MARK] * tree.num_leaves)
        if name == "in_axes" and static and type(axes) is tuple:
            # Those of static arguments say nothing, and need not be there.
            numbers = range(len(marks[0]))
            if all(i in static or i < len(axes) for i in numbers):
                axes = tuple(0 if i in static else axes[i] for i in numbers)
        prefix = (axes, 0) if name == "in_axes" else axes  # 0: for keywords
        leaves = []

        def take(axis: Any, part: Any) -> None:
            leaves.extend([axis] * jax.tree.structure(part).num_leaves)

        try:
            jax.tree.map(take, prefix, marks)
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
        return tuple(leaves)

    def mesh(self, size: int) -> Mesh:
        """A mesh of the first `size` devices of each process."""
        total, axis_size = size * self.processes, self.options.axis_size
        if axis_size not in (None, total):
            raise ValueError(f"{self.name} got {total} slices; {axis_size=}")
        taken = collections.Counter()
        chosen = []
        for device in self.devices:
            owner = device.process_index if self.processes > 1 else 0
            if taken[owner] < size:
                taken[owner] += 1
                chosen.append(device)
        if (fewest := min(taken.values())) < size:
            raise ValueError(
                f"{self.name} got {size} slices, one for each of {fewest} "
                "devices"
            )
        return Mesh(chosen, (self.options.axis_name,))


@functools.lru_cache(maxsize=4096)
def _sharding(mesh: Mesh, axis: Any) -> NamedSharding:
    """One slice of a dimension on each device, or all of it."""
    if axis is _SHARED:
        return NamedSharding(mesh, PartitionSpec())
    spec = PartitionSpec(*[None] * axis, *mesh.axis_names)
    return NamedSharding(mesh, spec)


@functools.lru_cache(maxsize=4096)
def _shardings(mesh: Mesh, axes: tuple[Any, ...]) -> list[NamedSharding]:
    """One for each leaf of a tree, found once."""
    return [_sharding(mesh, axis) for axis in axes]


def _each(change: Any, leaves: Iterable[Any], axes: Any) -> list[Any]:
    """Changes the mapped dimension of each leaf."""
    return [
        leaf if axis is _SHARED else change(leaf, axis)
        for leaf, axis in zip(leaves, axes)
    ]


def _moved(x: Any, place: NamedSharding, axis: Any) -> Any:
    """`x`, or where jit would refuse it for where it lies, a copy."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return x
    fits = not x.committed or x.sharding.is_equivalent_to(place, x.ndim)
    return x if fits else jax.device_put(x, place)


def _whole(x: Any, place: NamedSharding, axis: Any) -> jax.Array:
    """The array of all processes of which `x` is the part of this one."""
    whole = _wholes.get(x)
    if whole is None or whole.sharding != place:
        here = _sharding(place.mesh.local_mesh, axis)
        if not isinstance(x, jax.Array) and getattr(x, "ndim", 0):
            return _from_numpy(x, place, here, axis)
        fits = isinstance(x, jax.Array) and (
            x.sharding.is_equivalent_to(here, x.ndim)
        )
        x = x if fits else jax.device_put(x, here)
        whole = _wholes[x] = _over(x, place, axis)
    return whole


def _from_numpy(
    x: Any, place: NamedSharding, here: NamedSharding, axis: Any
) -> jax.Array:
    """Each device takes its slice, without a whole copy."""
    x = x.astype(bool) if x.dtype == jax.dtypes.float0 else x
    shape = _shape(x.shape, place, axis)
    if axis is _SHARED:
        return jax.make_array_from_callback(shape, place, x.__getitem__)
    own: Any = here.addressable_devices_indices_map(x.shape)
    there: Any = place.addressable_devices_indices_map(shape)
    slices = {there[each][axis].start: own[each] for each in own}
    take: Any = lambda index: x[slices[index[axis].start]]
    return jax.make_array_from_callback(shape, place, take)


def _part(whole: jax.Array, here: NamedSharding, axis: Any) -> jax.Array:
    """The slices of this process, in an array of its own."""
    part = _over(whole, here, axis)
    _wholes[part] = whole  # for a state that is fed back
    return part


def _over(array: jax.Array, place: NamedSharding, axis: Any) -> jax.Array:
    """The same slices as an array over another mesh; nothing is copied."""
    shape = _shape(array.shape, place, axis)
    if axis is _SHARED:
        slices = [shard.data for shard in array.addressable_shards]
    else:  # the same, quicker
        count = len(array.sharding.addressable_devices)
        slices = [array.addressable_data(i) for i in range(count)]
    return jax.make_array_from_single_device_arrays(shape, place, slices)


def _shape(shape: Any, place: NamedSharding, axis: Any) -> Any:
    """With one slice for each device of a mesh."""
    if axis is _SHARED:
        return shape
    return *shape[:axis], place.mesh.size, *shape[axis + 1 :]


class _Memory:
    """Values by object, not by equality, for as long as the objects live."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}

    def get(self, owner: Any) -> Any:
        found = self.known.get(id(owner))
        return found[1] if found and found[0]() is owner else None

    def __setitem__(self, owner: Any, value: Any) -> None:
        key = id(owner)
        alive = weakref.ref(owner, lambda _: self.known.pop(key, None))
        self.known[key] = alive, value


_programs = _Memory()  # by function, or a method's object: {options: program}
_wholes = _Memory()  # by the array of one process: that of all processes


def _program(fun: Any, options: _Options) -> _Program:
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
            return _Program(lambda: fun, name, options)
    leaves, tree = jax.tree.flatten(options)
    how = (fun.__func__ if is_method else None, tree, *leaves)
    if how not in programs:
        weakly = weakref.WeakMethod if is_method else weakref.ref
        programs[how] = _Program(weakly(fun), name, options)
    return programs[how]
