"""Two processes of four devices have the state and the numbers of one process of eight."""

import hashlib

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
    return {"w": state["w"] - 0.25 * lax.pmean(gradient, "i"), "mean": mean}, lax.pmean(
        jnp.sum(x), "i"
    )


def _train() -> list:
    """Return the values on each device of this process, and the errors on the way."""
    view = global_view(_step, "i", shardings="fsdp", donate_argnums=0, out_axes=(0, None))
    count, index = jax.process_count(), jax.process_index()
    rows = np.split(_ROWS, count)[index]
    batch = view.place_batch(rows)
    state = view.place({"w": _W, "mean": np.zeros(64, np.float32)}, batch)
    for _ in range(2):
        state, _ = view(state, batch)
    digests = []
    for leaf in jax.tree.leaves(state):
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            digests.append(hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest())
    local = jax.local_device_count()
    own = np.stack([_W] * local)  # as pmap has it: the slices of this process
    again = view.place({"w": own, "mean": np.zeros((local, 64), np.float32)}, batch, stacked=True)
    drifted = own + (index if count > 1 else 1) * np.arange(local, dtype=np.float32)[:, None, None]
    other = global_view(_step, "i", shardings="fsdp", out_axes=(0, None))
    try:
        other.place({"w": drifted, "mean": np.zeros((local, 64), np.float32)}, batch, stacked=True)
    except ArgumentError as error:
        refused = "state['w']" in str(error)
    else:
        refused = False
    placed = again["w"].sharding.spec == jax.sharding.PartitionSpec(None, "i")
    return [digests, placed, refused, *(_refusals(view, state) if count > 1 else [])]


def _refusals(view, state) -> list[str]:
    """Return the errors of arguments that belong to one process alone."""
    own = np.zeros((8, 4, 16), np.float32)
    whole = {"w": _W, "mean": np.zeros((8, 64), np.float32)}
    errors = []
    for args in ((state, own), (state, jnp.asarray(own)), (whole, view.place_batch(_ROWS[:16]))):
        try:
            view(*args)
        except ArgumentError as error:
            errors.append(str(error).partition(", and is")[0])
    return errors


def test_two_processes_have_the_numbers_of_one():
    whole, *_ = _train()

    reports = run_processes(_train, processes=2, cpu_devices=4)

    mean, w = whole[:8], whole[8:]
    reports = [outcome.value for outcome in reports]
    joined = [report[0] for report in reports]
    assert [leaf for digests in joined for leaf in digests[4:]] == w
    assert [leaf for digests in joined for leaf in digests[:4]] == mean
    for _, placed, refused, *errors in reports:
        assert placed
        assert refused
        assert errors == [
            "x of shape (8, 4, 16) is of this process alone",
            "x of shape (8, 4, 16) is of this process alone",
            "state['mean'] of shape (8, 64) is of this process alone",
        ]


def _on_meshes() -> list:
    """Return the values on each device: copied over processes, sharded over a model axis."""
    devices = np.array(jax.devices())
    pair = ("replica", "shard")
    rule = lambda path, leaf: P("i", "model") if path == "w" else P("model")
    kinds = (
        {"mesh": Mesh(devices.reshape(2, 4), pair), "mesh_axes": pair, "shardings": "fsdp"},
        {"mesh": Mesh(devices.reshape(4, 2), ("i", "model")), "shardings": rule},
    )
    digests = []
    for options in kinds:
        view = global_view(_step, "i", out_axes=(0, None), **options)
        batch = view.place_batch(np.split(_ROWS, jax.process_count())[jax.process_index()])
        original = {"w": _W, "mean": np.zeros(64, np.float32)}
        state = view.place(original, batch, stacked=False)
        for _ in range(2):
            state, _ = jax.block_until_ready(view(state, batch))
        shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
        digests += [(shard.device.id, np.asarray(shard.data).tolist()) for shard in shards]
    return digests


def test_a_mesh_of_several_axes_may_be_of_two_processes():
    one = _on_meshes()
    two = [each for outcome in run_processes(_on_meshes, processes=2, cpu_devices=4)
           for each in outcome.value]  # fmt: skip
    first = sorted({device for device, _ in two})
    named = {device: number for number, device in enumerate(first)}

    assert len(first) == 8
    assert sorted((named[device], data) for device, data in two) == sorted(one)
