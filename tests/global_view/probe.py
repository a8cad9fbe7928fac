"""One thing that JAX can do on a device, as a step that pmap and the global view both run."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from against_pmap import PLAIN, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import global_view


@dataclasses.dataclass(frozen=True)
class Probe:
    """A step, and arguments for it; mapped over the first dimension where `shared` does not say."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    shared: tuple[int, ...] = ()  # positions of arguments that all devices have
    refused: type[Exception] | None = None  # by both, with errors of this kind
    bound: float = 0  # of the rounding; 0: equal to the bit

    @property
    def in_axes(self) -> tuple[int | None, ...]:
        return tuple(None if n in self.shared else 0 for n in range(len(self.args)))


def normal(*shape: int) -> np.ndarray:
    """The same numbers for the same shape."""
    seed = zlib.crc32(repr(shape).encode())
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def under_pmap(probe: Probe) -> Any:
    mapped = jax.jit(jax.pmap(probe.step, "i", in_axes=probe.in_axes))
    return mapped.lower(*probe.args).compile(compiler_options=PLAIN)(*probe.args)


FOLDED = {"mesh": (2, 4), "mesh_axes": ("replica", "shard")}
FREE = {"mesh": (8, 1), "mesh_axes": ("shard",)}  # and one that XLA has, though nothing to cut
FOLDED_FREE = {"mesh": (2, 4, 1), "mesh_axes": ("replica", "shard")}


def in_global_view(
    probe: Probe, *, mesh: tuple[int, ...] | None = None, mesh_axes: tuple[str, ...] = ()
) -> Any:
    """With a mesh, there is a state; it lies in parts over the axis after the mapped ones."""
    options: Any = {"in_axes": probe.in_axes, "captures": "allow", "state": None}
    step, args = probe.step, probe.args
    if mesh is not None:
        names = (*mesh_axes, "model")[: len(mesh)]
        devices = np.array(jax.devices()).reshape(mesh)
        step, args = lambda state, *args: (state, probe.step(*args)), (np.ones(8), *args)
        options |= {
            "in_axes": (0, *probe.in_axes),
            "state": 0,
            "mesh": Mesh(devices, names),
            "mesh_axes": mesh_axes,
            "shardings": lambda path, leaf: P(names[-1]),
        }
    view = global_view(step, "i", **options)
    if mesh is not None:
        args = (view.place(args[0], stacked=False), *args[1:])
    program = view.lower(*args).compile(compiler_options=PLAIN)
    placed = jax.device_put(args, program.input_shardings[0])
    out = program(*placed)
    return out if mesh is None else out[1]


def check(probe: Probe, **options: Any) -> None:
    """Equal, or refused by both."""
    if probe.refused is None:
        assert_same(in_global_view(probe, **options), under_pmap(probe), probe.bound)
        return
    for run in (under_pmap, functools.partial(in_global_view, **options)):
        with pytest.raises(probe.refused) as refused:
            run(probe)
        assert str(refused.value), f"{probe.name}: {run} says nothing"


def names(probes: Sequence[Probe]) -> list[str]:
    found = [probe.name for probe in probes]
    assert len(set(found)) == len(found)
    return found
