# Functions of the file that get the state and the mapped function, and give the state back.

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * jax.lax.pmean(grads, "i")}


def train_epoch(p_step, state, batches):
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    sharded = NamedSharding(mesh, P("i"))
    for batch in batches:
        state = p_step(state, jax.make_array_from_process_local_data(sharded, batch))
    return state


def save(state):
    state = jax.device_get(jax.tree.map(lambda x: x[0], state))
    return state["w"]


def result():
    def step_on_device(state, batch):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], step(state, batch))

    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    p_step = jax.jit(
        jax.shard_map(
            step_on_device,
            mesh=mesh,
            in_specs=P("i"),
            out_specs=P("i"),
            check_vma=False,
        ),
    )
    state = jax_utils.replicate({"w": jnp.ones(3)})
    batches = [np.random.default_rng(s).normal(size=(16, 3)).astype(np.float32) for s in range(3)]
    state = train_epoch(p_step, state, batches)
    return save(state), np.shape(state["w"])
