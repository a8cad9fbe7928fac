"""Evolution strategies for continuous control: swing a pendulum up, and keep it there.

    python examples/es_pendulum.py --devices 8 --seed 0 --gym

Pendulum-v1, learned by what a pmap program becomes in plain JAX: one `jax.jit(jax.shard_map(...))`.
As in es_quickstart.py, the devices tell each other nothing but scores. Here the slightest rounding
matters, for a pendulum at its top falls to either side: numbers that were added in another order in
the first generation change the best score of the second by 1%. So the program shows what it takes
to have the same curve on any number of devices, to the last bit.

Shapes: `N` parameters, `P` mirrored pairs (the population is twice that), `E` episodes that each
member plays, `D` devices.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import chex
import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from es_common import centred_ranks, check_redrawable
from es_training import Generation, Result, keep, until_solved
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

_GYM = flags.DEFINE_bool(
    "gym",
    default=False,
    help="Also swing up Gymnasium's own pendulum.",
    allow_override=True,  # another program that is imported too may have it
)

PARAMETERS, PAIRS, EPISODES = 80, 128, 4  # N, P and E in the shapes below
CHUNK = 8  # so many pairs a device plays at once
SIGMA = 0.5  # how far the population spreads around theta, in every parameter
ADAM = optax.adam(0.3)
STEPS, TEST_EPISODES = 200, 100  # the first as Gymnasium registers Pendulum-v1
SOLVED = -200.0  # Gymnasium names no goal; who spins on or hangs down gets less than -1,000


def step(state: jax.Array, torque: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[2], [] -> [2], []`: 0.05 s of angle and speed, and the reward, as in Gymnasium."""
    angle, speed = state
    from_upright = (angle + np.pi) % (2 * np.pi) - np.pi
    reward = -(from_upright**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * speed, speed]), reward


def act(theta: jax.Array, state: jax.Array) -> jax.Array:
    """`[N], [2] -> []`: a torque from -2 to 2, as an MLP of 3-16-1 says.

    The mirrored state has the mirrored torque: what is learned on one side holds on the other.
    """
    weights, bias, out_weights = jnp.split(theta, [48, 64])

    def preference(state: jax.Array) -> jax.Array:
        angle, speed = state
        seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed / 4])  # [3]
        return jnp.tanh(seen @ weights.reshape(3, 16) + bias) @ out_weights

    return 2 * jnp.tanh(preference(state) - preference(-state))


def episode_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """`[N] -> []`: the sum of 200 rewards. The key is consumed."""

    def advance(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return step(state, act(theta, state))

    limits = jnp.array([np.pi, 1.0])
    start = jax.random.uniform(key, (2,), minval=-limits, maxval=limits)
    _, rewards = lax.scan(advance, start, length=STEPS)
    return rewards.sum()


def mean_return(theta: jax.Array, keys: jax.Array) -> jax.Array:
    """`[N], [e] -> []`, over one episode for each key. The keys are consumed."""
    return jax.vmap(episode_return, in_axes=(None, 0))(theta, keys).mean()


@jax.jit
def test_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """`[N] -> []`, over 100 episodes. The key is consumed."""
    return mean_return(theta, jax.random.split(key, TEST_EPISODES))


def play(theta: jax.Array, noise: jax.Array, key: jax.Array) -> jax.Array:
    """`[N], [N] -> [2]`: both members of a pair, from the same starts. The key is consumed."""
    members = jnp.stack([theta + SIGMA * noise, theta - SIGMA * noise])  # [2, N]
    return jax.vmap(mean_return, in_axes=(0, None))(members, jax.random.split(key, EPISODES))


def noise_of(key: jax.Array, pair: jax.Array) -> jax.Array:
    """`[], [] -> [N]`: a pair has the same noise on every device. The key is not consumed."""
    check_redrawable(key)
    return jax.random.normal(jax.random.fold_in(key, pair), (PARAMETERS,))


def generation(
    theta: jax.Array, adam: optax.OptState, key: jax.Array, pairs: jax.Array
) -> Generation:
    """On one device: plays its own `pairs`, `[P / D]`, and updates theta. The key is consumed."""
    noise_key, start_key = jax.random.split(key)

    def play_one(pair: jax.Array) -> jax.Array:
        return play(theta, noise_of(noise_key, pair), jax.random.fold_in(start_key, pair))

    # As many at once on 1 device as on 8: XLA rounds a product of other shapes in other places.
    own = lax.map(play_one, pairs, batch_size=CHUNK)  # [P / D, 2]
    fitness = lax.all_gather(own, "devices", tiled=True)  # [P, 2]; nothing else is ever sent

    # The whole update on each device. Sums of shares would add up in another order on each number
    # of devices.
    ranks = centred_ranks(fitness.ravel()).reshape(PAIRS, 2)
    noise = jax.vmap(noise_of, in_axes=(None, 0))(noise_key, jnp.arange(PAIRS))  # [P, N]
    gradient = (ranks[:, 0] - ranks[:, 1]) @ noise / (2 * PAIRS * SIGMA)  # [N]
    change, adam = ADAM.update(-gradient, adam)  # optax descends, and we climb
    return optax.apply_updates(theta, change), adam, fitness


@functools.cache
def make_generation(mesh: jax.sharding.Mesh) -> Callable[..., Generation]:
    """`generation` on all devices of the mesh; its `pairs` are then `[P]`."""
    return jax.jit(
        jax.shard_map(
            generation,
            mesh=mesh,
            in_specs=(P(), P(), P(), P("devices")),  # theta, Adam's state and the key: alike
            out_specs=P(),
            check_vma=False,  # what all_gather gives is alike everywhere, which it does not know
        )
    )


def train(
    seed: int,
    devices: Sequence[jax.Device],
    generations: int,
    *,
    out: pathlib.Path | None = None,
    save_every: int = 0,
) -> Result:
    """Ends when theta is seen to do it, and seen again in other episodes.

    Args:
      seed: of theta, of the noise and of all episodes.
      devices: the pairs must divide among them.
      generations: gives up after so many.
      out: keeps the curve there, and checkpoints.
      save_every: generations from one checkpoint to the next; 0: none.
    """
    chex.assert_is_divisible(PAIRS, len(devices))
    mesh = jax.sharding.Mesh(devices, ("devices",), axis_types=(AxisType.Auto,))
    theta_key, key, policy_key, fresh_key = jax.random.split(jax.random.key(seed), 4)
    theta = 0.1 * jax.random.normal(theta_key, (PARAMETERS,))
    state = jax.device_put((theta, ADAM.init(theta)), NamedSharding(mesh, P()))
    pairs = jax.device_put(np.arange(PAIRS), NamedSharding(mesh, P("devices")))
    run_generation = make_generation(mesh)

    def run(theta: jax.Array, adam: optax.OptState, number: int) -> Generation:
        return run_generation(theta, adam, jax.random.fold_in(key, number), pairs)

    return until_solved(
        state,
        run,
        test_return,
        (policy_key, fresh_key),
        SOLVED,
        generations,
        show=lambda policy, best: {"mean_return": f"{policy:.0f}"},
        out=out,
        save_every=save_every,
    )


def return_in_gymnasium(theta: np.ndarray, seed: int) -> float:
    """`[N] -> []`: the mean over 100 episodes of the game we claim to have rebuilt."""
    import gymnasium  # only here, so that the program runs without it

    games = gymnasium.make_vec("Pendulum-v1", num_envs=TEST_EPISODES, vectorization_mode="sync")
    act_in_all = jax.jit(jax.vmap(act, in_axes=(None, 0)))
    seen, _ = games.reset(seed=seed)  # [episodes, 3]: cosine and sine of the angle, and the speed
    total = np.zeros(TEST_EPISODES)
    for _ in range(STEPS):
        states = np.stack([np.arctan2(seen[:, 1], seen[:, 0]), seen[:, 2]], axis=1)
        torques = np.asarray(act_in_all(theta, states))[:, None]
        seen, rewards, _, _, _ = games.step(torques)
        total += rewards
    games.close()
    return float(total.mean())


def main(session: es_common.Session) -> None:
    start = time.perf_counter()
    result = train(
        session.seed,
        session.devices,
        session.generations,
        out=session.out,
        save_every=session.save_every,
    )
    picture = keep(
        session,
        result,
        game="Pendulum-v1",
        episodes=TEST_EPISODES,
        ylabel="return (0 is upright, still and without effort)",
        goal_label="solved: -200",
    )

    print(f"{'solved' if result.solved else 'not solved'} on {session.where}")
    print(f"generations   {result.policy.size}")
    print(f"mean return   {result.fresh:.1f} over {TEST_EPISODES} fresh episodes")
    if _GYM.value:
        in_gymnasium = return_in_gymnasium(result.theta, session.seed)
        print(f"in Gymnasium  {in_gymnasium:.1f} over {TEST_EPISODES} episodes")
    print(f"picture       {picture}")
    print(f"seconds       {time.perf_counter() - start:.1f}")


if __name__ == "__main__":
    es_common.run(main, program="es_pendulum", generations=60)
