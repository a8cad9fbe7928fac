"""Evolution strategies on several devices that tell each other nothing but scores.

    python examples/es_quickstart.py --devices 8 --seed 0 --gym

Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement Learning"
(arXiv 1703.03864), learns CartPole-v1. Each device plays its share of the population, the 256
scores are gathered, and then every device makes the same update for itself: it can draw anyone's
noise again, because noise is a function of the generation's key and of the number of the pair.

Shapes: `N` parameters, `P` mirrored pairs (the population is twice that), `D` devices.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from absl import app, flags, logging
from jax import lax
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import jax_dist

_DEVICES = flags.DEFINE_integer(
    "devices", 8, "Devices to use, at most; on a CPU, how many to simulate.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything random.")
_GENERATIONS = flags.DEFINE_integer("generations", 60, "Give up after so many.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "out/es_quickstart", "Folder for the picture and the policy.")
_GYM = flags.DEFINE_bool("gym", default=False, help="Also play Gymnasium's own CartPole.")

PARAMETERS, PAIRS = 114, 128  # N and P in the shapes below
SIGMA = 0.1  # how far the population spreads around theta, in every parameter
ADAM = optax.adam(0.1)
STEPS, EPISODES, SOLVED = 500, 100, 475.0  # as Gymnasium registers CartPole-v1


@dataclasses.dataclass(frozen=True)
class Result:
    theta: np.ndarray  # [N]
    best: np.ndarray  # [generations], of the population's returns
    mean: np.ndarray  # [generations], of the population's returns
    policy: np.ndarray  # [generations], mean return of theta itself over 100 episodes
    fresh: float  # mean return of the last theta over 100 more episodes

    @property
    def solved(self) -> bool:
        return bool(self.policy[-1] >= SOLVED) and self.fresh >= SOLVED


Generation: TypeAlias = tuple[optax.Params, optax.OptState, jax.Array]  # theta, Adam, [P, 2] scores
Episode: TypeAlias = tuple[jax.Array, jax.Array]  # state, [4], and steps so far, []


def step(state: jax.Array, action: jax.Array) -> jax.Array:
    """`[4], [] -> [4]`: 0.02 s of cart and pole, with Gymnasium's constants and Euler's method."""
    _, speed, angle, spin = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    spin_rate = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speed_rate = push - 0.05 * spin_rate * cos / 1.1
    return state + 0.02 * jnp.stack([speed, speed_rate, spin, spin_rate])


def fallen(state: jax.Array) -> jax.Array:
    """`[4] -> []`: the cart left the track, or the pole leans more than 12 degrees."""
    return (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > np.deg2rad(12))


def act(theta: jax.Array, state: jax.Array) -> jax.Array:
    """`[N], [4] -> []`: 0 pushes left and 1 right, as an MLP of 4-16-2 prefers."""
    weights, bias, out_weights, out_bias = jnp.split(theta, [64, 80, 112])
    hidden = jnp.tanh(state @ weights.reshape(4, 16) + bias)  # [16]
    return jnp.argmax(hidden @ out_weights.reshape(16, 2) + out_bias)


def episode_return(theta: jax.Array, key: jax.Array) -> jax.Array:
    """`[N] -> []`: the steps survived, the last one included. The key is consumed."""

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
    """`[N] -> []`, over 100 episodes. The key is consumed."""
    keys = jax.random.split(key, EPISODES)
    return jax.vmap(episode_return, in_axes=(None, 0))(theta, keys).mean()


def keys_of(key: jax.Array, pairs: jax.Array) -> jax.Array:
    """`[], [p] -> [p]`: a pair has the same key on every device. The key is not consumed."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, pairs)


def noise_of(key: jax.Array, pairs: jax.Array) -> jax.Array:
    """`[], [p] -> [p, N]`: a pair has the same row in any batch. The key is not consumed."""
    implementation = jax.random.key_impl(key)
    if implementation != "threefry2x32":
        raise ValueError(
            f"noise cannot be drawn twice from a key of the implementation {implementation!r}.\n"
            "Because its rows depend on the size of the batch they are drawn in, so the noise that"
            " each device draws again would not be the noise that was played.\n"
            'Use jax.config.update("jax_default_prng_impl", "threefry2x32"), or'
            ' jax.random.key(seed, impl="threefry2x32").'
        )
    return jax.vmap(lambda row: jax.random.normal(row, (PARAMETERS,)))(keys_of(key, pairs))


def centred_ranks(fitness: jax.Array) -> jax.Array:
    """`[p] -> [p]`, from -0.5, the worst, to 0.5; equals share the average of their ranks."""
    # Most scores end up as 500. To rank those by their position would be to follow noise.
    ascending = jnp.sort(fitness)
    first = jnp.searchsorted(ascending, fitness, side="left")
    after_last = jnp.searchsorted(ascending, fitness, side="right")
    return (first + after_last - 1) / (2 * (fitness.size - 1)) - 0.5


def play(theta: jax.Array, noise: jax.Array, key: jax.Array) -> jax.Array:
    """`[N], [N] -> [2]`: both members of a pair, from the same start. The key is consumed."""
    members = jnp.stack([theta + SIGMA * noise, theta - SIGMA * noise])  # [2, N]
    return jax.vmap(episode_return, in_axes=(0, None))(members, key)


def generation(
    theta: jax.Array, adam: optax.OptState, key: jax.Array, pairs: jax.Array
) -> Generation:
    """On one device: plays its own `pairs`, `[P / D]`, and updates theta. The key is consumed."""
    noise_key, start_key = jax.random.split(key)
    own_noise = noise_of(noise_key, pairs)  # [P / D, N]
    own = jax.vmap(play, in_axes=(None, 0, 0))(theta, own_noise, keys_of(start_key, pairs))
    fitness = lax.all_gather(own, "devices", tiled=True)  # [P, 2]; nothing else is ever sent

    ranks = centred_ranks(fitness.ravel()).reshape(PAIRS, 2)
    noise = noise_of(noise_key, jnp.arange(PAIRS))  # [P, N]
    gradient = (ranks[:, 0] - ranks[:, 1]) @ noise / (2 * PAIRS * SIGMA)  # [N]
    change, adam = ADAM.update(-gradient, adam)  # optax descends, and we climb
    return optax.apply_updates(theta, change), adam, fitness


def make_generation(devices: Sequence[jax.Device]) -> Callable[..., Generation]:
    """`generation` on all devices; its `pairs` are then `[D, P / D]`."""
    return jax_dist.pmap(
        generation,
        axis_name="devices",
        in_axes=(None, None, None, 0),  # theta, Adam's state and the key are the same everywhere
        out_axes=None,
        devices=devices,
    )


def train(seed: int, devices: Sequence[jax.Device], generations: int) -> Result:
    """Ends when theta is seen to balance, and seen again in other episodes."""
    chex.assert_is_divisible(PAIRS, len(devices))
    theta_key, key, policy_key, fresh_key = jax.random.split(jax.random.key(seed), 4)
    theta = 0.1 * jax.random.normal(theta_key, (PARAMETERS,))
    theta, adam = jax_dist.replicate((theta, ADAM.init(theta)), devices)
    pairs = np.arange(PAIRS).reshape(len(devices), -1)  # [D, P / D]
    run_generation = make_generation(devices)
    best, mean, policy, fresh = [], [], [], 0.0
    for number in (progress := tqdm.trange(generations, desc="generation")):
        theta, adam, fitness = run_generation(theta, adam, jax.random.fold_in(key, number), pairs)
        on_host = np.asarray(theta)  # [N]; as it is, theta would be evaluated on all devices
        best.append(float(fitness.max()))
        mean.append(float(fitness.mean()))
        policy.append(float(mean_return(on_host, jax.random.fold_in(policy_key, number))))
        progress.set_postfix(mean_return=f"{policy[-1]:.1f}", best=f"{best[-1]:.0f}")
        if policy[-1] >= SOLVED or number == generations - 1:
            fresh = float(mean_return(on_host, jax.random.fold_in(fresh_key, number)))
            if fresh >= SOLVED:
                break
    return Result(np.asarray(theta), np.array(best), np.array(mean), np.array(policy), fresh)


def draw(result: Result, title: str, path: pathlib.Path) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title=title, xlabel="generation", ylabel="return (steps survived)", ylim=(0, 1.04 * STEPS)
    )
    generations = np.arange(1, result.policy.size + 1)
    axes.plot(generations, result.best, ".-", color="tab:gray", label="best of the population")
    axes.plot(generations, result.mean, ".-", color="tab:blue", label="mean of the population")
    axes.plot(
        generations, result.policy, ".-", color="tab:red", label="theta, mean of 100 episodes"
    )
    axes.axhline(SOLVED, color="black", linestyle="--", linewidth=1, label="solved: 475")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def return_in_gymnasium(theta: np.ndarray, seed: int) -> float:
    """`[N] -> []`: the mean over 100 episodes of the game we claim to have rebuilt."""
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


def main(argv: list[str]) -> None:
    del argv
    start = time.perf_counter()
    logging.set_verbosity(logging.WARNING)  # jax tells which backends it does not find
    jax.config.update("jax_num_cpu_devices", _DEVICES.value)  # for the CPU only
    devices = jax.devices()[: _DEVICES.value]
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)

    result = train(_SEED.value, devices, _GENERATIONS.value)
    chex.assert_tree_all_finite(result.theta)
    np.savez(out / "policy.npz", theta=result.theta)
    where = f"{len(devices)} x {devices[0].device_kind}"
    title = f"OpenAI ES on CartPole-v1, seed {_SEED.value}, {where}"
    draw(result, title, out / "learning_curve.png")

    print(f"{'solved' if result.solved else 'not solved'} on {where}")
    print(f"generations   {result.policy.size}")
    print(f"mean return   {result.fresh:.1f} over {EPISODES} fresh episodes")
    if _GYM.value:
        in_gymnasium = return_in_gymnasium(result.theta, _SEED.value)
        print(f"in Gymnasium  {in_gymnasium:.1f} over {EPISODES} episodes")
    print(f"picture       {out / 'learning_curve.png'}")
    print(f"seconds       {time.perf_counter() - start:.1f}")


if __name__ == "__main__":
    app.run(main)
