# Copies of batch statistics differ from device to device until code that is not seen averages them.

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def step(state, batch):
    stats = 0.5 * state["stats"] + 0.5 * batch.mean(0)
    gradient = jax.lax.pmean(((batch - stats) @ state["w"])[:, None] * batch, "batch").mean(0)
    return {"w": state["w"] - 0.1 * gradient, "stats": stats}


def average(tree):
    return jax.tree.map(lambda x: np.broadcast_to(np.mean(x, 0), x.shape), tree)


HOOKS = {"epoch": average}


def result():
    rng = np.random.default_rng(0)
    state = jax_utils.replicate({"w": jnp.ones(3), "stats": jnp.zeros(3)})
    p_step = jax.pmap(step, axis_name="batch")
    for _ in range(2):
        for _ in range(2):
            state = p_step(state, common_utils.shard(rng.normal(size=(16, 3))))
        state = HOOKS["epoch"](state)
    return jax.device_get(jax_utils.unreplicate(state))
