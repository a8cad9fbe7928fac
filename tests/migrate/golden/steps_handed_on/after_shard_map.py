# Functions of the file that get the state and the mapped function, and give the state back.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def stacked(tree):
    """Return what the devices of this process hold of each array, stacked."""
    return jax.tree.map(
        lambda x: np.stack([shard.data for shard in x.addressable_shards]), tree
    )


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
    state = jax.device_get(state)
    return state["w"]


def result():
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    p_step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False
        )
    )
    state = jax.device_put({"w": jnp.ones(3)}, NamedSharding(mesh, P()))
    batches = [np.random.default_rng(s).normal(size=(16, 3)).astype(np.float32) for s in range(3)]
    state = train_epoch(p_step, state, batches)
    return save(state), np.shape(stacked(state["w"]))
