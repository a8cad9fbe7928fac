# An evolution strategy: each device draws and scores its own part of a population.

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


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
    params = jax_utils.replicate(jnp.zeros(3))
    p_generation = jax.pmap(generation, axis_name="pop", donate_argnums=(0,))
    bests = []
    for _ in range(3):
        key, subkey = jax.random.split(key)
        params, best = p_generation(params, jax.random.split(subkey, n))
        bests.append(float(jax_utils.unreplicate(best)))
    return np.asarray(jax_utils.unreplicate(params)), bests
