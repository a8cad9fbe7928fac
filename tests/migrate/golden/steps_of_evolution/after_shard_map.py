# An evolution strategy: each device draws and scores its own part of a population.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def fitness(params):
    return -jnp.sum((params - jnp.arange(3.0)) ** 2)


def generation(params, key):
    noise = jax.random.normal(key, (4, 3))
    scores = jax.vmap(fitness)(jnp.concatenate([params + 0.1 * noise, params - 0.1 * noise]))
    ranks = jnp.argsort(jnp.argsort(jax.lax.all_gather(scores, "pop").ravel()))
    device = jax.lax.axis_index("pop")
    weights = jax.lax.dynamic_slice(ranks / ranks.size - 0.5, (8 * device,), (8,))
    gradient = jax.lax.psum((weights[:4] - weights[4:]) @ noise, "pop")
    return params + 0.05 * gradient, jax.lax.pmax(scores.max(), "pop")


def result():
    n = jax.local_device_count()
    key = jax.random.fold_in(jax.random.PRNGKey(0), jax.process_index())
    mesh = jax.sharding.Mesh(jax.devices(), ("pop",))
    sharded = NamedSharding(mesh, P("pop"))
    params = jax.device_put(jnp.zeros(3), NamedSharding(mesh, P()))

    def generation_on_device(params, key):
        return generation(params, key[0])

    p_generation = jax.jit(
        jax.shard_map(
            generation_on_device,
            mesh=mesh,
            in_specs=(P(), P("pop")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    bests = []
    for _ in range(3):
        key, subkey = jax.random.split(key)
        params, best = p_generation(
            params,
            jax.make_array_from_process_local_data(
                sharded, jax.random.split(subkey, n)
            ),
        )
        bests.append(float(best))
    return np.asarray(params), bests
