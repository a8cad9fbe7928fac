# A trainer: the state is replicated once, batches are sharded, metrics unreplicated.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax.training import common_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


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
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put({"w": jnp.zeros(3)}, NamedSharding(mesh, P()))
    p_train_step = jax.jit(
        jax.shard_map(
            functools.partial(train_step, rate=0.1),
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    p_eval_step = jax.jit(
        jax.shard_map(
            eval_step,
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        )
    )
    metrics_of_steps = []
    for _ in range(3):
        x = rng.normal(size=(16, 3)).astype(np.float32)
        batch = jax.make_array_from_process_local_data(sharded, {"x": x, "y": x.sum(1)})
        state, metrics = p_train_step(state, batch)
        metrics_of_steps.append(metrics)
    evaluated = p_eval_step(state, batch)
    losses = common_utils.stack_forest(jax.device_get(metrics_of_steps))
    return np.asarray(state["w"]), losses, float(evaluated["loss"])
