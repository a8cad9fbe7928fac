# Decorators with static arguments, as AlgoPerf's submissions have them.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Workload:
    power = 2

    def loss_fn(self, w, batch, targets):
        return jnp.mean((batch @ w - targets) ** self.power)


mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
replicated = NamedSharding(mesh, P())
sharded = NamedSharding(mesh, P("batch"))


# The devices share the parameters.
@functools.partial(
    jax.jit,
    in_shardings=(replicated, sharded, sharded, replicated),
    out_shardings=replicated,
    static_argnums=(0, 1),
    donate_argnums=(2,),
)
def pmapped_train_step(workload, opt_update_fn, params, batch, targets, rate):
    """Take one step."""

    def loss_fn(w):
        return workload.loss_fn(w, batch, targets)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return opt_update_fn(params, grads, rate), loss


@functools.partial(
    jax.jit,
    in_shardings=(replicated, sharded),
    out_shardings=replicated,
    static_argnums=(0,),
)
def pmapped_eval_step(workload, params, batch):
    return workload.loss_fn(params, batch, 0.0)


def sgd(params, grads, rate):
    return params - rate * grads


def result():
    workload = Workload()
    first = params = jax.device_put(jnp.ones(3), replicated)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        batch = rng.normal(size=(8, 2, 3)).astype(np.float32)
        targets = rng.normal(size=(8, 2)).astype(np.float32)
        targets = jax.make_array_from_process_local_data(
            sharded, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), targets)
        )
        params, loss = pmapped_train_step(
            workload,
            sgd,
            params,
            jax.make_array_from_process_local_data(
                sharded, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
            ),
            targets,
            0.1,
        )
    last = pmapped_eval_step(
        workload,
        params,
        jax.make_array_from_process_local_data(sharded, batch.reshape(16, 3)),
    )
    return np.asarray(loss), np.asarray(last), first.is_deleted()
