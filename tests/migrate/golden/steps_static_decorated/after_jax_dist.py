# Decorators with static arguments, as AlgoPerf's submissions have them.

import functools

import jax
import jax.numpy as jnp
import jax_dist
import numpy as np
from flax import jax_utils
from flax.training import common_utils


class Workload:
    power = 2

    def loss_fn(self, w, batch):
        return jnp.mean((batch @ w) ** self.power)


@functools.partial(
    jax_dist.pmap,
    axis_name="batch",
    in_axes=(None, None, 0, 0, None),
    static_broadcasted_argnums=(0, 1),
    donate_argnums=(2,),
)
def pmapped_train_step(workload, opt_update_fn, params, batch, rate):
    loss, grads = jax.value_and_grad(lambda w: workload.loss_fn(w, batch))(params)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return opt_update_fn(params, grads, rate), loss


@functools.partial(jax_dist.pmap, axis_name="batch", static_broadcasted_argnums=0)
def pmapped_eval_step(workload, params, batch):
    return jax.lax.pmean(workload.loss_fn(params, batch), axis_name="batch")


def sgd(params, grads, rate):
    return params - rate * grads


def result():
    workload = Workload()
    params = jax_utils.replicate(jnp.ones(3))
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(16, 3)).astype(np.float32)
        batch = common_utils.shard(x)
        params, loss = pmapped_train_step(workload, sgd, params, batch, 0.1)
    last = pmapped_eval_step(workload, params, batch)
    return np.asarray(loss[0]), np.asarray(jax_utils.unreplicate(last))
