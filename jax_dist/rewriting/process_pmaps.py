"""`jax.pmap` in a traced function, with several processes: over the devices of all of them.

Traced, `jax.pmap` sees the devices of its own process, and its collectives reduce over these, with
no error. While a rewriting traces, each is run as ours, which is right there.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from jax_dist import _compat, errors
from jax_dist.errors import RewriteError
from jax_dist.mapping import axes, body, emission
from jax_dist.mapping.calls import Call, Options
from jax_dist.mapping.meshes import DeviceChoice
from jax_dist.passes.findings import Finding
from jax_dist.passes.user_lines import user_line
from jax_dist.rewriting.pmap_sites import devices_of, pmap_sites

CODE = "JXD002"


@contextlib.contextmanager
def pmaps_over_all_processes(mesh: Mesh | None, found: list[Finding]) -> Iterator[None]:
    """While tracing here, `jax.pmap` maps over all processes, on the devices of `mesh` if they fit.

    Adds to `found` what was done.
    """
    if jax.process_count() == 1:
        yield
        return

    def run(taken: _compat.TakenPmap, leaves: Sequence[Any]) -> Any:
        options, call = _in_our_words(taken, leaves, mesh)
        trace = functools.partial(body.traced, options)
        pmap = emission.find(options, call, trace, whole=False)
        output = emission.emitted(options, call, pmap, (), as_view=True)
        size = f" of size {pmap.layout.size}"
        what = f"jax.pmap over '{taken.axis_name}'{size}: a shard_map over all processes"
        found.append(Finding(CODE, "rewritten", what, "", user_line()))
        return output

    with _compat.pmaps_taken_over(run):
        yield


def _in_our_words(
    taken: _compat.TakenPmap, leaves: Sequence[Any], mesh: Mesh | None
) -> tuple[Options, Call]:
    devices = taken.devices
    if devices is None and mesh is not None and len(mesh.axis_names) == 1:
        devices = tuple(mesh.devices.flat)
    named = isinstance(taken.axis_name, str)
    choice = DeviceChoice(
        fun_name="jax.pmap",
        axis_name=taken.axis_name if named else "pmap_axis_0",
        devices=devices,
        backend=taken.backend,
        axis_size=taken.axis_size,
        virtual=False,
    )
    options = Options(
        axis_name=taken.axis_name,
        in_axes=0,  # already spread over the leaves
        out_axes=taken.out_axes,
        static=(),
        donated=(),
        choice=choice,
        arrays="local",
        captures="allow",
        gathers="keep",
    )

    def rebuild(values: Sequence[Any]) -> tuple[tuple, dict]:
        return jax.tree.unflatten(taken.in_tree, list(values))

    args, kwargs = rebuild(leaves)
    call = Call(
        fun=taken.fun,
        rebuild=rebuild,
        leaves=list(leaves),
        axes=taken.in_axes,
        owners=tuple(range(len(leaves))),
        paths=lambda: axes.argument_paths(taken.fun, args, kwargs, list(range(len(args)))),
        fun_name="jax.pmap",
    )
    return options, call


def check_none_local(jaxpr: ClosedJaxpr) -> None:
    """Raises RewriteError for a pmap over the devices of this process alone.

    It comes out of the cache of a jit inside, which was traced before.
    """
    if jax.process_count() == 1:
        return
    for site in pmap_sites(jaxpr):
        devices = devices_of(site.mesh) or ()
        if site.of_jax and all(device.process_index == jax.process_index() for device in devices):
            raise RewriteError(
                errors.message(
                    what="a jax.pmap sees the devices of this process only",
                    which=[f"the pmap over '{site.axis}', at {site.where or 'an unknown line'}"],
                    why="a jax.jit inside was traced before, and remembers it so; its collectives "
                    "would leave the other processes out",
                    do="Call clear_cache() on that jit first, or use jax_dist.pmap in it.",
                )
            )
