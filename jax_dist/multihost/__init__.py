"""Several processes: they start, agree, wait for one another, and end together.

What comes in are the arguments of `initialize`, or the variables that a launcher sets; later trees
and names that every process gives. What goes out is the same answer, or the same error, or the same
end, in all of them. `rendezvous` and `channel` bring the processes together, `job` and `failures`
end them together, and `agreement` compares what they do.

No process may wait for another one without a limit, and no thread of ours for the main thread,
which may be stuck in a collective. `ranks` is for launchers too, and never imports JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist.multihost.agreement import agree
    from jax_dist.multihost.failures import watchdog
    from jax_dist.multihost.initialization import initialize
    from jax_dist.multihost.main_thread import preempted, reached_preemption_sync_point

_HOMES = {  # what Python sees: imported on first use, so that the launcher never loads jax
    "agree": "jax_dist.multihost.agreement",
    "initialize": "jax_dist.multihost.initialization",
    "preempted": "jax_dist.multihost.main_thread",
    "reached_preemption_sync_point": "jax_dist.multihost.main_thread",
    "watchdog": "jax_dist.multihost.failures",
}
__all__ = (
    "agree",
    "initialize",
    "preempted",
    "reached_preemption_sync_point",
    "watchdog",
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
