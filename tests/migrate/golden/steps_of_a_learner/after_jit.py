# A class keeps the state in a field.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Learner:
    def __init__(self, size):
        mesh = jax.sharding.Mesh(jax.devices(), ("i",))
        replicated = NamedSharding(mesh, P())
        sharded = NamedSharding(mesh, P("i"))
        self._update = jax.jit(
            self._step, in_shardings=(replicated, sharded), out_shardings=replicated
        )
        self._state = jax.device_put(
            {"w": jnp.ones(size), "n": jnp.zeros(())}, replicated
        )

    def _step(self, state, batch):
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grads, "n": state["n"] + 1}

    def update(self, batch):
        mesh = jax.sharding.Mesh(jax.devices(), ("i",))
        sharded = NamedSharding(mesh, P("i"))
        batch = jax.make_array_from_process_local_data(
            sharded, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        )
        self._state = self._update(self._state, batch)

    def params(self):
        return jax.device_get(self._state["w"])


def result():
    n = jax.local_device_count()
    learner = Learner(3)
    for seed in range(3):
        learner.update(np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32))
    return learner.params()
