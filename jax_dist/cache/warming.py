"""Compiles a program into the cache ahead of time."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from jax_dist.cache.activation import stats

# An option that JAX leaves out of its keys, on 0.7.2, 0.10.2 and 0.12.0: what has one of its own is
# looked up again.
_ANEW = {"xla_dump_to": ""}


@dataclasses.dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one program."""

    function: str  # the name of its program, such as "jit_step"
    hit: bool  # it was in the cache already
    written: bool  # it is now
    unwritten: str | None  # why not
    seconds: float  # tracing included

    def __str__(self) -> str:
        if self.hit:
            return f"{self.function}: in the cache"
        end = "written" if self.written else f"not written: {self.unwritten}"
        return f"{self.function}: compiled in {self.seconds:.1f} s, {end}"


def warm(fun: Callable, /, *specs: Any, **named_specs: Any) -> Warmed:
    """Compiles a program into the cache without running it, so that its first call hits.

    Nothing is computed and no arguments are made, so one process can do it, on another day or
    another machine with the same CPU type and jaxlib; with JAX_NUM_CPU_DEVICES for as many
    simulated devices. Programs of several processes are warmed by starting as many.

    Args:
      fun: a function of arrays, or what `jax.jit` or `jax_dist.pmap` made of one.
      *specs: its arguments: trees of `jax.ShapeDtypeStruct`, with the shardings that the arrays
        will have where that is not the default; static arguments as they are.
      **named_specs: those by keyword.

    Returns:
      Whether it was in the cache before, and whether it is now.

    >>> import tempfile
    >>> from jax_dist import cache
    >>> folder = cache.enable(tempfile.mkdtemp())
    >>> def step(x):
    ...     return x * 2
    >>> x = jax.ShapeDtypeStruct((8,), jax.numpy.float32)
    >>> warm(step, x).written, warm(step, x).hit
    (True, True)
    >>> cache.enable(None)
    """
    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    start = time.monotonic()
    lowered = jitted.lower(*specs, **named_specs)
    with stats() as seen:  # only here: lowering may compile small programs of its own
        lowered.compile()
        if not seen.functions:  # JAX compiled it in this process before, and asked for nothing
            lowered.compile(_ANEW)
    seconds = time.monotonic() - start
    for name, counts in seen.functions.items():
        why_not = next(iter(counts.unwritten), None)
        return Warmed(name, counts.hits > 0, counts.written > 0, why_not, seconds)
    name = getattr(jitted, "__name__", "unknown")
    return Warmed(name, hit=False, written=False, unwritten="the cache is off", seconds=seconds)
