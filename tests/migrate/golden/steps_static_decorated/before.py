# Decorators with static arguments, as AlgoPerf's submissions have them.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


class Workload:
    power = 2

    def loss_fn(self, w, batch, targets):
        return jnp.mean((batch @ w - targets) ** self.power)


# The devices share the parameters.
@functools.partial(
    jax.pmap,
    axis_name="batch",
    in_axes=(None, None, 0, 0, 0, None),
    static_broadcasted_argnums=(0, 1),
    donate_argnums=(2,),
)
def pmapped_train_step(workload, opt_update_fn, params, batch, targets, rate):
    """Take one step."""

    def loss_fn(w):
        return workload.loss_fn(w, batch, targets)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return opt_update_fn(params, grads, rate), loss


@functools.partial(jax.pmap, axis_name="batch", static_broadcasted_argnums=0)
def pmapped_eval_step(workload, params, batch):
    return jax.lax.pmean(workload.loss_fn(params, batch, 0.0), axis_name="batch")


def sgd(params, grads, rate):
    return params - rate * grads


def result():
    workload = Workload()
    first = params = jax_utils.replicate(jnp.ones(3))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        batch = rng.normal(size=(8, 2, 3)).astype(np.float32)
        targets = rng.normal(size=(8, 2)).astype(np.float32)
        params, loss = pmapped_train_step(workload, sgd, params, batch, targets, 0.1)
    last = pmapped_eval_step(workload, params, common_utils.shard(batch.reshape(16, 3)))
    return np.asarray(loss[0]), np.asarray(jax_utils.unreplicate(last)), first.is_deleted()
