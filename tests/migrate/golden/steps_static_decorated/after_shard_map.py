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
sharded = NamedSharding(mesh, P("batch"))


# The devices share the parameters.
@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2,))
def pmapped_train_step(workload, opt_update_fn, *arrays):
    return jax.shard_map(
        functools.partial(_pmapped_train_step, workload, opt_update_fn),
        mesh=mesh,
        in_specs=(P(), P("batch"), P("batch"), P()),
        out_specs=P(),
        check_vma=False,
    )(*arrays)


def _pmapped_train_step(workload, opt_update_fn, params, batch, targets, rate):
    """Take one step."""

    batch, targets = jax.tree.map(lambda x: x[0], (batch, targets))  # of this device

    def loss_fn(w):
        return workload.loss_fn(w, batch, targets)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    loss, grads = jax.lax.pmean((loss, grads), axis_name="batch")
    return opt_update_fn(params, grads, rate), loss


@functools.partial(jax.jit, static_argnums=(0,))
def pmapped_eval_step(workload, *arrays):
    return jax.shard_map(
        functools.partial(_pmapped_eval_step, workload),
        mesh=mesh,
        in_specs=(P(), P("batch")),
        out_specs=P(),
        check_vma=False,
    )(*arrays)


def _pmapped_eval_step(workload, params, batch):
    return jax.lax.pmean(workload.loss_fn(params, batch, 0.0), axis_name="batch")


def sgd(params, grads, rate):
    return params - rate * grads


def result():
    workload = Workload()
    first = params = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        batch = rng.normal(size=(8, 2, 3)).astype(np.float32)
        targets = jax.make_array_from_process_local_data(
            sharded, rng.normal(size=(8, 2)).astype(np.float32)
        )
        params, loss = pmapped_train_step(
            workload,
            sgd,
            params,
            jax.make_array_from_process_local_data(sharded, batch),
            targets,
            0.1,
        )
    last = pmapped_eval_step(
        workload,
        params,
        jax.make_array_from_process_local_data(sharded, batch.reshape(16, 3)),
    )
    return np.asarray(loss), np.asarray(last), first.is_deleted()
