# Functions of the file that get the state and the mapped function, and give the state back.

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * jax.lax.pmean(grads, "i")}


def train_epoch(p_step, state, batches):
    for batch in batches:
        state = p_step(state, common_utils.shard(batch))
    return state


def save(state):
    state = jax.device_get(jax.tree.map(lambda x: x[0], state))
    return state["w"]


def result():
    p_step = jax.pmap(step, "i")
    state = jax_utils.replicate({"w": jnp.ones(3)})
    batches = [np.random.default_rng(s).normal(size=(16, 3)).astype(np.float32) for s in range(3)]
    state = train_epoch(p_step, state, batches)
    return save(state), np.shape(state["w"])
