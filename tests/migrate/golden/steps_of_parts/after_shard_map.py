# Parts of the state go to helpers, and metrics are read one by one, as in flax lm1b and big_vision.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


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
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    for batch in batches:
        total += float(p_eval_step(
            params, jax.make_array_from_process_local_data(sharded, batch)
        ))
    return total


def train(batches):
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put(
        {"params": jnp.ones(3), "step": jnp.zeros((), int)}, NamedSharding(mesh, P())
    )
    p_train_step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    p_eval_step = jax.jit(
        jax.shard_map(
            functools.partial(eval_step),
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        )
    )
    rows = []
    for batch in batches:
        state, metrics = p_train_step(
            state, jax.make_array_from_process_local_data(sharded, batch)
        )
        for name, value in metrics.items():
            rows.append((float(value), len(name)))
        rows.append(evaluate(p_eval_step=p_eval_step, params=state["params"], batches=batches))
    return state, rows


def result():
    n = jax.local_device_count()
    return train([np.arange(6.0 * n).reshape(2 * n, 3) % 5 / 5] * 2)
