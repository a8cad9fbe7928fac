# The mapped function takes the name of its own function, as in learners of Anakin; and a partial
# holds a value of the name that a parameter has.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def decay(rate, state):
    return {"w": state["w"] * rate}


def result():
    def learn(state):
        return {"w": state["w"] - 0.1 * jax.lax.pmean(state["w"], "device")}

    mesh = jax.sharding.Mesh(jax.devices(), ("device",))
    sharded = NamedSharding(mesh, P("device"))
    learn_per_device = learn

    def learn_on_device(state):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], learn_per_device(state))

    learn = jax.jit(
        jax.shard_map(
            learn_on_device,
            mesh=mesh,
            in_specs=P("device"),
            out_specs=P("device"),
            check_vma=False,
        )
    )
    rate = 0.5

    def decay_on_device(state):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], decay(rate, state))

    shrink = jax.jit(
        jax.shard_map(
            decay_on_device,
            mesh=mesh,
            in_specs=P("device"),
            out_specs=P("device"),
            check_vma=False,
        )
    )
    state = {"w": jnp.asarray(np.arange(16, dtype=np.float32).reshape(8, 2))}
    for _ in range(3):
        learned = learn(jax.make_array_from_process_local_data(sharded, state))
        state = jax.device_get(shrink(learned))
    return state["w"]
