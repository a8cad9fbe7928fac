# Parts of the state go to helpers, and metrics are read one by one, as in flax lm1b and big_vision.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def train_step(state, batch):
    def loss_of(w):
        return jnp.mean((batch @ w) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["params"])
    loss, gradient = jax.lax.pmean((loss, gradient), "batch")
    params = state["params"] - 0.1 * gradient
    return {"params": params, "step": state["step"] + 1}, {"loss": loss, "norm": jnp.sum(params)}


def eval_step(params, batch):
    return jax.lax.psum(jnp.sum(batch @ params), axis_name="batch")


def evaluate(*, p_eval_step, params, batches):
    total = 0.0
    for batch in batches:
        total += float(jax_utils.unreplicate(p_eval_step(params, common_utils.shard(batch))))
    return total


def train(batches):
    state = jax_utils.replicate({"params": jnp.ones(3), "step": jnp.zeros((), int)})
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    p_eval_step = jax.pmap(functools.partial(eval_step), axis_name="batch")
    rows = []
    for batch in batches:
        state, metrics = p_train_step(state, common_utils.shard(batch))
        for name, value in metrics.items():
            rows.append((float(value[0]), len(name)))
        rows.append(evaluate(p_eval_step=p_eval_step, params=state["params"], batches=batches))
    return jax_utils.unreplicate(state), rows


def result():
    n = jax.local_device_count()
    return train([np.arange(6.0 * n).reshape(2 * n, 3) % 5 / 5] * 2)
