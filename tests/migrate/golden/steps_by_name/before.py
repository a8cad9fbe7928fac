import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def train_step(state, batch, config, rate=0.1, dropout_rng=None):
    def loss_of(w):
        mask = jax.random.bernoulli(dropout_rng, 1.0, batch["x"].shape)
        return jnp.mean((batch["x"] * mask) @ w * config["scale"])

    gradient = jax.lax.pmean(jax.grad(loss_of)(state["w"]), "batch")
    return {"w": state["w"] - rate * gradient}, jax.lax.pmean(jnp.sum(gradient), "batch")


def result():
    state = jax_utils.replicate({"w": jnp.zeros(3)})
    p_train_step = jax.pmap(
        functools.partial(train_step, config={"scale": 2.0}, rate=0.2),
        axis_name="batch",
        donate_argnums=(0,),
    )
    rngs = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    for _ in range(4):
        batch = common_utils.shard({"x": np.ones((16, 3), np.float32)})
        state, metrics = p_train_step(state, batch, dropout_rng=rngs)
    return jax_utils.unreplicate(state)["w"], metrics[0]
