"""Evolution strategies on several devices that tell each other nothing but scores.

    python examples/es_quickstart.py --devices 8 --seed 0 --gym

Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning"
(arXiv 1703.03864), learns CartPole-v1. Each device plays its share of the population, the 256
scores are gathered, and then every device makes the same update for itself: it can draw anyone's
noise again, because noise is a function of the generation's key and of the number of the pair.

Shapes: `N` parameters, `P` mirrored pairs (the population is twice that), `D` devices.
"""

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from es_common import FLAGS, centred_ranks, check_redrawable, keys_of
from jax import lax

import jax_dist

# Another program that is imported too may have flags of these names.
flags.DEFINE_integer("pairs", 128, "Half of the population.", allow_override=True)
flags.DEFINE_bool("gym", default=False, help="Also play Gymnasium's.", allow_override=True)

PARAMETERS = 114  # N
SIGMA = 0.1  # how far the population spreads around theta, in every parameter
ADAM = optax.adam(0.1)
STEPS, EPISODES, SOLVED = 500, 100, 475.0  # as Gymnasium registers CartPole-v1

Episode: TypeAlias = tuple[jax.Array, jax.Array]  # state, [4], and steps so far, []
Generation: TypeAlias = tuple[optax.Params, optax.OptState, jax.Array]  # theta, Adam, [P, 2] scores


class Result(NamedTuple):
    """A trained policy and its learning curve."""

    theta: np.ndarray  # [N]
    curve: es_common.Curve  # best and mean of the population, and the policy's own mean return
    fresh: float  # mean return of the last theta over other episodes
    left: bool = False  # it was told to leave

    @property
    def solved(self) -> bool:
        """Return whether theta balances, in the last episodes and in fresh ones."""
        return bool(self.curve["policy"][-1] >= SOLVED) and self.fresh >= SOLVED


def step(state: jax.Array, action: jax.Array) -> jax.Array:
    """Return `[4], [] -> [4]`: 0.02 s, with Gymnasium's constants and Euler's method."""
    _, speed, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    spin_rate = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speed_rate = push - 0.05 * spin_rate * cos / 1.1
    return state + 0.02 * jnp.stack([speed, speed_rate, spin, spin_rate])


def fallen(state: jax.Array) -> jax.Array:
    """Return whether the cart left the track, or the pole leans more than 12 degrees."""
    return (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > np.deg2rad(12))


def act(theta: jax.Array, state: jax.Array) -> jax.Array:
    """Return `[N], [4] -> []`: 0 pushes left and 1 right, as an MLP of 4-16-2 prefers."""
    weights, bias, out_weights, out_bias = jnp.split(theta, [64, 80, 112])
    hidden = jnp.tanh(state @ weights.reshape(4, 16) + bias)  # [16]
    return jnp.argmax(hidden @ out_weights.reshape(16, 2) + out_bias)


def episode_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """Return `[N] -> []`: the steps survived, the last one included. The key is consumed."""

    def goes_on(episode: Episode) -> jax.Array:
        state, steps = episode
        return ~fallen(state) & (steps < STEPS)

    def advance(episode: Episode) -> Episode:
        state, steps = episode
        return step(state, act(theta, state)), steps + 1

    start = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    _, steps = lax.while_loop(goes_on, advance, (start, jnp.int32(0)))
    return steps.astype(jnp.float32)


@jax.jit
def mean_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """Return `[N] -> []`, over 100 episodes. The key is consumed."""
    keys = jax.random.split(key, EPISODES)
    return jax.vmap(episode_return, in_axes=(None, 0))(theta, keys).mean()


def noise_of(key: jax.Array, pairs: jax.Array) -> jax.Array:
    """Return `[p] -> [p, N]`: a pair has the same row in any batch. The key is not consumed."""
    check_redrawable(key)
    return jax.vmap(lambda row: jax.random.normal(row, (PARAMETERS,)))(keys_of(key, pairs))


def play(theta: jax.Array, noise: jax.Array, key: jax.Array) -> jax.Array:
    """Return `[N], [N] -> [2]`: both of a pair, from the same start. The key is consumed."""
    members = jnp.stack([theta + SIGMA * noise, theta - SIGMA * noise])  # [2, N]
    return jax.vmap(episode_return, in_axes=(0, None))(members, key)


def generation(
    theta: jax.Array, adam: optax.OptState, key: jax.Array, pairs: jax.Array
) -> Generation:
    """Play the `pairs` of one device, `[P / D]`, and update theta. The key is consumed."""
    noise_key, start_key = jax.random.split(key)
    own_noise = noise_of(noise_key, pairs)  # [P / D, N]
    local_returns = jax.vmap(play, in_axes=(None, 0, 0))(
        theta, own_noise, keys_of(start_key, pairs)
    )
    # Nothing else is ever sent.
    fitness = lax.all_gather(local_returns, "devices", tiled=True)  # [P, 2]

    ranks = centred_ranks(fitness.ravel()).reshape(fitness.shape)
    noise = noise_of(noise_key, jnp.arange(len(fitness)))  # [P, N]
    gradient = (ranks[:, 0] - ranks[:, 1]) @ noise / (fitness.size * SIGMA)  # [N]
    change, adam = ADAM.update(-gradient, adam)  # optax descends, and we climb
    return optax.apply_updates(theta, change), adam, fitness


def make_generation(devices: Sequence[jax.Device]) -> Callable[..., Generation]:
    """Return `generation` on all devices; its `pairs` are then `[D, P / D]`."""
    return jax_dist.pmap(
        generation,
        axis_name="devices",
        in_axes=(None, None, None, 0),  # theta, Adam's state and the key are the same everywhere
        out_axes=None,
        devices=devices,
        arrays="global",  # the state stays where it is, also in several processes
    )


def first_arguments(seed: int, pairs: int, devices: Sequence[jax.Device]) -> tuple:
    """Return theta, Adam's state, and the pairs of the devices of this process."""
    chex.assert_is_divisible(pairs, len(devices))
    theta = 0.1 * jax.random.normal(jax.random.split(jax.random.key(seed), 4)[0], (PARAMETERS,))
    state = jax.tree.map(np.asarray, (theta, ADAM.init(theta)))
    here = [device.process_index == jax.process_index() for device in devices]
    return *jax_dist.replicate(state, devices), np.arange(pairs).reshape(len(devices), -1)[here]


def train(
    seed: int,
    devices: Sequence[jax.Device],
    generations: int,
    *,
    pairs: int = 128,
    out: pathlib.Path | None = None,
    save_every: int = 0,
    keep: int = 2,
    leave: Callable[[int], bool] = lambda done: False,
) -> Result:
    """Train until theta balances, and balances again in other episodes, or until told to leave."""
    _, key, policy_key, fresh_key = jax.random.split(jax.random.key(seed), 4)
    theta, adam, rows = first_arguments(seed, pairs, devices)
    run_generation, fresh, left = make_generation(devices), 0.0, False
    with es_common.checkpoints(out, save_every, keep) as saved:
        (theta, adam), done = saved.restore((theta, adam))
        curve = es_common.Curve(None if jax.process_index() else out, generations, done)
        for number in range(done, generations):
            generation_key = jax.random.fold_in(key, number)
            theta, adam, fitness = run_generation(theta, adam, generation_key, rows)
            on_host = np.asarray(theta)  # [N]; as it is, all devices would evaluate it
            policy = float(mean_return(on_host, jax.random.fold_in(policy_key, number)))
            curve(number, best=fitness.max(), mean=fitness.mean(), policy=policy)
            left = leave(number + 1)
            saved.save(number + 1, (theta, adam), force=left)
            if policy >= SOLVED or number + 1 == generations:
                fresh = float(mean_return(on_host, jax.random.fold_in(fresh_key, number)))
            if left or fresh >= SOLVED:
                break
    return Result(np.asarray(theta), curve, fresh, left)


def return_in_gymnasium(theta: np.ndarray, seed: int) -> float:
    """Return `[N] -> []`: the mean over 100 episodes of the game that we rebuilt."""
    import gymnasium  # only here, so that the program runs without it

    games = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="sync")
    act_in_all = jax.jit(jax.vmap(act, in_axes=(None, 0)))
    states, _ = games.reset(seed=seed)  # [episodes, 4]
    running, steps = np.ones(EPISODES, bool), np.zeros(EPISODES)
    while running.any():
        states, rewards, fell, out_of_time, _ = games.step(np.asarray(act_in_all(theta, states)))
        steps += running * rewards  # a game that is over starts again, and no longer counts
        running &= ~(fell | out_of_time)
    games.close()
    return float(steps.mean())


def main() -> None:
    start, out = time.perf_counter(), es_common.prepare()
    devices, options = es_common.devices(), {"pairs": FLAGS.pairs, "save_every": FLAGS.save_every}
    result = train(FLAGS.seed, devices, FLAGS.generations, out=out, **options)
    chex.assert_tree_all_finite(result.theta)
    np.savez(out / "policy.npz", theta=result.theta)
    report(result, out, f"{len(devices)} x {devices[0].device_kind}")
    if FLAGS.gym:
        score = return_in_gymnasium(result.theta, FLAGS.seed)
        print(f"in Gymnasium  {score:.1f} over {EPISODES} episodes")
    print(f"seconds       {time.perf_counter() - start:.1f}")


def report(result: Result, out: pathlib.Path, where: str) -> None:
    """Draw the curves and print how the training ended."""
    lines = {
        "best of the population": result.curve["best"],
        "mean of the population": result.curve["mean"],
        f"theta, mean of {EPISODES} episodes": result.curve["policy"],
    }
    title = f"OpenAI ES on CartPole-v1, seed {FLAGS.seed}, {where}"
    picture = es_common.draw_curves(out, lines, title, goal=SOLVED)
    if result.left:
        print(f"told to leave after generation {len(result.curve)}; start it again to go on")
    else:
        print(f"{'solved' if result.solved else 'not solved'} on {where}")
    print(f"generations   {len(result.curve)}")
    if not result.left:
        print(f"mean return   {result.fresh:.1f} over {EPISODES} fresh episodes")
    print(f"picture       {picture}")


if __name__ == "__main__":
    es_common.run(main, "es_quickstart", generations=60)
