"""A state in parts is saved, and read on fewer devices, with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

ocp = pytest.importorskip("orbax.checkpoint")

_X = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)


def _step(state, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.5 * lax.pmean(gradient, "i"), "step": state["step"] + 1}


def _view(devices: int):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("i",))
    return global_view(_step, "i", shardings="fsdp", mesh=mesh)


def test_a_state_of_pmap_goes_through_eight_four_and_two_devices(tmp_path):
    state = {"w": jnp.ones((16, 64)), "step": jnp.int32(0)}
    of_pmap = jax.pmap(_step, "i")(
        jax.tree.map(lambda x: jnp.stack([x] * 8), state), _X.reshape(8, 4, 16)
    )
    wanted = np.asarray(of_pmap["w"][0])
    view = _view(8)
    placed = view.place(of_pmap, view.place_batch(_X), stacked=True)

    with ocp.StandardCheckpointer() as checkpointer:
        for devices in (8, 4, 2):
            checkpointer.save(tmp_path / f"{devices}", placed)
            checkpointer.wait_until_finished()
            view = _view(devices)
            view.place(state, view.place_batch(_X))
            placed = checkpointer.restore(tmp_path / f"{devices}", view.types)

            assert np.array_equal(placed["w"], wanted)
            assert placed["w"].sharding.spec == P(None, "i")
            assert placed["w"].addressable_shards[0].data.shape == (16, 64 // devices)
            assert int(view(placed, view.place_batch(_X))["step"]) == 2
