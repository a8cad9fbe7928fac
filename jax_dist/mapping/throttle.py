"""Not too many calls in flight, where the CPU backend of JAX hangs over them.

Its devices take 32 executions each, and dispatch then waits, in the middle of one that other
devices wait for in a collective. So every sixteenth call waits for its own result.

"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jax_dist import _compat

_WINDOW = 16  # calls in flight at most, of all functions of this process together

turns: Iterator[bool] = itertools.repeat(object=False)
"""Whether to wait after this call. Asking takes 30 ns, and enters no Python function."""
if _compat.CPU_HANGS_WHEN_FULL:
    turns = itertools.cycle([*[False] * (_WINDOW - 1), True])


def can_be_full(mesh: Mesh) -> bool:
    """Whether calls of a program on these devices have to wait now and then."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return _compat.CPU_HANGS_WHEN_FULL and is_cpu and mesh.size > 1


def throttled(call: Callable) -> Callable:
    """The same, with every sixteenth call waiting for its result."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs) if kwargs else call(*args)
        if next(turns):
            wait(output)
        return output

    return waiting


def wait(output: Any) -> None:
    """Until what a call returned is there, if several CPU devices compute it."""
    for leaf in jax.tree.leaves(output):  # all are there at the same time: the first one will do
        if isinstance(leaf, Tracer):
            return
        if isinstance(leaf, jax.Array):
            devices = leaf.sharding.device_set
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                leaf.block_until_ready()
            return
