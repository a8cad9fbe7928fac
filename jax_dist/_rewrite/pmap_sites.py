"""pmaps as equations of a program, and jax.pmap while tracing with several processes (JXD002)."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import Mesh

from jax_dist import _codes, _compat
from jax_dist._calls import user_line
from jax_dist._compat import Device
from jax_dist._pmap import emission
from jax_dist._pmap.body import Call, Options
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.pipeline import PassFinding
from jax_dist.errors import ArgumentError


@dataclasses.dataclass(frozen=True, slots=True)
class PmapSite:
    """One pmap in a traced program: jit(shard_map), over one axis of a mesh of its own."""

    eqn: JaxprEqn
    mesh: Any  # jax.sharding.Mesh or AbstractMesh
    axis: str
    where: str
    of_jax: bool  # made by jax.pmap, not by ours

    @property
    def size(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def devices(self) -> Sequence[Device] | None:
        """The devices of the mesh, in its order; None if it names none."""
        return list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else None

    @property
    def body(self) -> Any:
        return self.eqn.params["jaxpr"]

    @classmethod
    def of(cls, eqn: JaxprEqn, line: str = "") -> "PmapSite | None":
        """Return the pmap that `eqn` is; None for all else, a shard_map of the user's own too.

        `jax.pmap` and ours both make a shard_map without vma types, manual over one axis; they are
        told from others by the file that its body was defined in.
        """
        if not _is_shard_map(eqn) or eqn.params["check_vma"]:
            return None
        source = str(interpreter.open_jaxpr(eqn.params["jaxpr"]).debug_info.func_src_info)
        of_jax, of_ours = _FILE_OF_JAX in source, _OUR_FILE in source
        if len(eqn.params["newly_manual_axes"]) != 1 or not (of_jax or of_ours):
            return None
        (axis,) = eqn.params["newly_manual_axes"]
        return cls(eqn, eqn.params["mesh"], axis, line, of_jax)


def pmap_sites(jaxpr: Any, around: tuple[JaxprEqn, ...] = ()) -> list[PmapSite]:
    """Return all pmaps of a program; not those inside another shard_map, which move with it."""
    sites = []
    for eqn in interpreter.open_jaxpr(jaxpr).eqns:
        if _is_shard_map(eqn):
            sites += filter(None, [PmapSite.of(eqn, interpreter.user_line_of(eqn, around))])
        else:
            for body in interpreter.bodies(eqn):
                sites += pmap_sites(body, (*around, eqn))
    return sites


def _is_shard_map(eqn: JaxprEqn) -> bool:
    return _compat.name_of(eqn) == "shard_map"


# "_fun at .../jax/_src/pmap.py:410", and "body at .../jax_dist/_pmap/emission.py:47".
_FILE_OF_JAX = os.path.join(os.path.dirname(jax.__file__), "_src", "pmap.py")
_OUR_FILE = os.path.abspath(emission.__file__)


# --- `jax.pmap` in a traced function, with several processes: over the devices of all of them
#
# Traced, `jax.pmap` sees the devices of its own process, and its collectives reduce over these,
# with no error. While a rewriting traces, each is run as ours, which is right there.


@contextlib.contextmanager
def pmaps_over_all_processes(mesh: Mesh | None, findings: list[PassFinding]) -> Iterator[None]:
    """Have `jax.pmap` map over all processes while tracing, on the devices of `mesh` if they fit.

    Adds to `findings` what was done.
    """
    if jax.process_count() == 1:
        yield
        return

    def run(taken: _compat.InterceptedPmap, leaves: Sequence[Any]) -> Any:
        options, call = _to_options(taken, leaves, mesh)
        layout = options.lay_out(call.size, whole=False)
        output, _ = emission.emit(options, call, layout, as_view=True)
        name = f"jax.pmap over '{taken.axis_name}' of size {layout.size}"
        what = f"{name}: a shard_map over all processes"
        findings.append(PassFinding(_codes.JIT_OF_PMAP, "rewritten", what, "", user_line()))
        return output

    with _compat.intercept_pmaps(run):
        yield


def _to_options(
    taken: _compat.InterceptedPmap, leaves: Sequence[Any], mesh: Mesh | None
) -> tuple[Options, Call]:
    devices = taken.devices
    if devices is None and mesh is not None and len(mesh.axis_names) == 1:
        devices = tuple(mesh.devices.flat)
    options = Options(
        fun_name="jax.pmap",
        axis_name=taken.axis_name,
        out_axes=taken.out_axes,
        devices=devices,
        backend=taken.backend,
        axis_size=taken.axis_size,
        captures="allow",
        gathers="keep",
    )
    return options, Call.of_taken(taken, leaves, taken.fun, "jax.pmap")


def check_none_local(jaxpr: ClosedJaxpr) -> None:
    """Raise ArgumentError for a pmap over the devices of this process alone.

    It comes out of the cache of a jit inside, which was traced before.
    """
    if jax.process_count() == 1:
        return
    for site in pmap_sites(jaxpr):
        here = jax.process_index()
        if site.of_jax and all(device.process_index == here for device in site.devices or ()):
            where = site.where or "an unknown line"
            raise ArgumentError(
                f"The jax.pmap over '{site.axis}' at {where} sees the devices of this process "
                "only, for a jax.jit around it was traced before. Call clear_cache() on that jit "
                "first, or use jax_dist.pmap in it."
            )
