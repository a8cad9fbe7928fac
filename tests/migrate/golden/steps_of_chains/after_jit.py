# One Markov chain for each device.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def sample(key, start):
    def move(x, key):
        propose, accept = jax.random.split(key)
        y = x + 0.5 * jax.random.normal(propose)
        x = jnp.where(jnp.log(jax.random.uniform(accept)) < (x**2 - y**2) / 2, y, x)
        return x, x

    return jax.lax.scan(move, start, jax.random.split(key, 20))


def result():
    n = jax.local_device_count()
    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))
    sharded = NamedSharding(mesh, P("devices"))
    keys = jax.make_array_from_process_local_data(
        sharded, jax.random.split(jax.random.PRNGKey(0), n)
    )

    def sample_on_device(key, start):
        start = jax.tree.map(lambda x: x[0], start)
        return jax.tree.map(lambda x: x[None], sample(key[0], start))

    last, samples = jax.jit(
        jax.shard_map(
            sample_on_device,
            mesh=mesh,
            in_specs=P("devices"),
            out_specs=P("devices"),
            check_vma=False,
        )
    )(keys, jax.make_array_from_process_local_data(sharded, jnp.zeros(n)))
    return np.asarray(last), np.asarray(samples)
