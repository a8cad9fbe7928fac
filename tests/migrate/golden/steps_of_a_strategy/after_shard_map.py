# An evolution strategy: each device scores its own mutations of the same parameters.

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


mesh = jax.sharding.Mesh(jax.devices(), ("pop",))
sharded = NamedSharding(mesh, P("pop"))


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("pop")),
    out_specs=(P(), P("pop")),
    check_vma=False,
)
def evaluate(theta, key):
    key = key[0]  # of this device
    noise = jax.random.normal(key, (4, 3))
    scores = -jnp.sum((theta + 0.1 * noise - 1.0) ** 2, axis=-1)
    return jax.lax.pmean(jnp.mean(scores[:, None] * noise, axis=0), "pop"), jax.tree.map(
        lambda x: x[None], jnp.max(scores)
    )


def result():
    theta, key = jnp.zeros(3), jax.random.PRNGKey(0)
    best = []
    for _ in range(3):
        key, subkey = jax.random.split(key)
        gradient, scores = evaluate(
            theta,
            jax.make_array_from_process_local_data(
                sharded, jax.random.split(subkey, jax.local_device_count())
            ),
        )
        theta = theta + 0.5 * np.asarray(gradient)
        best.append(float(jnp.max(scores)))
    return np.asarray(theta), best
