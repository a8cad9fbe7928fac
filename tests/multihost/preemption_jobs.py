"""What the ranks run in the tests of preemption; each returns plain data."""

import os
import signal
import time

import jax
import numpy as np

import jax_dist
from jax_dist import multihost

_SIGNAL_AT = 20


def steps_until_preempted(
    victims: list[int], handler: str = "none", steps: int = 1500
) -> dict[str, object]:
    """The step at which each rank hears of it, and what its own handler heard."""
    heard: list[int] = []
    if handler == "after":
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    for step in range(1, steps):
        if multihost.preempted(step):
            again = multihost.preempted(step + 1)
            return {"step": step, "stays": again, "heard": heard}
        if step == _SIGNAL_AT and jax.process_index() in victims:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
    return {"step": None, "heard": heard}


def without_service() -> str:
    try:
        multihost.preempted(1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def train(folder: str, signal_at: int | None) -> dict[str, object]:
    """A sum of steps, saved at a preemption and taken up again."""
    import orbax.checkpoint as ocp

    state = {"sum": jax_dist.replicate(np.zeros(2, np.float32), jax.devices()), "steps": 0}
    with ocp.CheckpointManager(folder) as manager:
        start = manager.latest_step() or 0
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        for step in range(start + 1, 301):
            state = {"sum": state["sum"] + step, "steps": state["steps"] + 1}
            if multihost.preempted(step):
                manager.save(step, args=ocp.args.StandardSave(state), force=True)
                break
            if step == signal_at and jax.process_index() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)
    sums = np.asarray(state["sum"]).tolist()
    return {"start": start, "end": step, "sum": sums, "steps": state["steps"]}
