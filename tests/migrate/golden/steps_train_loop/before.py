# A trainer: the state is replicated once, batches are sharded, metrics unreplicated.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def train_step(state, batch, rate):
    def loss_of(w):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    gradient = jax.lax.pmean(gradient, axis_name="batch")
    loss = jax.lax.pmean(loss, axis_name="batch")
    return {"w": state["w"] - rate * gradient}, {"loss": loss}


def eval_step(state, batch):
    loss = jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2)
    return jax.lax.pmean({"loss": loss}, "batch")


def result():
    rng = np.random.default_rng(0)
    state = jax_utils.replicate({"w": jnp.zeros(3)})
    p_train_step = jax.pmap(
        functools.partial(train_step, rate=0.1), axis_name="batch", donate_argnums=(0,)
    )
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    metrics_of_steps = []
    for _ in range(3):
        x = rng.normal(size=(16, 3)).astype(np.float32)
        batch = common_utils.shard({"x": x, "y": x.sum(1)})
        state, metrics = p_train_step(state, batch)
        metrics_of_steps.append(metrics)
    evaluated = jax_utils.unreplicate(p_eval_step(state, batch))
    losses = common_utils.get_metrics(metrics_of_steps)
    return np.asarray(jax_utils.unreplicate(state)["w"]), losses, float(evaluated["loss"])
