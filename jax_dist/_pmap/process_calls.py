"""Calls of a mapped function whose devices belong to several processes.

A process-local array `[L, *s]` becomes a global array `[P * L, *s]` of the same buffers, and back.

Processes that run programs with other shapes, or in another order, get wrong numbers or hang. So
they compare a signature before its first call, unless its program has no collectives.
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
from jax_dist._calls import definition
from jax_dist._multihost import agreement
from jax_dist._multihost.agreement import Fingerprint, containers, describe
from jax_dist._passes.constants import is_key
from jax_dist._passes.interpreter import equations, named_axes, names_of, record_of
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.call import MappedCall, any_tracer, type_of
from jax_dist._pmap.meshes import MeshLayout
from jax_dist._pmap.options import PmapOptions
from jax_dist._pmap.placement import with_data
from jax_dist.errors import MappedAxisError

if TYPE_CHECKING:
    from jax_dist._pmap.dispatch import TracedPmap

_MAX_CONVERSIONS = 4096  # to remember; a program with more than that makes new avals all the time


class _Conversion(NamedTuple):
    """Conversion of the arrays of one aval and sharding."""

    aval: Any  # of the argument; kept alive, since conversions are cached by its id
    sharding: Sharding
    new_aval: ShapedArray
    new_sharding: NamedSharding


class _LocalView:
    """Conversion between process-local and global arrays, for one layout.

    A training loop has the same few avals again and again, as the very same objects. Looking up by
    their identity how to convert them makes a call with 100 leaves fast.
    """

    def __init__(self, layout: MeshLayout):
        self.layout = layout
        # By the id of an aval, and the mapped axis; "local" for the conversion to process-local.
        self._conversions: dict[tuple[int, Axis | str], _Conversion] = {}

    def to_global(self, leaf: Any, axis: Axis, bind: Callable[[], MappedCall]) -> Any:
        """Convert a leaf `[L, *s]` of a call to `[P * L, *s]` (for axis 0), without a copy.

        A global array stays as it is, and an array that is not yet on the devices is put there.

        Args:
          leaf: an array, a number, or random keys.
          axis: the mapped dimension; None: all processes have the same value.
          bind: returns the call; for the text of a MappedAxisError, if the leaf has not L slices.
        """
        key = (id(getattr(leaf, "aval", None)), axis)
        known = self._conversions.get(key)
        if known is not None and known.sharding is leaf.sharding:
            return _compat.rewrap(leaf, known.new_aval, known.new_sharding)
        if is_global(leaf):
            return leaf
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # a zero tangent; jax.pmap: False
            return self.to_global(np.zeros(leaf.shape, bool), axis, bind)
        if is_key(leaf):  # the data have more dimensions, at the end
            axis_from_left = None if axis is None else axis % leaf.ndim
            return with_data(leaf, lambda data: self.to_global(data, axis_from_left, bind))
        kind = self.describe(leaf, axis, bind)
        aval, sharding = ShapedArray(kind.shape, kind.dtype), self.layout.sharding(axis, kind.ndim)
        local = self.layout.process_local.sharding(axis, kind.ndim)
        if type(leaf) is np.ndarray and leaf.dtype == aval.dtype:  # faster than device_put
            indices = local.devices_indices_map(leaf.shape)
            slices = [leaf[index] for index in indices.values()]
            return _compat.put_slices(aval, sharding, slices, list(indices))
        is_placed = lambda array: array.sharding.is_equivalent_to(local, array.ndim)
        if isinstance(leaf, jax.Array) and leaf.committed and is_placed(leaf):
            return self._rewrap(leaf, key, aval, sharding)
        return _compat.rewrap(jax.device_put(leaf, local), aval, sharding)

    def to_local(self, array: Any) -> Any:
        """Convert `[P * L, *s]` to `[L, *s]` (for axis 0), without a copy.

        An array that is sharded over the devices of this process only stays as it is.
        """
        key = (id(array.aval), "local")
        known = self._conversions.get(key)
        if known is not None and known.sharding is array.sharding:
            return _compat.rewrap(array, known.new_aval, known.new_sharding)
        if is_key(array):
            return with_data(array, self.to_local)
        if array.is_fully_addressable:
            return array
        spec, shape = array.sharding.spec, array.shape
        for dim, entry in enumerate(spec):
            if self.layout.name in names_of(entry):
                shape = axes.resize(shape, dim, shape[dim] // self.layout.processes)
        local = NamedSharding(self.layout.process_local.mesh, spec)
        return self._rewrap(array, key, ShapedArray(shape, array.dtype), local)

    def describe(
        self, leaf: Any, axis: Axis, bind: Callable[[], MappedCall]
    ) -> jax.ShapeDtypeStruct:
        """Return the type of the global array that `to_global` makes of a leaf; raises as that."""
        kind = type_of(leaf)
        shape = kind.shape
        if axis is not None and not is_global(leaf):
            if shape[axis] != self.layout.local_size:
                raise self._misfit_error(bind())
            shape = axes.resize(shape, axis, self.layout.size)
        sharding = self.layout.sharding(axis, len(shape))
        # The dtype is not weak, even if that of the leaf is; jax.pmap's are not, either.
        return jax.ShapeDtypeStruct(shape, kind.dtype, sharding=sharding)

    def _misfit_error(self, call: MappedCall) -> MappedAxisError:
        """Return the error for a call with a leaf that has not as many slices as the process."""
        leaves = zip(call.paths(), call.leaves, call.axes, strict=True)
        sizes = [f"{path}: {jnp.shape(x)[axis]}" for path, x, axis in leaves if axis is not None]
        return MappedAxisError(
            f"pmap of '{call.fun_name}' got arguments of different sizes along the mapped axis; "
            f"pass the {self.layout.local_size} slices of this process, or global arrays of "
            f"{self.layout.size} ({', '.join(sizes)})."
        )

    def _rewrap(
        self, array: Any, key: Any, aval: ShapedArray, sharding: NamedSharding
    ) -> jax.Array:
        """Return the same buffers as an array of another type, and remember how by `key`."""
        if len(self._conversions) >= _MAX_CONVERSIONS:
            self._conversions.clear()
        self._conversions[key] = _Conversion(array.aval, array.sharding, aval, sharding)
        return _compat.rewrap(array, aval, sharding)


class ProcessCalls:
    """Calls of a mapped function on process-local arrays.

    With `arrays="local"`, arguments and results are process-local, as jax.pmap's are. With
    "global", results are global, and come back as arguments without a conversion.
    """

    def __init__(
        self,
        options: PmapOptions,
        fun: Callable[[], Callable],
        *,
        run: Callable[..., Any],
        layout_of: Callable[[MappedCall], MeshLayout],
    ):
        """Call `run`, on global arrays; `layout_of` traces a call to find its layout."""
        self._options, self._fun, self._run, self._layout_of = options, fun, run, layout_of
        self._is_global = options.arrays == "global"
        self._agreed: set[int] = set()  # hashes, so that no signature is kept alive
        self._views: dict[Any, _LocalView] = {}  # see `_view`
        self._axes: dict[Any, tuple[Axis, ...]] = {}  # of each leaf, by the structure of a call

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on process-local arrays."""
        static = self._options.static
        mapped = tuple(arg for number, arg in enumerate(args) if number not in static)
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        if any_tracer(leaves):
            return self._run(*args, **kwargs)
        # Slow: for the first call of a structure, and for errors.
        bind = lambda: MappedCall.bind(self._options, self._fun(), args, kwargs)
        leaf_axes = self._axes.get(structure)
        if leaf_axes is None:
            leaf_axes = self._axes[structure] = bind().axes
        view = self._view(structure, leaves, leaf_axes, bind)
        pairs = zip(leaves, leaf_axes, strict=True)
        arrays = [view.to_global(leaf, axis, bind) for leaf, axis in pairs]
        if any_tracer(arrays):  # in an outer trace, device_put of a constant makes a tracer
            return self._run(*args, **kwargs)
        global_args, keywords = jax.tree.unflatten(structure, arrays)
        remaining = iter(global_args)
        all_args = [arg if n in static else next(remaining) for n, arg in enumerate(args)]
        output = self._run(*all_args, **keywords)
        return output if self._is_global else jax.tree.map(view.to_local, output)

    def abstract(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `lower` with the types of global arrays in place of arrays."""
        call = MappedCall.bind(self._options, self._fun(), args, kwargs)
        view = self._view(call.structure, call.leaves, call.axes, lambda: call)
        return self._rebuild_with_types(call, view)

    def agree(self, call: MappedCall, traced: "TracedPmap") -> None:
        """Compare a program that has collectives with the other processes, before its first run."""
        types = [type_of(leaf) for leaf in call.leaves]
        hashable_types = tuple((kind.shape, kind.dtype, kind.weak_type) for kind in types)
        key = hash((call.structure, hashable_types, call.static))
        if not traced.collectives or key in self._agreed:
            return
        descriptions = {}  # of arguments as the user passes them, by path
        for path, kind, axis in zip(call.paths(), types, call.axes, strict=True):
            shape = list(kind.shape)
            if axis is not None and not self._is_global:
                shape[axis] //= traced.context.layout.processes
            descriptions[path] = describe(type_of(kind, shape))
        for number, value in zip(self._options.static, call.static, strict=True):
            descriptions[f"static argument {number}"] = describe(value)
        fingerprint = Fingerprint(containers(call.structure), descriptions)
        agree_to_run(
            "pmap of {}", self._fun(), fingerprint, traced.collectives, traced.context.layout.mesh
        )
        self._agreed.add(key)

    def _rebuild_with_types(self, call: MappedCall, view: _LocalView) -> tuple[tuple, dict]:
        """Return the arguments of a call, with the types of global arrays as leaves."""
        pairs = zip(call.leaves, call.axes, strict=True)
        return call.rebuild([view.describe(leaf, axis, lambda: call) for leaf, axis in pairs])

    def _view(
        self,
        structure: Any,
        leaves: list[Any],
        leaf_axes: tuple[Axis, ...],
        bind: Callable[[], MappedCall],
    ) -> _LocalView:
        """Return the view for a call, cached by structure and by the size of the mapped axis.

        The first mapped leaf gives the size; `to_global` compares the others.
        """
        pairs = zip(leaves, leaf_axes, strict=True)
        mapped = ((leaf, axis) for leaf, axis in pairs if axis is not None)
        leaf, axis = next(mapped, (0.0, 0))
        shape = jnp.shape(leaf)
        # `bind().size` raises: no leaf is mapped, or the first one has no such dimension.
        size = shape[axis] if -len(shape) <= axis < len(shape) else bind().size
        key = (structure, size, is_global(leaf))
        if key not in self._views:
            # The mesh axes that pmaps inside ask for are found by a trace on global arrays.
            first_view = _LocalView(self._options.lay_out(size, whole=is_global(leaf)))
            args, kwargs = self._rebuild_with_types(bind(), first_view)
            call = MappedCall.bind(self._options, self._fun(), args, kwargs)
            self._views[key] = _LocalView(self._layout_of(call))
        return self._views[key]


def is_global(leaf: Any) -> bool:
    """Return whether a leaf is a global array, which has slices of other processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def agree_to_run(
    name: str, fun: Any, fingerprint: Fingerprint, moves: Sequence[str], mesh: jax.sharding.Mesh
) -> None:
    """Compare a program among the processes of a mesh before its first run.

    `name` is "pmap of {}", {} for the function; `moves` are its collectives. Raises
    DisagreementError if processes are about to run different programs, or if one does not come.
    """
    if _compat.find_joined_process() is None:  # there is no server to compare by
        return
    numbered = {f"collective {number}": text for number, text in enumerate(moves, 1)}
    fingerprint = fingerprint._replace(leaves={**fingerprint.leaves, **numbered})
    ranks = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    line = os.path.basename(definition(fun))  # the directory may differ between processes
    name = name.format(f"'{axes.function_name(fun)}'" + (f" ({line})" if line else ""))
    agreement.agree_on(name, fingerprint, timeout=agreement.program_timeout, ranks=ranks)


def collectives(jaxpr: Any) -> list[str]:
    """Return the collectives of a jaxpr in order, as texts "psum over i: float32[3]".

    Sharding constraints are listed as well, since they may become collectives.
    """
    texts = []
    for eqn in equations(jaxpr):
        name, record = _compat.name_of(eqn), record_of(eqn)
        axis_names = named_axes(eqn)
        # Some primitives have an axis name and send nothing, as axis_index.
        is_local = record.identity or record.collective == "index"
        if name == "sharding_constraint" or (axis_names and not is_local):
            types = ", ".join(describe(var.aval) for var in eqn.invars)
            over = f" over {', '.join(map(str, axis_names))}" if axis_names else ""
            texts.append(f"{name}{over}: {types}")
    return texts
