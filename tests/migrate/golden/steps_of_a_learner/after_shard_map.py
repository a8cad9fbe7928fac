# A class keeps the state in a field.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


class Learner:
    def __init__(self, size):
        mesh = jax.sharding.Mesh(jax.devices(), ("i",))

        def _step_on_device(state, batch):
            batch = jax.tree.map(lambda x: x[0], batch)
            return self._step(state, batch)

        self._update = jax.jit(
            jax.shard_map(
                _step_on_device,
                mesh=mesh,
                in_specs=(P(), P("i")),
                out_specs=P(),
                check_vma=False,
            )
        )
        self._state = jax.device_put(
            {"w": jnp.ones(size), "n": jnp.zeros(())}, NamedSharding(mesh, P())
        )

    def _step(self, state, batch):
        grads = jax.lax.pmean(jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"]), "i")
        return {"w": state["w"] - 0.1 * grads, "n": state["n"] + 1}

    def update(self, batch):
        mesh = jax.sharding.Mesh(jax.devices(), ("i",))
        sharded = NamedSharding(mesh, P("i"))
        batch = jax.make_array_from_process_local_data(sharded, batch)
        self._state = self._update(self._state, batch)

    def params(self):
        return jax.device_get(self._state["w"])


def result():
    n = jax.local_device_count()
    learner = Learner(3)
    for seed in range(3):
        learner.update(np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32))
    return learner.params()
