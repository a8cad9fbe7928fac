"""OpenAI ES with a shared noise table, for jit(shard_map): `es_before_pmap.py` as written today.

    python examples/es_after.py --generations 30

The numbers are the same. The table is an argument that lies on every device, so the program holds
none of it; the gradient is reduced, not gathered; and the state is whole, not stacked, and lies
where the program wants it from the first step on, so it compiles once.

Shapes: `N` parameters, `P` mirrored pairs on each of `D` devices.
"""

from collections.abc import Callable
from typing import TypeAlias

import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from es_quickstart import PARAMETERS, episode_return
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TABLE_SIZE = 16_000_000  # 64 MB
PAIRS = 8  # P
SIGMA = 0.1
OPTIMIZER = optax.adam(0.1)

State: TypeAlias = tuple[jax.Array, optax.OptState]  # theta, [N], and Adam's


def play(theta: jax.Array, table: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the noise of one pair, `[N]`, and both returns, `[2]`. The key is consumed."""
    offset_key, start_key = jax.random.split(key)
    offset = jax.random.randint(offset_key, (), 0, TABLE_SIZE - PARAMETERS)
    noise = lax.dynamic_slice(table, (offset,), (PARAMETERS,))
    members = jnp.stack([theta + SIGMA * noise, theta - SIGMA * noise])  # [2, N]
    return noise, jax.vmap(episode_return, in_axes=(0, None))(members, start_key)


def update(state: State, table: jax.Array, keys: jax.Array) -> tuple[State, jax.Array]:
    """Update on one device, with its own key, `[1, 2]`; also return the mean return."""
    theta, opt_state = state
    pair_keys = jax.random.split(keys[0], PAIRS)
    noises, returns = jax.vmap(play, in_axes=(None, None, 0))(theta, table, pair_keys)

    all_returns = lax.all_gather(returns, "i")  # [D, P, 2]: whoever ranks has to see all
    ranks = es_common.centred_ranks(all_returns.ravel()).reshape(all_returns.shape)
    ranks = ranks[lax.axis_index("i")]  # [P, 2]
    gradient = (ranks[:, 0] - ranks[:, 1]) @ noises / (2 * PAIRS * SIGMA)  # [N]
    gradient = lax.pmean(gradient, "i")

    updates, opt_state = OPTIMIZER.update(-gradient, opt_state)
    return (optax.apply_updates(theta, updates), opt_state), all_returns.mean()


def make_update(mesh: Mesh) -> Callable[..., tuple[State, jax.Array]]:
    """Return `update` on all devices; its `keys` are then `[D, 2]`."""
    sharded = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(P(), P(), P("i")),
        out_specs=P(),
        check_vma=False,  # which cannot tell that what is gathered is the same on all devices
    )
    return jax.jit(sharded, donate_argnums=0)


def make_mesh(n_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n_devices]), ("i",))


def first_arguments(seed: int, mesh: Mesh) -> tuple[State, jax.Array]:
    """Return the state and the table, whole on every device."""
    table = np.random.default_rng(seed).standard_normal(TABLE_SIZE, np.float32)
    theta = 0.1 * jax.random.normal(jax.random.PRNGKey(seed), (PARAMETERS,))
    state = theta, OPTIMIZER.init(theta)
    return jax.device_put((state, table), NamedSharding(mesh, P()))


def train(
    seed: int,
    n_devices: int,
    generations: int,
    follow: es_common.Follow,
    saved: es_common.Checkpoints,
) -> jax.Array:
    """Return theta, `[N]`."""
    mesh = make_mesh(n_devices)
    run_update = make_update(mesh)
    key = jax.random.PRNGKey(seed + 1)
    state, table = first_arguments(seed, mesh)
    state, done = saved.restore(state)
    for generation in range(done, generations):
        device_keys = jax.random.split(jax.random.fold_in(key, generation), n_devices)
        state, mean = run_update(state, table, device_keys)
        follow(generation, mean_return=float(mean))
        saved.save(generation + 1, state)
    return state[0]


def example_update(seed: int, n_devices: int) -> tuple[Callable, tuple]:
    """Return the function that does the work, with arguments: to look into it."""
    mesh = make_mesh(n_devices)
    keys = jax.random.split(jax.random.PRNGKey(0), n_devices)
    return make_update(mesh), (*first_arguments(seed, mesh), keys)


def main() -> None:
    es_common.learn(train, "CartPole-v1 with a noise table, shard_map")


if __name__ == "__main__":
    es_common.run(main, "es_after", generations=30)
