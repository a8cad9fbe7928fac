"""Calls of a mapped function whose devices belong to several processes.

A concrete array `[L, *s]` of one process becomes `[P * L, *s]` of all, and back. The buffers stay
what they are; only the shape and the sharding that they are seen under change.

Processes that run programs with other shapes, or the same ones in another order, get wrong numbers
or hang. So before a signature is called for the first time, they compare it. A program without
collectives runs in one process alone as well, and is not compared.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, Sharding

from jax_dist import _compat
from jax_dist._multihost import agreement
from jax_dist._multihost.agreement import Fingerprint, containers, describe
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Body, Call, Options, any_tracer, type_of
from jax_dist._pmap.meshes import Layout
from jax_dist._pmap.placement import is_key, with_data
from jax_dist._rewrite.interpreter import equations, named_axes, names_of
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.programs import Program
from jax_dist.errors import PlacementError, refusal

_MANY = 4096  # avals to remember: more means that they are not the same ones again


class _Known(NamedTuple):
    """An aval seen before, kept alive so that its id stays its own."""

    aval: Any
    sharding: Sharding
    other_aval: Any
    other_sharding: NamedSharding


class _Way(NamedTuple):
    """How a NumPy array of this process becomes part of a whole one."""

    aval: Any  # of the whole
    sharding: NamedSharding  # the same object each time: jit finds its program faster
    indices: list[Any]  # of the slice for each device
    devices: list[Any]  # of this process


class _Misfit(Exception):
    """An array has neither the slices of this process nor those of all."""


class _LocalView:
    """Goes between the arrays of this process and those of all, for one layout.

    A training loop sees the same few avals again and again, as the very same objects; they are
    looked up by identity, which is what makes a call with 100 leaves fast. NumPy arrays are looked
    up by shape and dtype.
    """

    def __init__(self, layout: Layout, *, accepts_whole: bool):
        """`accepts_whole`: whether this process may also hold an array of all slices."""
        self.layout = layout
        self._accepts_whole = accepts_whole
        self._entering: dict[tuple[int, Axis], _Known] = {}
        self._leaving: dict[int, _Known] = {}
        self._from_numpy: dict[tuple, _Way] = {}  # by shape, dtype and axis

    def enter(self, leaf: Any, axis: Axis) -> Any:
        """`[L, *s] -> [P * L, *s]` (for axis 0). What is global already comes back as it is.

        `axis` is the mapped dimension; None: the same on all processes.

        Raises:
          _Misfit: it has neither the slices of this process nor those of all.
        """
        if type(leaf) is np.ndarray:
            way = self._from_numpy.get((leaf.shape, leaf.dtype, axis))
            if way is None:
                return self._enter(leaf, axis)
            slices = [leaf[index] for index in way.indices]
            return _compat.put_slices(way.aval, way.sharding, slices, way.devices)
        known = self._entering.get((id(getattr(leaf, "aval", None)), axis))
        if known is not None and known.sharding is leaf.sharding:
            return _compat.rewrap(leaf, known.other_aval, known.other_sharding)
        return self._enter(leaf, axis)

    def leave(self, whole: Any) -> Any:
        """`[P * L, *s] -> [L, *s]` (for axis 0); what is not cut over processes keeps its shape."""
        known = self._leaving.get(id(whole.aval))
        if known is not None and known.sharding is whole.sharding:
            return _compat.rewrap(whole, known.other_aval, known.other_sharding)
        return self._leave(whole)

    def whole_shape(self, shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
        """Of the whole array. Raises _Misfit as `enter` does."""
        if axis is None or self._holds_all(shape, axis):
            return shape
        return axes.resized(shape, axis, self.layout.size)

    def _holds_all(self, shape: tuple[int, ...], axis: int) -> bool:
        """Whether this process has the slices of all, and not its own only."""
        if shape[axis] == self.layout.local_size:
            return False
        if not self._accepts_whole or shape[axis] != self.layout.size:
            raise _Misfit
        return True

    def _enter(self, leaf: Any, axis: Axis) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # a zero tangent; jax.pmap: False
            leaf = np.zeros(leaf.shape, bool)
        if is_key(leaf):
            from_left = None if axis is None else axis % leaf.ndim
            return with_data(leaf, lambda data: self._enter(data, from_left))
        whole = self.layout.sharding(axis, jnp.ndim(leaf))
        if axis is not None and self._holds_all(jnp.shape(leaf), axis):
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, whole, lambda index: host[index])
        own = NamedSharding(self.layout.local_mesh, whole.spec)
        placed = leaf
        if not (
            isinstance(leaf, jax.Array)
            and leaf.committed
            and leaf.sharding.is_equivalent_to(own, leaf.ndim)
        ):
            placed = jax.device_put(leaf, own)
        shape = axes.resized(placed.shape, axis, self.layout.size)
        aval = _aval(shape, placed)
        if placed is leaf:
            _remember(
                self._entering, (id(leaf.aval), axis), _Known(leaf.aval, leaf.sharding, aval, whole)
            )
        elif type(leaf) is np.ndarray and leaf.dtype == aval.dtype:
            indices = own.devices_indices_map(leaf.shape)
            devices = list(self.layout.local_mesh.devices.flat)
            way = _Way(aval, whole, [indices[device] for device in devices], devices)
            _remember(self._from_numpy, (leaf.shape, leaf.dtype, axis), way)
        return _compat.rewrap(placed, aval, whole)

    def _leave(self, whole: Any) -> Any:
        if is_key(whole):
            return with_data(whole, self._leave)
        if whole.is_fully_addressable:
            return whole
        spec, shape = whole.sharding.spec, whole.shape
        own = NamedSharding(self.layout.local_mesh, spec)
        for axis, entry in enumerate(spec):
            if self.layout.name in names_of(entry):
                shape = axes.resized(shape, axis, shape[axis] // self.layout.processes)
                break
        aval = _aval(shape, whole)
        _remember(self._leaving, id(whole.aval), _Known(whole.aval, whole.sharding, aval, own))
        return _compat.rewrap(whole, aval, own)


def _aval(shape: tuple[int, ...], array: jax.Array) -> Any:
    return ShapedArray(shape, array.dtype, weak_type=_is_weak(array))


def _is_weak(leaf: Any) -> bool:
    """Whether an argument of several processes has a weak type, as far as jax.pmap keeps it."""
    return _compat.PROCESSES_KEEP_WEAK_TYPES and jax.typeof(leaf).weak_type


def _remember(known: dict, key: Any, value: _Known | _Way) -> None:
    if len(known) >= _MANY:
        known.clear()
    known[key] = value


class ProcessCalls:
    """Gives each process its own view of the whole arrays, or keeps them whole.

    With `arrays="local"`, arguments and results hold the slices of this process, as jax.pmap's do.
    With `arrays="global"`, results stay whole, and come back as arguments without a conversion;
    what this process made itself (a NumPy batch) still holds its own slices.

    Attributes:
      view: the program on what this process sees, for tracers.
    """

    def __init__(
        self,
        options: Options,
        fun: Callable[[], Callable],
        *,
        run: Callable[..., Any],
        view: Program,
        layout_of: Callable[[Call], Layout],
    ):
        """`run` takes and returns whole arrays; `view` is the program on what this process sees."""
        self._options = options
        self._fun = fun
        self._run = run
        self._layout_of = layout_of
        self._is_global = options.arrays == "global"
        self.view = view
        self._agreed: set[int] = set()  # hashes of signatures: no object is kept alive
        self._views: dict[Any, _LocalView] = {}
        self._axes: dict[Any, tuple[Axis, ...]] = {}

    def must_convert(self, leaves: Sequence[Any]) -> bool:
        """Whether this process holds some of the arrays alone."""
        return not all(_is_whole(leaf) for leaf in leaves)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """A call on arrays of this process."""
        static = self._options.static
        mapped = [arg for number, arg in enumerate(args) if number not in static]
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        if any_tracer(leaves):
            return self._run(*args, **kwargs)

        def bound() -> Call:
            return Call.bind(self._options, self._fun(), args, kwargs)

        kind = (structure, len(args))
        leaf_axes = self._axes.get(kind)
        if leaf_axes is None:
            leaf_axes = self._axes[kind] = bound().axes
        view = self._view(kind, leaves, leaf_axes, bound)
        try:
            whole = [view.enter(*pair) for pair in zip(leaves, leaf_axes, strict=True)]
        except _Misfit:
            raise _what_does_not_fit(bound(), view) from None
        if any_tracer(whole):  # constants, in a trace outside
            return self._run(*args, **kwargs)
        values, keywords = jax.tree.unflatten(structure, whole)
        values = iter(values)
        again = [arg if n in static else next(values) for n, arg in enumerate(args)]
        output = self._run(*again, **keywords)
        for number in self._options.donated:
            if number < len(args):  # the originals of copies that were used go, as with jax.pmap
                pairs = zip(*map(jax.tree.leaves, (args[number], again[number])), strict=True)
                for original, copy in pairs:
                    if isinstance(original, jax.Array) and copy.is_deleted():
                        original.delete()
        if self._is_global:
            return output
        flat, structure = jax.tree.flatten(output)
        return jax.tree.unflatten(structure, [view.leave(leaf) for leaf in flat])

    def abstract(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as shapes of whole arrays, for lower."""
        call = Call.bind(self._options, self._fun(), args, kwargs)
        if any_tracer(call.leaves):
            return args, kwargs
        kind = (jax.tree.structure((args, kwargs)), len(args))
        view = self._view(kind, call.leaves, call.axes, lambda: call)
        return call.rebuild(self._described(call, view))

    def agree(self, call: Call, body: Body, layout: Layout) -> None:
        """With the other processes, before a program that moves something runs first.

        Raises:
          DisagreementError: they are about to run another one.
        """
        moves = collectives(body.lifted.jaxpr)
        types = [type_of(leaf) for leaf in call.leaves]
        kinds = tuple((kind.shape, kind.dtype, kind.weak_type) for kind in types)
        signature = hash((call.structure, kinds, call.static))
        if not moves or signature in self._agreed:
            return
        leaves = {}  # the arguments as the user passes them, and the whole result
        for path, kind, axis in zip(call.paths(), types, call.axes, strict=True):
            shape = list(kind.shape)
            if axis is not None and not self._is_global:
                shape[axis] //= layout.processes
            leaves[path] = describe(type_of(kind, shape))
        for number, value in zip(self._options.static, call.static, strict=True):
            leaves[f"static argument {number}"] = describe(value)
        flat, structure = jax.tree.flatten_with_path(body.result(layout.size))
        for path, leaf in flat:
            leaves[f"result{jax.tree_util.keystr(path)} of all processes"] = describe(leaf)
        own = Fingerprint(containers(structure), leaves)
        agree_to_run("pmap of {}", self._fun(), own, moves, layout.mesh)
        self._agreed.add(signature)

    def _described(self, call: Call, view: _LocalView) -> list[jax.ShapeDtypeStruct]:
        """The leaves as parts of whole arrays. Raises what does not fit."""

        def described(leaf: Any, axis: Axis) -> jax.ShapeDtypeStruct:
            shape = jnp.shape(leaf) if _is_whole(leaf) else view.whole_shape(jnp.shape(leaf), axis)
            # canonicalize_dtype refuses that of keys, which has no other form.
            canonical = jax.dtypes.canonicalize_dtype
            dtype = leaf.dtype if is_key(leaf) else canonical(jnp.result_type(leaf))
            sharding = view.layout.sharding(axis, len(shape))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=_is_weak(leaf))

        try:
            return [described(*pair) for pair in zip(call.leaves, call.axes, strict=True)]
        except _Misfit:
            raise _what_does_not_fit(call, view) from None

    def _view(
        self,
        kind: Any,
        leaves: list[Any],
        leaf_axes: tuple[Axis, ...],
        bound: Callable[[], Call],
    ) -> _LocalView:
        """The view for the size of the mapped axis, read from the first array that has it."""
        for leaf, axis in zip(leaves, leaf_axes, strict=True):
            if axis is not None:
                shape = jnp.shape(leaf)
                size = shape[axis] if -len(shape) <= axis < len(shape) else bound().size
                key = (kind, size, _is_whole(leaf))
                view = self._views.get(key)
                if view is None:
                    view = self._views[key] = self._new_view(bound(), size, whole=key[2])
                return view
        raise AssertionError(bound().size)  # raises: nothing is mapped

    def _new_view(self, call: Call, size: int, *, whole: bool) -> _LocalView:
        """With the mesh that the body wants: it is traced here, on the types of whole arrays."""
        choice = self._options.choice
        if self._is_global and not whole and not choice.virtual:
            here = jax.process_index()
            own = sum(device.process_index == here for device in choice.candidates())
            whole = size > own  # more than this process can run: the slices of all of them
        first = _LocalView(choice.lay_out(size, whole=whole), accepts_whole=self._is_global)
        args, kwargs = call.rebuild(self._described(call, first))
        layout = self._layout_of(Call.bind(self._options, self._fun(), args, kwargs))
        return _LocalView(layout, accepts_whole=self._is_global)


def _is_whole(leaf: Any) -> bool:
    """Whether it is an array of all processes, not of this one alone."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _what_does_not_fit(call: Call, view: _LocalView) -> ValueError:
    layout = view.layout
    sizes = {
        path: jnp.shape(leaf)[axis]
        for path, leaf, axis in zip(call.paths(), call.leaves, call.axes, strict=True)
        if axis is not None and not _is_whole(leaf)
    }
    for path, size in sizes.items():
        if size not in (layout.local_size, layout.size):
            return axes.mapped_sizes_differ(call.fun_name, sizes)
        if size != layout.local_size:
            return refusal(
                PlacementError,
                what=f"pmap of '{call.fun_name}' cannot tell which slices this array holds",
                which=[
                    f"{path} has size {size} along the mapped axis",
                    f"this process runs {layout.local_size} slices, all processes together "
                    f"{layout.size}",
                ],
                why="an array of this process holds its own slices, a global one holds all",
                do=f"Pass the {layout.local_size} slices of this process, or a global array of "
                f"{layout.size}.",
            )
    raise AssertionError("every array fits")


def agree_to_run(
    name: str, fun: Any, fingerprint: Fingerprint, moves: Sequence[str], mesh: jax.sharding.Mesh
) -> None:
    """Before the processes whose devices are in a mesh run a program for the first time.

    `name` is that of the program, with {} for the function; `fingerprint` of arguments and results;
    `moves` are its collectives, which are compared too.

    Raises:
      DisagreementError: they are about to run different ones.
      TimeoutError: some of them did not come.
    """
    if _compat.joined_as() is None:  # nothing to compare over
        return
    numbered = {f"collective {number}": text for number, text in enumerate(moves, 1)}
    own = fingerprint._replace(leaves={**fingerprint.leaves, **numbered})
    ranks = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    agreement.agree_on(
        name.format(_described(fun)), own, timeout=agreement.program_timeout, ranks=ranks
    )


def _described(fun: Any) -> str:
    """A function by its name and line: `'step' (train.py:12)`."""
    name = getattr(fun, "__name__", type(fun).__name__)
    with contextlib.suppress(ValueError):  # a wrapper around itself
        fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None)
    if code is None:
        return f"'{name}'"
    return f"'{name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def collectives(jaxpr: ClosedJaxpr) -> list[str]:
    """What devices send one another, in order: `psum over i: float32[3]`.

    A constraint on how a value lies may become a collective.
    """
    moves = []
    for eqn in equations(jaxpr):
        name, record = _compat.name_of(eqn), record_of(eqn)
        # These name a mesh axis, and move nothing.
        is_local = record.identity or record.over == "index"
        over = named_axes(eqn)
        if name == "sharding_constraint" or (over and not is_local):
            types = ", ".join(describe(var.aval) for var in eqn.invars)
            where = f" over {', '.join(map(str, over))}" if over else ""
            moves.append(f"{name}{where}: {types}")
    return moves
