"""What the ranks run in the tests of checkpoints; each returns plain data."""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from preemption_jobs import train

from jax_dist.errors import CheckpointError, CheckpointWarning, DisagreementError
from jax_dist.multihost import Checkpoints, step_folders


def first_start(folder: str) -> dict[str, object]:
    """Each in a folder of its own; the preemption is the end of the job, so it comes last."""
    here = pathlib.Path(folder)
    return {
        "saved": save_and_restore(str(here / "saved")),
        "differs": save_what_differs(str(here / "differs")),
        "troubles": troubles_of_one_rank(str(here / "troubles")),
        "trained": train(str(here / "trained"), 40),
    }


def second_start(folder: str) -> dict[str, object]:
    """What goes on from where the first start ended."""
    here = pathlib.Path(folder)
    return {
        "saved": save_and_restore(str(here / "saved")),
        "trained": train(str(here / "trained"), None),
        "from pmap": restore_from_pmap(str(here / "from_pmap")),
    }


def state_on_all(start: float) -> dict[str, object]:
    """Cut over the devices of all processes, replicated, and of each process alone."""
    mesh = Mesh(np.array(jax.devices()), "i")

    def make():
        return {"cut": jnp.arange(8.0) + start, "same": jnp.full(3, float(start)), "keys": keys()}

    def keys():
        return jax.random.split(jax.random.key(int(start)), 4)

    cut, same = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())
    state = jax.jit(make, out_shardings={"cut": cut, "same": same, "keys": cut})()
    return {**state, "own": jnp.full(2, float(start)), "step": int(start)}


def as_data(state: dict) -> dict[str, object]:
    """Plain, with what this process sees of it."""
    keys = [jax.random.key_data(each.data).tolist() for each in state["keys"].addressable_shards]
    return {
        "cut": [shard.data.tolist() for shard in state["cut"].addressable_shards],
        "same": np.asarray(state["same"].addressable_data(0)).tolist(),
        "keys": keys,
        "own": state["own"].tolist(),
        "step": state["step"],
    }


def save_and_restore(folder: str) -> dict[str, object]:
    with Checkpoints(folder, every=2) as checkpoints, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        state, start = checkpoints.restore(state_on_all(0.0))
        saved = [checkpoints.save(step, state_on_all(step)) for step in range(start + 1, start + 5)]
    return {
        "start": start,
        "found": as_data(state),
        "specs": [tuple(state[name].sharding.spec) for name in ("cut", "same")],
        "saved": saved,
        "warned": [str(each.message) for each in seen if each.category is CheckpointWarning],
    }


def save_what_differs(folder: str) -> tuple[str, bool]:
    rank = jax.process_index()
    with Checkpoints(folder, every=1) as checkpoints:
        try:
            checkpoints.save(1, {"w": np.full(2, float(rank)), "n": 3, "b": np.zeros(2)})
        except DisagreementError as error:
            text = str(error)
        return text, checkpoints.save(1, {"n": 3})


def troubles_of_one_rank(folder: str) -> dict[str, object]:
    """What all ranks are told of what happened in one, and whether they go on."""
    rank, missing, restore = (
        jax.process_index(),
        step_folders.missing,
        orbax.StandardCheckpointHandler.restore,
    )

    def fail(*_, **__):
        raise MemoryError("no room")

    def told(action) -> str:
        try:
            return f"no error: {action()}"
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"

    with Checkpoints(folder, every=1, keep=1) as checkpoints:
        checkpoints.save(1, state_on_all(1.0))
        in_use = told(lambda: Checkpoints(folder, every=1))
        if rank == 0:
            step_folders.missing = lambda *_: ["['cut']/0 is not there"]
        lost = told(lambda: checkpoints.save(2, state_on_all(2.0)))
        checkpoints.save(2, state_on_all(2.0), wait=False)
        lost_later = told(lambda: checkpoints.save(3, state_on_all(3.0), wait=False))
        step_folders.missing = missing
        names = sorted(path.name for path in pathlib.Path(folder).iterdir())
        if rank == 1:
            orbax.StandardCheckpointHandler.restore = fail
        unreadable = told(lambda: checkpoints.restore(state_on_all(0.0)))
        orbax.StandardCheckpointHandler.restore = restore
        saved = checkpoints.save(2, state_on_all(2.0), wait=False)
        found = as_data(checkpoints.restore(state_on_all(0.0))[0])
    return {
        "in use": in_use,
        "lost": lost,
        "lost later": lost_later,
        "names": names,
        "unreadable": unreadable,
        "then": (saved, found["step"], found["same"]),
    }


def restore_from_pmap(folder: str) -> dict[str, object]:
    """A state with a device axis, as one process wrote it, onto the devices of all."""
    state = {**state_on_all(0.0), "keys": np.zeros(3)}
    with Checkpoints(folder) as checkpoints:
        found, start = checkpoints.restore(state, from_pmap=True)
    whole = {name: found[name].sharding == state[name].sharding for name in ("cut", "same")}
    seen = [shard.data.tolist() for shard in found["cut"].addressable_shards]
    return {"start": start, "whole": whole, "cut": seen, "own": found["own"].tolist()}
