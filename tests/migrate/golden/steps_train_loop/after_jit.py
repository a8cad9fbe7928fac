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
    return {"w": state["w"] - rate * gradient}, {"loss": loss}


def eval_step(state, batch):
    loss = jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2)
    return {"loss": loss}


def result():
    rng = np.random.default_rng(0)
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    replicated = NamedSharding(mesh, P())
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put({"w": jnp.zeros(3)}, replicated)
    p_train_step = jax.jit(
        functools.partial(train_step, rate=0.1),
        in_shardings=(replicated, sharded),
        out_shardings=replicated,
        donate_argnums=(0,),
    )
    p_eval_step = jax.jit(
        eval_step, in_shardings=(replicated, sharded), out_shardings=replicated
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
