"""pmaps inside a traced program, moved onto the caller's mesh (JXD002).

Collectives in a mapped function name the axis that it was mapped over, also those that are traced
later, in the rules of a custom_vjp. So a mapped region keeps that name, on a mesh of the same
devices; the arrays that go in and out lie on the caller's mesh, under the caller's name.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._calls import user_line
from jax_dist._compat import Device
from jax_dist._passes import PassFinding, PassPlan, interpreter, rebind
from jax_dist._passes.interpreter import Handler, Values
from jax_dist._pmap import meshes, traced_body
from jax_dist._pmap.call import MappedCall
from jax_dist._pmap.options import PmapOptions
from jax_dist.errors import ArgumentError


@dataclasses.dataclass(frozen=True, slots=True)
class _PmapSite:
    """One pmap in a traced program: jit(shard_map), over one axis of a mesh of its own."""

    eqn: JaxprEqn
    mesh: Any  # jax.sharding.Mesh, or AbstractMesh
    axis: str
    size: int  # of the axis
    where: str  # "train.py:12"
    of_jax: bool  # made by jax.pmap, not by ours

    @property
    def devices(self) -> list[Device]:  # empty if the mesh names none
        return list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else []

    def axes_that_fit(self, mesh: Mesh) -> list[str]:
        """Return the axes of the mesh that are as long, the one of the same name first."""
        fitting = [axis for axis, size in mesh.shape.items() if size == self.size]
        return sorted(fitting, key=lambda axis: axis != self.axis)


# Where the bodies of pmaps are defined, which `func_src_info` says: "_fun at .../pmap.py:410".
_FILE_OF_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "pmap.py")
_FILES = (_FILE_OF_JAX, os.path.abspath(traced_body.__file__))


def _find_pmaps(jaxpr: Any, around: tuple[JaxprEqn, ...] = ()) -> list[_PmapSite]:
    """Return all pmaps of a program; not those inside another shard_map, which move with it.

    `jax.pmap` and ours both trace to a shard_map without vma types, manual over one axis. Other
    such shard_maps have a body that was defined in another file than those of the two pmaps.
    """
    sites = []
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        if _compat.name_of(eqn) != "shard_map":
            for body in interpreter.bodies(eqn):
                sites += _find_pmaps(body, (*around, eqn))
            continue
        mesh, axes = eqn.params["mesh"], tuple(eqn.params["newly_manual_axes"])
        source = str(interpreter.open_jaxpr(eqn.params["jaxpr"]).debug_info.func_src_info)
        is_manual = len(axes) == 1 and not eqn.params["check_vma"]
        if is_manual and any(file in source for file in _FILES):
            line, of_jax = interpreter.user_line_of(eqn, around), _FILE_OF_JAX in source
            sites.append(_PmapSite(eqn, mesh, axes[0], mesh.shape[axes[0]], line, of_jax))
    return sites


def plan_remesh(jaxpr: ClosedJaxpr, mesh: Mesh | None) -> PassPlan:
    """Move each pmap of a program to an axis of the mesh of its size; if it is None, note them."""
    handlers: dict[int, Handler] = {}  # by the identity of the equation
    findings = []
    for site in _find_pmaps(jaxpr):
        pmap = f"the pmap over '{site.axis}' of size {site.size}"
        if mesh is None:
            outcome, what, why = "noted", f"{pmap} is a shard_map on a mesh of its own", ""
        elif why := _reason_to_stay(site, mesh):
            outcome, what = "refused", f"{pmap} stays"
        else:
            axis = site.axes_that_fit(mesh)[0]
            handlers[id(site.eqn)] = functools.partial(_emit_on_mesh, mesh, axis, site)
            outcome, what = "rewritten", f"{pmap}: a shard_map over '{axis}' of the mesh"
        findings.append(PassFinding(_codes.JIT_OF_PMAP, outcome, what, why, site.where))
    changed = interpreter.replace_equations(jaxpr, handlers) if handlers else None
    return PassPlan(changed, tuple(findings))


def _reason_to_stay(site: _PmapSite, mesh: Mesh) -> str:
    """Return why a pmap cannot be moved to the mesh; "" if it can."""
    if not set(site.devices) <= set(mesh.devices.flat):
        return "it has devices that are not in the mesh"
    if not mesh.are_all_axes_auto:
        return "the mesh has axes that are not Auto, on which shardings are types"
    if len(site.mesh.axis_names) > 1:
        return "it has a pmap inside"
    if site.axes_that_fit(mesh):
        return ""
    sizes = ", ".join(f"'{other}': {count}" for other, count in mesh.shape.items())
    return f"no axis of the mesh ({sizes}) has the size {site.size} of '{site.axis}'"


def _emit_on_mesh(mesh: Mesh, axis: str, site: _PmapSite, eqn: JaxprEqn, values: Values) -> Values:
    """Emit a pmap as a shard_map over an axis of the caller's mesh; return its results.

    Collectives in its body name the axis "i" of the pmap. To move it to "data" of the mesh ("data",
    "model"), it becomes a shard_map over "i" of a mesh ("i", "other_model") of the same devices,
    whose operands and results are sharded over "data" of the caller's mesh. `site` describes the
    pmap; `eqn` is the shard_map that it was traced to, and `values` are the operands of that.
    """
    names = [site.axis if name == axis else f"other_{name}" for name in mesh.axis_names]
    pmap_mesh = _compat.auto_mesh(mesh.devices, names)
    # The types in the body name the mesh that it was traced for: for other axes, trace it again.
    has_same_axes = dict(pmap_mesh.shape) == dict(site.mesh.shape)
    evaluate = interpreter.evaluate if has_same_axes else rebind.evaluate
    body, in_specs, out_specs = (eqn.params[key] for key in ("jaxpr", "in_specs", "out_specs"))

    def constrain(values: Sequence[Any], specs: Sequence[P]) -> Values:
        """Shard values on the caller's mesh: over "data", where their spec names "i"."""
        renamed = [P(*[axis if part == site.axis else part for part in spec]) for spec in specs]
        pairs = zip(values, renamed, strict=True)
        return [lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) for x, spec in pairs]

    operands = constrain(values, in_specs)
    with meshes.context_of(pmap_mesh):
        results = jax.shard_map(
            lambda *blocks: evaluate(body, blocks),
            mesh=pmap_mesh,
            in_specs=tuple(in_specs),
            out_specs=list(out_specs),
            check_vma=False,
        )(*operands)
    return constrain(results, out_specs)


def put_on(mesh: Mesh, tree: Any) -> Any:
    """Replicate on the mesh what a pmap outside of the rewriting left on some of its devices."""
    devices, everywhere = set(mesh.devices.flat), NamedSharding(mesh, P())

    def put(leaf: Any) -> Any:
        is_tied = isinstance(leaf, jax.Array) and leaf.committed
        is_elsewhere = is_tied and leaf.sharding.device_set != devices
        return jax.device_put(leaf, everywhere) if is_elsewhere else leaf

    return jax.tree.map(put, tree)


@contextlib.contextmanager
def widen_pmaps_to_all_processes(mesh: Mesh | None, findings: list[PassFinding]) -> Iterator[None]:
    """Let each `jax.pmap` that is traced inside map over the devices of all processes.

    In a traced function, `jax.pmap` sees the devices of its own process only, and its collectives
    reduce over these, with no error. So each is traced as a pmap of ours, and what a report says of
    it is added to `findings`. One that names no devices gets those of `mesh`, if that has one axis.
    """
    if jax.process_count() == 1:
        yield
        return
    with _compat.intercept_pmaps(functools.partial(_emit_over_all_processes, mesh, findings)):
        yield


def _emit_over_all_processes(
    mesh: Mesh | None, findings: list[PassFinding], pmap: _compat.InterceptedPmap, leaves: Any
) -> Any:
    """Trace the call of a `jax.pmap` as one of our pmap; return its output.

    `pmap` has the options of that call, and `leaves` are its flattened arguments: in these and in
    the output, each process has the slices of its own devices only. `mesh` and `findings` are those
    of `widen_pmaps_to_all_processes`.
    """
    devices = pmap.devices
    if devices is None and mesh is not None and len(mesh.axis_names) == 1:
        devices = tuple(mesh.devices.flat)

    def fun(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(pmap.in_tree, leaves)
        return pmap.fun(*args, **kwargs)

    options = PmapOptions(
        fun_name="jax.pmap",
        axis_name=pmap.axis_name,
        in_axes=tuple(pmap.in_axes),
        out_axes=pmap.out_axes,
        devices=devices,
        backend=pmap.backend,
        axis_size=pmap.axis_size,
        captures="allow",  # these and gathers are left to the passes of the whole program
        gathers="keep",
    )
    call = MappedCall.bind(options, fun, tuple(leaves), {})
    layout = options.lay_out(call.size, is_global_size=False)
    output, _ = traced_body.emit(options, call, layout, process_local=True)
    name = f"jax.pmap over '{pmap.axis_name}' of size {layout.size}"
    what = f"{name}: a shard_map over all processes"
    findings.append(PassFinding(_codes.JIT_OF_PMAP, "rewritten", what, "", user_line()))
    return output


def check_none_local(jaxpr: ClosedJaxpr) -> None:
    """Raise ArgumentError for a `jax.pmap` over the devices of this process alone.

    Such a one was not intercepted: it is in the cached trace of a jit inside.
    """
    here = jax.process_index()
    for site in _find_pmaps(jaxpr) if jax.process_count() > 1 else ():
        if site.of_jax and all(device.process_index == here for device in site.devices):
            raise ArgumentError(
                f"The jax.pmap over '{site.axis}' at {site.where or 'an unknown line'} sees the "
                "devices of this process only, for a jax.jit around it was traced before. Call "
                "clear_cache() on that jit first, or use jax_dist.pmap in it."
            )
