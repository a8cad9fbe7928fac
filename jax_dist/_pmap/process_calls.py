"""Calls of a mapped function whose devices belong to several processes.

A process-local array `[L, *s]` becomes a global array `[P * L, *s]` of the same buffers, and back.

Processes that run programs with other shapes, or in another order, get wrong numbers or hang. So
they compare a signature before its first call, unless its program has no collectives.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr
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

# Returns the call. It is slow, so it is for the first call of a structure, and for errors.
_BindCall: TypeAlias = Callable[[], MappedCall]
_MAX_CONVERSIONS = 4096  # to remember; a program with more than that makes new avals all the time


class _Conversion(NamedTuple):
    """Conversion of the arrays of one aval and sharding."""

    aval: Any  # of the argument; kept alive, since conversions are cached by its id
    sharding: Sharding
    new_aval: ShapedArray
    new_sharding: NamedSharding


class _Converter:
    """Conversion between process-local arrays `[L, *s]` and global ones `[P * L, *s]`.

    P processes have L devices each, one for each slice along the mapped axis, which is 0 here. A
    training loop has the same few avals again and again, as the very same objects. Looking up by
    their identity how to convert them makes a call with 100 leaves fast.
    """

    def __init__(self, layout: MeshLayout):
        self.layout = layout
        # By the id of an aval, and the mapped axis; "local" for the conversion to process-local.
        self._conversions: dict[tuple[int, Axis | str], _Conversion] = {}

    def to_global(self, leaf: Any, axis: Axis, bind_call: _BindCall) -> Any:
        """Return a leaf `[L, *s]` of a call as a global array `[P * L, *s]`, not copied if placed.

        A leaf is an array, a number, or random keys. A global array stays as it is. With axis None,
        all processes have the same value, whose shape stays. If a leaf has not L slices,
        MappedAxisError names it by its path in `bind_call()`.
        """
        key = (id(getattr(leaf, "aval", None)), axis)
        known = self._conversions.get(key)
        if known is not None and known.sharding is leaf.sharding:
            return _compat.rewrap(leaf, known.new_aval, known.new_sharding)
        if is_global(leaf):
            return leaf
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:  # a zero tangent; jax.pmap: False
            return self.to_global(np.zeros(leaf.shape, bool), axis, bind_call)
        if is_key(leaf):  # the data have more dimensions, at the end
            axis_from_left = None if axis is None else axis % leaf.ndim
            return with_data(leaf, lambda data: self.to_global(data, axis_from_left, bind_call))
        return self._put(leaf, axis, self.global_type(leaf, axis, bind_call), key)

    def _put(self, leaf: Any, axis: Axis, global_type: jax.ShapeDtypeStruct, key: Any) -> jax.Array:
        """Put a leaf on the devices of this process; return it as part of a global array."""
        aval = ShapedArray(global_type.shape, global_type.dtype)
        sharding = self.layout.sharding(axis, aval.ndim)
        local_sharding = self.layout.process_local.sharding(axis, aval.ndim)
        if type(leaf) is np.ndarray and leaf.dtype == aval.dtype:  # faster than device_put
            indices = local_sharding.devices_indices_map(leaf.shape)
            slices = [leaf[index] for index in indices.values()]
            return _compat.put_slices(aval, sharding, slices, list(indices))
        is_placed = lambda array: array.sharding.is_equivalent_to(local_sharding, array.ndim)
        if isinstance(leaf, jax.Array) and leaf.committed and is_placed(leaf):
            return self._rewrap(leaf, key, aval, sharding)  # the next such leaf needs none of this
        return _compat.rewrap(jax.device_put(leaf, local_sharding), aval, sharding)

    def to_local(self, array: Any) -> Any:
        """Return the slices of this process of a result: `[P * L, *s]` as `[L, *s]`, not copied.

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
        for dim, mesh_axes in enumerate(spec):
            if self.layout.name in names_of(mesh_axes):  # the dimension `P * L`
                shape = axes.resize(shape, dim, shape[dim] // self.layout.processes)
        local_sharding = NamedSharding(self.layout.process_local.mesh, spec)
        return self._rewrap(array, key, ShapedArray(shape, array.dtype), local_sharding)

    def global_type(self, leaf: Any, axis: Axis, bind_call: _BindCall) -> jax.ShapeDtypeStruct:
        """Return the type `[P * L, *s]` of the global array that `to_global` makes of a leaf."""
        local_type = type_of(leaf)
        shape = local_type.shape
        if axis is not None and not is_global(leaf):
            if shape[axis] != self.layout.local_size:
                raise self._misfit_error(bind_call())
            shape = axes.resize(shape, axis, self.layout.size)
        sharding = self.layout.sharding(axis, len(shape))
        # The dtype is not weak, even if that of the leaf is; jax.pmap's are not, either.
        return jax.ShapeDtypeStruct(shape, local_type.dtype, sharding=sharding)

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
        """Return the same buffers as an array of another type; store the conversion at `key`."""
        if len(self._conversions) >= _MAX_CONVERSIONS:
            self._conversions.clear()
        self._conversions[key] = _Conversion(array.aval, array.sharding, aval, sharding)
        return _compat.rewrap(array, aval, sharding)


class ProcessCalls:
    """Calls of a mapped function on process-local arrays, over the devices of all processes.

    `call` makes global arrays of the arguments, of the slices of all processes, runs the program on
    these, and returns the slices of this process of the results. With `arrays="global"`, results
    stay global, and need no conversion when they come back as arguments.
    """

    def __init__(
        self,
        options: PmapOptions,
        fun: Callable[[], Callable],
        *,
        run: Callable[..., Any],
        find_layout: Callable[[MappedCall], MeshLayout],
    ):
        """Call `fun()` by `run`, on global arrays; `find_layout` traces a call on such arrays."""
        self._options, self._fun, self._run, self._find_layout = options, fun, run, find_layout
        self._returns_global = options.arrays == "global"
        self._compared: set[int] = set()  # hashes of signatures, which are thus not kept alive
        self._converters: dict[Any, _Converter] = {}  # see `_find_converter`
        self._axes: dict[Any, tuple[Axis, ...]] = {}  # of each leaf, by the structure of a call

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function on process-local arrays; in an outer trace, leave them as they are."""
        static = self._options.static
        mapped_args = tuple(arg for number, arg in enumerate(args) if number not in static)
        leaves, structure = jax.tree.flatten((mapped_args, kwargs))
        if any_tracer(leaves):
            return self._run(*args, **kwargs)
        bind_call = lambda: MappedCall.bind(self._options, self._fun(), args, kwargs)
        leaf_axes = self._axes.get(structure)
        if leaf_axes is None:
            leaf_axes = self._axes[structure] = bind_call().axes
        converter = self._find_converter(structure, leaves, leaf_axes, bind_call)
        pairs = zip(leaves, leaf_axes, strict=True)
        arrays = [converter.to_global(leaf, axis, bind_call) for leaf, axis in pairs]
        if any_tracer(arrays):  # in an outer trace, device_put of a constant makes a tracer
            return self._run(*args, **kwargs)
        global_args, global_kwargs = jax.tree.unflatten(structure, arrays)
        remaining = iter(global_args)
        all_args = [arg if n in static else next(remaining) for n, arg in enumerate(args)]
        results = self._run(*all_args, **global_kwargs)
        return results if self._returns_global else jax.tree.map(converter.to_local, results)

    def to_global_types(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Return the arguments of `lower` with the types of global arrays in place of arrays."""
        call = MappedCall.bind(self._options, self._fun(), args, kwargs)
        converter = self._find_converter(call.structure, call.leaves, call.axes, lambda: call)
        return self._rebuild_with_types(call, converter)

    def compare_program(self, call: MappedCall, jaxpr: ClosedJaxpr, layout: MeshLayout) -> None:
        """Raise DisagreementError if other processes are about to run another program than `jaxpr`.

        A program without collectives is not compared, for it waits for no other process.
        """
        types = [type_of(leaf) for leaf in call.leaves]  # of global arrays
        hashable_types = tuple((kind.shape, kind.dtype, kind.weak_type) for kind in types)
        signature = hash((call.structure, hashable_types, call.static))
        if signature in self._compared or not (texts := collectives(jaxpr)):
            return
        descriptions = {}
        for path, kind, axis in zip(call.paths(), types, call.axes, strict=True):
            shape = list(kind.shape)
            if axis is not None and not self._returns_global:  # the user has process-local arrays
                shape[axis] //= layout.processes
            descriptions[path] = describe(type_of(kind, shape))  # "batch['x']": "float32[2,4]"
        for number, value in zip(self._options.static, call.static, strict=True):
            descriptions[f"static argument {number}"] = describe(value)
        fingerprint = Fingerprint(containers(call.structure), descriptions)
        agree_to_run("pmap of {}", self._fun(), fingerprint, texts, layout.mesh)
        self._compared.add(signature)

    def _rebuild_with_types(self, call: MappedCall, converter: _Converter) -> tuple[tuple, dict]:
        """Return the arguments of a call, with the types of global arrays as leaves."""
        pairs = zip(call.leaves, call.axes, strict=True)
        return call.rebuild([converter.global_type(x, axis, lambda: call) for x, axis in pairs])

    def _find_converter(
        self, structure: Any, leaves: list[Any], leaf_axes: tuple[Axis, ...], bind_call: _BindCall
    ) -> _Converter:
        """Return the converter for a call, cached by structure and by the size of the mapped axis.

        The first mapped leaf gives the size; `to_global` compares the others with it.
        """
        pairs = zip(leaves, leaf_axes, strict=True)
        mapped = ((leaf, axis) for leaf, axis in pairs if axis is not None)
        leaf, axis = next(mapped, (0.0, 0))  # without any, a number, which has no dimension 0
        shape = jnp.shape(leaf)
        has_axis = -len(shape) <= axis < len(shape)
        size = shape[axis] if has_axis else bind_call().size  # which raises the right error
        key = (structure, size, is_global(leaf))
        if key not in self._converters:
            # A trace on global arrays finds the mesh axes of pmaps inside; their types need none.
            layout = self._options.lay_out(size, is_global_size=is_global(leaf))
            args, kwargs = self._rebuild_with_types(bind_call(), _Converter(layout))
            global_call = MappedCall.bind(self._options, self._fun(), args, kwargs)
            self._converters[key] = _Converter(self._find_layout(global_call))
        return self._converters[key]


def is_global(leaf: Any) -> bool:
    """Return whether a leaf is a global array, which has slices of other processes."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def agree_to_run(
    name: str, fun: Any, arguments: Fingerprint, texts: Sequence[str], mesh: jax.sharding.Mesh
) -> None:
    """Compare a program among the processes of a mesh before its first run.

    Raises DisagreementError if they are about to run different programs, or one does not come. The
    program has these types of arguments, and `texts` of `collectives`. In `name`, such as "pmap of
    {}", the function `fun` is filled in: "pmap of 'step' (train.py:10)".
    """
    if _compat.find_joined_process() is None:  # there is no server to compare by
        return
    numbered = {f"collective {number}": text for number, text in enumerate(texts, 1)}
    fingerprint = arguments._replace(leaves={**arguments.leaves, **numbered})
    ranks = sorted({device.process_index for device in mesh.devices.flat})
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
