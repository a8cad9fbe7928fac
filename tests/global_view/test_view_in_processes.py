"""Two processes of four devices have the state and the numbers of one process of eight."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import global_view
from jax_dist.errors import ArgumentError
from jax_dist.testing import run_processes

# Processes sum in another order than devices; of such numbers, any order gives the same.
_ROWS = np.random.default_rng(0).integers(-1, 2, (32, 16)).astype(np.float32)
_W = np.random.default_rng(1).integers(-1, 2, (16, 64)).astype(np.float32)


def _step(state, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ w - state["mean"]) ** 2))(state["w"])
    mean = 0.5 * state["mean"] + jnp.mean(x @ state["w"], 0)
    new = {"w": state["w"] - 0.25 * lax.pmean(gradient, "i"), "mean": mean}
    return new, lax.pmean(jnp.sum(x), "i")


def _train() -> list:
    """Return what each device holds: sharded, copied over processes, or over a model axis."""
    devices, pair = np.array(jax.devices()), ("replica", "shard")
    rule = lambda path, leaf: P("i", "model") if path == "w" else P("model")
    kinds = (
        {"shardings": "fsdp"},
        {"shardings": "fsdp", "mesh": Mesh(devices.reshape(2, 4), pair), "mesh_axes": pair},
        {"shardings": rule, "mesh": Mesh(devices.reshape(4, 2), ("i", "model"))},
    )
    held = []
    for options in kinds:
        view = global_view(_step, "i", out_axes=(0, None), donate_argnums=0, **options)
        batch = view.place_batch(np.split(_ROWS, jax.process_count())[jax.process_index()])
        state = view.place({"w": _W, "mean": np.zeros(64, np.float32)}, batch, stacked=False)
        for _ in range(2):
            state, _ = jax.block_until_ready(view(state, batch))
        shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
        held += [(shard.device.id, np.asarray(shard.data).tolist()) for shard in shards]
    return held


def test_two_processes_have_the_numbers_of_one():
    one, outcomes = _train(), run_processes(_train, processes=2, cpu_devices=4)

    two = [each for outcome in outcomes for each in outcome.value]
    ids = sorted({device for device, _ in two})
    assert len(ids) == 8
    assert sorted((ids.index(device), data) for device, data in two) == sorted(one)


def _place_and_call() -> list[str]:
    """Return the sharding of a stacked state, and the errors of arguments that do not fit."""
    view = global_view(_step, "i", shardings="fsdp", out_axes=(0, None))
    batch = view.place_batch(np.split(_ROWS, 2)[jax.process_index()])
    mean = np.zeros((4, 64), np.float32)
    own = np.stack([_W] * 4)  # as pmap has it: the slices of this process
    again = view.place({"w": own, "mean": mean}, batch, stacked=True)
    drifted = own + jax.process_index() * np.arange(4, dtype=np.float32)[:, None, None]
    other = global_view(_step, "i", shardings="fsdp", out_axes=(0, None))
    state = view.place({"w": _W, "mean": np.zeros(64, np.float32)}, batch)
    rows, all_means = np.zeros((8, 4, 16), np.float32), np.zeros((8, 64), np.float32)
    errors = []
    for call in (
        lambda: other.place({"w": drifted, "mean": mean}, batch, stacked=True),
        lambda: view(state, rows),
        lambda: view(state, jnp.asarray(rows)),
        lambda: view({"w": _W, "mean": all_means}, view.place_batch(_ROWS[:16])),
    ):
        try:
            call()
        except ArgumentError as error:
            errors.append(str(error))
    return [str(again["w"].sharding.spec), *errors]


def test_a_process_places_its_slices_and_no_other_array_of_its_own():
    for outcome in run_processes(_place_and_call, processes=2, cpu_devices=4):
        spec, drifted, *others = outcome.value
        assert spec == str(P(None, "i"))
        assert "state['w']" in drifted
        assert [error.partition(", and is")[0] for error in others] == [
            "x of shape (8, 4, 16) is of this process alone",
            "x of shape (8, 4, 16) is of this process alone",
            "state['mean'] of shape (8, 64) is of this process alone",
        ]
