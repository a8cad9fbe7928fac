"""The ways to run a mapped step, and the program that each becomes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist._pmap.meshes import outside_of_meshes
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.gathers import GATHERS
from jax_dist.errors import ArgumentError, refusal
from jax_dist.global_view.view import global_view
from jax_dist.machines.steps import MappedStep
from jax_dist.pmap import pmap


def lowered(
    step: MappedStep, way: str, devices: Sequence[Any], state: Sequence[int] | None
) -> jax.stages.Lowered:
    """The program of a step, written in one of the `WAYS`.

    `state` are the positions of the arguments that are carried; None: those that come back.
    """
    return WAYS[way](step, devices, state)


def usual(step: MappedStep, devices: Sequence[Any]) -> tuple[str, ...]:
    """The ways that are worth a look: `jax_dist.pmap` only where it replaces gathers.

    HSDP keeps more of the state than FSDP; it is for those who know that their network is slow.
    """
    with outside_of_meshes():
        before = _gathers(step.program(len(devices))[0])
    traced = step.mapped(pmap, devices, captures="allow").trace if before else None
    reduced = traced is not None and _gathers(traced(*step.leaves(len(devices))).jaxpr) < before
    left_out = {"hsdp"} if reduced else {"hsdp", "jax_dist.pmap"}
    return tuple(way for way in WAYS if way not in left_out)


def _gathers(jaxpr: ClosedJaxpr) -> int:
    return sum(_compat.name_of(eqn) in GATHERS for eqn in interpreter.equations(jaxpr))


def _by_jax(step: MappedStep, devices: Sequence[Any], _: Any) -> jax.stages.Lowered:
    return step.mapped(jax.pmap, devices).lower(*step.leaves(len(devices)))


def _by_us(step: MappedStep, devices: Sequence[Any], _: Any) -> jax.stages.Lowered:
    return step.mapped(pmap, devices).lower(*step.leaves(len(devices)))


def _in_global_view(*, by_host: bool = False, **options: Any) -> Callable[..., jax.stages.Lowered]:
    def lower(
        step: MappedStep, devices: Sequence[Any], state: Sequence[int] | None
    ) -> jax.stages.Lowered:
        carried = step.state(len(devices)) if state is None else tuple(state)
        if not carried:
            raise refusal(
                ArgumentError,
                what=f"'{step.name}' carries no state that could lie in parts",
                which=["no argument comes back: none has the tree, shapes and types of a result"],
                why="what only goes in, or only comes out, is cut by pmap already",
                do="Give its position by state=.",
            )
        args, kwargs = step.call.rebuild(step.leaves(len(devices), whole=carried))
        dims, _ = step.call.rebuild(step.axes)
        static = step.options.static
        rows, names = np.array(devices), (step.axis_name,)
        if by_host:
            rows, names = _hosts(devices), ("hosts", "devices")
        view = global_view(
            step.call.fun,
            step.axis_name,
            in_axes=tuple(None if n in static else dim for n, dim in enumerate(dims)),
            out_axes=step.options.out_axes,
            state=carried,
            mesh=_compat.auto_mesh(rows, names),
            mesh_axes=names,
            static_broadcasted_argnums=static,
            donate_argnums=step.options.donated,
            **options,
        )
        return view.lower(*args, **kwargs)

    return lower


def _hosts(devices: Sequence[Any]) -> np.ndarray:
    """The devices, a row for each host."""
    rows: dict[int, list[Any]] = {}
    for device in devices:
        rows.setdefault(device.process_index, []).append(device)
    if len({*map(len, rows.values())}) > 1:
        raise refusal(
            ArgumentError,
            what="the hosts have unlike numbers of devices",
            which=[f"host {host} has {len(own)}" for host, own in rows.items()],
            why="the state is cut over the devices of each in the same way",
            do="Choose another way, or other devices.",
        )
    return np.array([*rows.values()])


WAYS: dict[str, Callable[..., jax.stages.Lowered]] = {
    "jax.pmap": _by_jax,
    "jax_dist.pmap": _by_us,
    "replicated": _in_global_view(shardings="replicated"),
    "fsdp": _in_global_view(shardings="fsdp"),
    "hsdp": _in_global_view(shardings="fsdp", by_host=True),
    "fsdp-regather": _in_global_view(shardings="fsdp", regather=True),
}
"""By name: as it is; by `jax_dist.pmap`; and with its state as `global_view` can keep it."""
