"""Several processes: they start, agree, wait for one another, and end together.

What comes in are the arguments of `initialize`, or the variables that a launcher sets; later trees
and names that every process gives. What goes out is the same values, or the same error, or the same
end, in all of them. `rendezvous` and `channel` bring the processes together, `job` and `failures`
end them together; `agreement` compares what they do, and `collectives` and `global_arrays`
do only what was agreed upon.

No process may wait for another one without a limit, and no thread of ours for the main thread,
which may be stuck in a collective. `ranks` is for launchers too, and never imports JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what editors and type checkers see
    from jax_dist.multihost.agreement import agree
    from jax_dist.multihost.collectives import (
        assert_equal,
        broadcast_one_to_all,
        process_allgather,
        sync_global_devices,
    )
    from jax_dist.multihost.failures import watchdog
    from jax_dist.multihost.global_arrays import (
        global_array_to_host_local_array,
        host_local_array_to_global_array,
    )
    from jax_dist.multihost.initialization import initialize
    from jax_dist.multihost.main_thread import preempted, reached_preemption_sync_point

_HOMES = {  # what Python sees: imported on first use, so that the launcher never loads jax
    "agree": "jax_dist.multihost.agreement",
    "assert_equal": "jax_dist.multihost.collectives",
    "broadcast_one_to_all": "jax_dist.multihost.collectives",
    "global_array_to_host_local_array": "jax_dist.multihost.global_arrays",
    "host_local_array_to_global_array": "jax_dist.multihost.global_arrays",
    "initialize": "jax_dist.multihost.initialization",
    "preempted": "jax_dist.multihost.main_thread",
    "process_allgather": "jax_dist.multihost.collectives",
    "reached_preemption_sync_point": "jax_dist.multihost.main_thread",
    "sync_global_devices": "jax_dist.multihost.collectives",
    "watchdog": "jax_dist.multihost.failures",
}
__all__ = (
    "agree",
    "assert_equal",
    "broadcast_one_to_all",
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    "initialize",
    "preempted",
    "process_allgather",
    "reached_preemption_sync_point",
    "sync_global_devices",
    "watchdog",
)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
