# One Markov chain for each device.

import jax
import jax.numpy as jnp
import numpy as np


def sample(key, start):
    def move(x, key):
        propose, accept = jax.random.split(key)
        y = x + 0.5 * jax.random.normal(propose)
        x = jnp.where(jnp.log(jax.random.uniform(accept)) < (x**2 - y**2) / 2, y, x)
        return x, x

    return jax.lax.scan(move, start, jax.random.split(key, 20))


def result():
    n = jax.local_device_count()
    keys = jax.random.split(jax.random.PRNGKey(0), n)
    last, samples = jax.pmap(sample)(keys, jnp.zeros(n))
    return np.asarray(last), np.asarray(samples)
