"""Calls of a mapped function whose devices belong to several processes.

A concrete process-local array `[L, *s]` becomes a global array `[P * L, *s]`, and back. The buffers
stay what they are; only the shape and the sharding that they are seen under change.

Processes that run programs with other shapes, or the same ones in another order, get wrong numbers
or hang. So before a signature is called for the first time, they compare it. A program without
collectives runs in one process alone as well, and is not compared.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import NamedSharding, Sharding

from jax_dist import _compat
from jax_dist._multihost import agreement
from jax_dist._multihost.agreement import Fingerprint, containers, describe
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call, any_tracer, type_of
from jax_dist._pmap.meshes import Layout
from jax_dist._pmap.options import Options
from jax_dist._pmap.placement import is_key, with_data
from jax_dist._rewrite.interpreter import equations, named_axes, names_of
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.variable_names import definition
from jax_dist.errors import MappedAxisError

if TYPE_CHECKING:
    from jax_dist._pmap.dispatch import Signature

_MANY = 4096  # avals to remember: more means that they are not the same ones again


class _Conversion(NamedTuple):
    """The other view of an aval; the aval is kept alive, so that its id stays its own."""

    aval: Any
    sharding: Sharding
    other_aval: Any
    other_sharding: NamedSharding


class _MisfitError(Exception):
    """A process-local array does not have the slices of this process."""


class _LocalView:
    """The process-local view of global arrays, for one layout.

    A training loop sees the same few avals again and again, as the very same objects; they are
    looked up by identity, which is what makes a call with 100 leaves fast.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._to_global: dict[tuple[int, Axis], _Conversion] = {}
        self._to_local: dict[int, _Conversion] = {}

    def to_global(self, leaf: Any, axis: Axis) -> Any:
        """Convert `[L, *s]` to `[P * L, *s]` (for axis 0); what is global already stays.

        `axis` is the mapped dimension; None: the same on all processes.

        Raises:
          _MisfitError: it does not have the slices of this process.
        """
        known = self._to_global.get((id(getattr(leaf, "aval", None)), axis))
        if known is not None and known.sharding is leaf.sharding:
            return _compat.rewrap(leaf, known.other_aval, known.other_sharding)
        return self._convert_to_global(leaf, axis)

    def to_local(self, array: Any) -> Any:
        """Convert `[P * L, *s]` to `[L, *s]` (for axis 0), if it is sharded over processes."""
        known = self._to_local.get(id(array.aval))
        if known is not None and known.sharding is array.sharding:
            return _compat.rewrap(array, known.other_aval, known.other_sharding)
        return self._convert_to_local(array)

    def describe(self, leaf: Any, axis: Axis) -> jax.ShapeDtypeStruct:
        """Return the type of the global array. Raises _MisfitError as `to_global` does."""
        kind = type_of(leaf)
        shape = kind.shape
        if axis is not None and not is_global(leaf):
            if shape[axis] != self.layout.local_size:
                raise _MisfitError
            shape = axes.resized(shape, axis, self.layout.size)
        # Not weak, as with jax.pmap.
        sharding = self.layout.sharding(axis, len(shape))
        return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=sharding)

    def _convert_to_global(self, leaf: Any, axis: Axis) -> Any:
        if is_global(leaf):
            return leaf
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # a zero tangent; jax.pmap: False
            return self._convert_to_global(np.zeros(leaf.shape, bool), axis)
        if is_key(leaf):
            from_left = None if axis is None else axis % leaf.ndim
            return with_data(leaf, lambda data: self._convert_to_global(data, from_left))
        kind = self.describe(leaf, axis)
        aval, target = ShapedArray(kind.shape, kind.dtype), self.layout.sharding(axis, kind.ndim)
        local = self.layout.process_local.sharding(axis, kind.ndim)
        if type(leaf) is np.ndarray and leaf.dtype == aval.dtype:
            indices = local.devices_indices_map(leaf.shape)
            slices = [leaf[index] for index in indices.values()]
            return _compat.put_slices(aval, target, slices, list(indices))
        is_placed = lambda array: array.sharding.is_equivalent_to(local, array.ndim)
        if isinstance(leaf, jax.Array) and leaf.committed and is_placed(leaf):
            conversion = _Conversion(leaf.aval, leaf.sharding, aval, target)
            _remember(self._to_global, (id(leaf.aval), axis), conversion)
            return _compat.rewrap(leaf, aval, target)
        return _compat.rewrap(jax.device_put(leaf, local), aval, target)

    def _convert_to_local(self, array: Any) -> Any:
        if is_key(array):
            return with_data(array, self._convert_to_local)
        if array.is_fully_addressable:
            return array
        spec, shape = array.sharding.spec, array.shape
        local = NamedSharding(self.layout.process_local.mesh, spec)
        for axis, entry in enumerate(spec):
            if self.layout.name in names_of(entry):
                shape = axes.resized(shape, axis, shape[axis] // self.layout.processes)
        aval = ShapedArray(shape, array.dtype)
        conversion = _Conversion(array.aval, array.sharding, aval, local)
        _remember(self._to_local, id(array.aval), conversion)
        return _compat.rewrap(array, aval, local)


def _remember(known: dict, key: Any, value: _Conversion) -> None:
    if len(known) >= _MANY:
        known.clear()
    known[key] = value


class ProcessCalls:
    """Calls on process-local arrays.

    With `arrays="local"`, arguments and results hold the slices of this process, as jax.pmap's do.
    With `arrays="global"`, results stay global, and come back as arguments without a conversion;
    what this process made itself (a NumPy batch) still holds its own slices.
    """

    def __init__(
        self,
        options: Options,
        fun: Callable[[], Callable],
        *,
        run: Callable[..., Any],
        layout_of: Callable[[Call], Layout],
    ):
        """`run` takes and returns global arrays."""
        self._options, self._fun, self._run, self._layout_of = options, fun, run, layout_of
        self._is_global = options.arrays == "global"
        self._agreed: set[int] = set()  # hashes of signatures: no object is kept alive
        self._views: dict[Any, _LocalView] = {}
        self._axes: dict[Any, tuple[Axis, ...]] = {}

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on process-local arrays."""
        static = self._options.static
        mapped = [arg for number, arg in enumerate(args) if number not in static]
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        if any_tracer(leaves):
            return self._run(*args, **kwargs)
        bind = lambda: Call.bind(self._options, self._fun(), args, kwargs)
        kind = (structure, len(args))
        leaf_axes = self._axes.get(kind)
        if leaf_axes is None:
            leaf_axes = self._axes[kind] = bind().axes
        view = self._view(kind, leaves, leaf_axes, bind)
        try:
            arrays = [view.to_global(*pair) for pair in zip(leaves, leaf_axes, strict=True)]
        except _MisfitError:
            raise _misfit(bind(), view) from None
        if any_tracer(arrays):  # constants, in an outer trace
            return self._run(*args, **kwargs)
        values, keywords = jax.tree.unflatten(structure, arrays)
        values = iter(values)
        again = [arg if n in static else next(values) for n, arg in enumerate(args)]
        output = self._run(*again, **keywords)
        if self._is_global:
            return output
        flat, structure = jax.tree.flatten(output)
        return jax.tree.unflatten(structure, [view.to_local(leaf) for leaf in flat])

    def abstract(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as types of global arrays, for lower."""
        call = Call.bind(self._options, self._fun(), args, kwargs)
        kind = (jax.tree.structure((args, kwargs)), len(args))
        view = self._view(kind, call.leaves, call.axes, lambda: call)
        return call.rebuild(self._describe(call, view))

    def agree(self, call: Call, signature: "Signature", layout: Layout) -> None:
        """Compare a program that has collectives with the other processes, before its first run."""
        types = [type_of(leaf) for leaf in call.leaves]
        kinds = tuple((kind.shape, kind.dtype, kind.weak_type) for kind in types)
        key = hash((call.structure, kinds, call.static))
        if not signature.collectives or key in self._agreed:
            return
        leaves = {}  # as the user passes them
        for path, kind, axis in zip(call.paths(), types, call.axes, strict=True):
            shape = list(kind.shape)
            if axis is not None and not self._is_global:
                shape[axis] //= layout.processes
            leaves[path] = describe(type_of(kind, shape))
        for number, value in zip(self._options.static, call.static, strict=True):
            leaves[f"static argument {number}"] = describe(value)
        fingerprint = Fingerprint(containers(call.structure), leaves)
        agree_to_run("pmap of {}", self._fun(), fingerprint, signature.collectives, layout.mesh)
        self._agreed.add(key)

    def _describe(self, call: Call, view: _LocalView) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the leaves as global arrays."""
        try:
            return [view.describe(*pair) for pair in zip(call.leaves, call.axes, strict=True)]
        except _MisfitError:
            raise _misfit(call, view) from None

    def _view(
        self,
        kind: Any,
        leaves: list[Any],
        leaf_axes: tuple[Axis, ...],
        bind: Callable[[], Call],
    ) -> _LocalView:
        """Return the view for the size of the mapped axis, that of the first array that has it."""
        for leaf, axis in zip(leaves, leaf_axes, strict=True):
            if axis is not None:
                shape = jnp.shape(leaf)
                size = shape[axis] if -len(shape) <= axis < len(shape) else bind().size
                key = (kind, size, is_global(leaf))
                if key not in self._views:
                    self._views[key] = self._new_view(bind(), size, whole=key[2])
                return self._views[key]
        raise AssertionError(bind().size)  # raises: nothing is mapped

    def _new_view(self, call: Call, size: int, *, whole: bool) -> _LocalView:
        """Return a view with the mesh that the body wants, traced on the types of global arrays."""
        first = _LocalView(self._options.lay_out(size, whole=whole))
        args, kwargs = call.rebuild(self._describe(call, first))
        layout = self._layout_of(Call.bind(self._options, self._fun(), args, kwargs))
        return _LocalView(layout)


def is_global(leaf: Any) -> bool:
    """Return whether a leaf is an array of all processes, not of this one alone."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _misfit(call: Call, view: _LocalView) -> MappedAxisError:
    layout, triples = view.layout, zip(call.paths(), call.leaves, call.axes, strict=True)
    mapped = [(path, jnp.shape(leaf)[axis]) for path, leaf, axis in triples if axis is not None]
    return MappedAxisError(
        f"pmap of '{call.fun_name}' got arguments of different sizes along the mapped axis; pass "
        f"the {layout.local_size} slices of this process, or global arrays of {layout.size} "
        f"({', '.join(f'{path}: {size}' for path, size in mapped)})."
    )


def agree_to_run(
    name: str, fun: Any, fingerprint: Fingerprint, moves: Sequence[str], mesh: jax.sharding.Mesh
) -> None:
    """Compare a program among the processes whose devices are in a mesh, before its first run.

    `name` has {} for the function; `moves` are its collectives, which are compared too.

    Raises:
      DisagreementError: they are about to run different ones, or some of them did not come.
    """
    if _compat.find_joined_process() is None:  # nothing to compare over
        return
    numbered = {f"collective {number}": text for number, text in enumerate(moves, 1)}
    fingerprint = fingerprint._replace(leaves={**fingerprint.leaves, **numbered})
    ranks = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    line = os.path.basename(definition(fun))  # the folder may be another in each process
    name = name.format(f"'{axes.function_name(fun)}'" + f" ({line})" * bool(line))
    agreement.agree_on(name, fingerprint, timeout=agreement.program_timeout, ranks=ranks)


def collectives(jaxpr: Any) -> list[str]:
    """List the collectives of a program in order: `psum over i: float32[3]`.

    A sharding constraint may become a collective.
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
