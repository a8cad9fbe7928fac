"""OpenAI ES with a shared noise table, as it was written for jax.pmap: the one to migrate.

    python examples/es_before_pmap.py --generations 30

The noise is not drawn but read from a table of 64 MB, at random offsets (Salimans et al., arXiv
1703.03864). The program is right, and still runs. What is wrong with it, `jax-dist lint` says, and
`examples/demo.py` shows; `es_after.py` is the same algorithm with the same numbers, written today.
"""

import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from es_quickstart import PARAMETERS, episode_return
from jax import lax

TABLE_SIZE = 16_000_000  # 64 MB
PAIRS = 8  # on each device
SIGMA = 0.1
OPTIMIZER = optax.adam(0.1)


def make_update(seed):
    noise_table = jnp.asarray(np.random.default_rng(seed).standard_normal(TABLE_SIZE, np.float32))

    def update(theta, opt_state, key):
        def play_pair(pair_key):
            offset_key, start_key = jax.random.split(pair_key)
            offset = jax.random.randint(offset_key, (), 0, TABLE_SIZE - PARAMETERS)
            noise = lax.dynamic_slice(noise_table, (offset,), (PARAMETERS,))
            plus = episode_return(theta + SIGMA * noise, start_key)
            minus = episode_return(theta - SIGMA * noise, start_key)
            return noise, jnp.stack([plus, minus])

        noises, returns = jax.vmap(play_pair)(jax.random.split(key, PAIRS))

        all_returns = lax.all_gather(returns, "i")  # [devices, pairs, 2]
        ranks = es_common.centred_ranks(all_returns.ravel()).reshape(all_returns.shape)
        ranks = ranks[lax.axis_index("i")]
        gradient = (ranks[:, 0] - ranks[:, 1]) @ noises / (2 * PAIRS * SIGMA)
        gradient = jnp.mean(lax.all_gather(gradient, "i"), axis=0)

        updates, opt_state = OPTIMIZER.update(-gradient, opt_state)
        return optax.apply_updates(theta, updates), opt_state, all_returns.mean()

    return jax.jit(jax.pmap(update, axis_name="i", donate_argnums=(0, 1)))


def first_state(seed, n_devices):
    theta = 0.1 * jax.random.normal(jax.random.PRNGKey(seed), (PARAMETERS,))
    opt_state = OPTIMIZER.init(theta)
    theta = jnp.stack([theta] * n_devices)
    opt_state = jax.tree.map(lambda x: jnp.stack([x] * n_devices), opt_state)
    return theta, opt_state


def train(seed, n_devices, generations, follow, saved):
    p_update = make_update(seed)
    key = jax.random.PRNGKey(seed + 1)
    (theta, opt_state), done = saved.restore(first_state(seed, n_devices))
    for generation in range(done, generations):
        device_keys = jax.random.split(jax.random.fold_in(key, generation), n_devices)
        theta, opt_state, mean = p_update(theta, opt_state, device_keys)
        follow(generation, mean_return=float(mean[0]))
        saved.save(generation + 1, (theta, opt_state))
    return theta[0]


def example_update(seed, n_devices):
    theta, opt_state = first_state(seed, n_devices)
    return make_update(seed), (theta, opt_state, jax.random.split(jax.random.PRNGKey(0), n_devices))


def main():
    es_common.learn(train, "CartPole-v1 with a noise table, pmap")


if __name__ == "__main__":
    es_common.run(main, "es_before_pmap", generations=30)
