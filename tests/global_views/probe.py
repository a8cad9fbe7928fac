"""One thing that JAX can do on a device, as a step that pmap and the global view both run."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from against_pmap import PLAIN, assert_same

from jax_dist import global_view


@dataclasses.dataclass(frozen=True)
class Probe:
    """A step, and arguments for it; mapped over the first dimension where `shared` does not say."""

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    shared: tuple[int, ...] = ()  # positions of arguments that all devices have
    refused: type[Exception] | None = None  # by both, with errors of this kind

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


def in_global_view(probe: Probe) -> Any:
    options: Any = {"state": None, "in_axes": probe.in_axes, "captures": "allow"}
    view = global_view(probe.step, "i", **options)
    program = view.lower(*probe.args).compile(compiler_options=PLAIN)
    placed = jax.device_put(probe.args, program.input_shardings[0])
    return program(*placed)


def check(probe: Probe) -> None:
    """Equal to the bit, or refused by both."""
    if probe.refused is None:
        assert_same(in_global_view(probe), under_pmap(probe))
        return
    for run in (under_pmap, in_global_view):
        with pytest.raises(probe.refused) as refused:
            run(probe)
        assert str(refused.value), f"{probe.name}: {run.__name__} says nothing"


def names(probes: Sequence[Probe]) -> list[str]:
    found = [probe.name for probe in probes]
    assert len(set(found)) == len(found)
    return found
