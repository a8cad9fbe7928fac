"""Evolution strategies on a physics engine: a gymnast learns to circle the high bar.

    pip install mujoco-mjx
    python examples/es_physics.py --devices 8 --seed 0

The body is a MuJoCo model of arms, trunk and legs with motors at the shoulders and the hips, and
MJX, the MuJoCo that is written in JAX, moves it on all devices. A step of an engine is a large
program, so the first start compiles for long; the second one takes it from the cache on disk.
The engine's model is an argument: what a function captures becomes constants of its program.

Shapes: `N` parameters, `P` mirrored pairs (the population is twice that), `D` devices.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import chex
import es_common
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
from es_common import centred_ranks, check_redrawable
from es_training import Generation, Result, keep, until_solved
from jax import lax
from mujoco import mjx

import jax_dist

PARAMETERS, PAIRS = 16, 32  # N and P in the shapes below
CHUNK = 4  # so many pairs a device plays at once, as es_pendulum.py explains
SIGMA = 0.3  # how far the population spreads around theta, in every parameter
ADAM = optax.adam(0.2)
STEPS, ENGINE_STEPS = 250, 2  # decisions in an episode of 5 s, and steps of 0.01 s for each
TEST_EPISODES = 32
SOLVED = -0.3  # metres; who hangs still has the feet at -2, and who circles evenly at 0

MODEL = """
<mujoco model="gymnast">
  <option timestep="0.01"><flag constraint="disable"/></option>
  <default>
    <geom type="capsule" size="0.05"/>
    <joint type="hinge" axis="0 -1 0" damping="2" armature="1"/>
    <motor gear="60" ctrllimited="true" ctrlrange="-1 1"/>
  </default>
  <worldbody>
    <body name="arms">
      <joint name="bar"/>
      <geom fromto="0 0 0 0 0 -0.6" mass="6"/>
      <body name="trunk" pos="0 0 -0.6">
        <joint name="shoulders" stiffness="60"/>
        <geom fromto="0 0 0 0 0 -0.6" mass="30"/>
        <body name="legs" pos="0 0 -0.6">
          <joint name="hips" stiffness="60"/>
          <geom fromto="0 0 0 0 0 -0.8" mass="20"/>
        </body>
      </body>
    </body>
  </worldbody>
  <actuator><motor joint="shoulders"/><motor joint="hips"/></actuator>
</mujoco>
"""


@functools.cache
def engine() -> mjx.Model:
    return mjx.put_model(mujoco.MjModel.from_xml_string(MODEL))


def act(theta: jax.Array, angles: jax.Array, speeds: jax.Array) -> jax.Array:
    """`[N], [3], [3] -> [2]`: how hard each motor turns, from -1 to 1."""
    arms = jnp.stack([jnp.sin(angles[0]), jnp.cos(angles[0])])
    seen = jnp.concatenate([arms, angles[1:], speeds / 5, jnp.ones(1)])  # [8]
    return jnp.tanh(theta.reshape(2, 8) @ seen)


def height_of_feet(angles: jax.Array) -> jax.Array:
    """`[3] -> []`: above the bar, in metres; the angles are those of the joints."""
    arms, trunk, legs = jnp.cumsum(angles)
    return -0.6 * jnp.cos(arms) - 0.6 * jnp.cos(trunk) - 0.8 * jnp.cos(legs)


def step(model: mjx.Model, body: mjx.Data, control: jax.Array) -> mjx.Data:
    """`[2]` of control: what the engine makes of 0.02 s."""
    body = body.replace(ctrl=control)
    body, _ = lax.scan(lambda body, _: (mjx.step(model, body), None), body, length=ENGINE_STEPS)
    return body


def episode_score(model: mjx.Model, theta: jax.Array, key: jax.Array) -> jax.Array:
    """`[N] -> []`: mean height of the feet in the second half. The key is consumed."""

    def advance(body: mjx.Data, _: None) -> tuple[mjx.Data, jax.Array]:
        body = step(model, body, act(theta, body.qpos, body.qvel))
        return body, height_of_feet(body.qpos)

    start = mjx.make_data(model).replace(qpos=0.1 * jax.random.normal(key, (3,)))
    _, heights = lax.scan(advance, start, length=STEPS)
    score = heights[STEPS // 2 :].mean()
    return jnp.where(jnp.isfinite(score), score, -2.0)  # an engine that blew up is no success


@jax.jit
def test_score(model: mjx.Model, theta: jax.Array, key: jax.Array) -> jax.Array:
    """`[N] -> []`, over 32 episodes. The key is consumed."""
    keys = jax.random.split(key, TEST_EPISODES)
    return jax.vmap(episode_score, in_axes=(None, None, 0))(model, theta, keys).mean()


def noise_of(key: jax.Array, pair: jax.Array) -> jax.Array:
    """`[], [] -> [N]`: a pair has the same noise on every device. The key is not consumed."""
    check_redrawable(key)
    return jax.random.normal(jax.random.fold_in(key, pair), (PARAMETERS,))


def generation(
    model: mjx.Model, theta: jax.Array, adam: optax.OptState, key: jax.Array, pairs: jax.Array
) -> Generation:
    """On one device: plays its own `pairs`, `[P / D]`, and updates theta. The key is consumed."""
    noise_key, start_key = jax.random.split(key)

    def play(pair: jax.Array) -> jax.Array:
        noise = noise_of(noise_key, pair)
        members = jnp.stack([theta + SIGMA * noise, theta - SIGMA * noise])  # [2, N]
        start = jax.random.fold_in(start_key, pair)
        return jax.vmap(episode_score, in_axes=(None, 0, None))(model, members, start)

    own = lax.map(play, pairs, batch_size=CHUNK)  # [P / D, 2]
    fitness = lax.all_gather(own, "devices", tiled=True)  # [P, 2]; nothing else is ever sent

    ranks = centred_ranks(fitness.ravel()).reshape(PAIRS, 2)
    noise = jax.vmap(noise_of, in_axes=(None, 0))(noise_key, jnp.arange(PAIRS))  # [P, N]
    gradient = (ranks[:, 0] - ranks[:, 1]) @ noise / (2 * PAIRS * SIGMA)  # [N]
    change, adam = ADAM.update(-gradient, adam)  # optax descends, and we climb
    return optax.apply_updates(theta, change), adam, fitness


def make_generation(devices: Sequence[jax.Device]) -> Callable[..., Generation]:
    """`generation` on all devices; its `pairs` are then `[D, P / D]`."""
    return jax_dist.pmap(
        generation,
        axis_name="devices",
        in_axes=(None, None, None, None, 0),  # only the pairs differ from device to device
        out_axes=None,
        devices=devices,
    )


def train(
    seed: int,
    devices: Sequence[jax.Device],
    generations: int,
    *,
    out: pathlib.Path | None = None,
    save_every: int = 0,
) -> Result:
    """Ends when theta is seen to circle the bar, and seen again in other episodes.

    Args:
      seed: of the noise and of all episodes.
      devices: the pairs must divide among them.
      generations: gives up after so many.
      out: keeps the curve there, and checkpoints.
      save_every: generations from one checkpoint to the next; 0: none.
    """
    chex.assert_is_divisible(PAIRS, len(devices))
    key, policy_key, fresh_key = jax.random.split(jax.random.key(seed), 3)
    theta = jnp.zeros(PARAMETERS)
    model, *state = jax_dist.replicate((engine(), theta, ADAM.init(theta)), devices)
    pairs = np.arange(PAIRS).reshape(len(devices), -1)  # [D, P / D]
    run_generation = make_generation(devices)

    def run(theta: jax.Array, adam: optax.OptState, number: int) -> Generation:
        return run_generation(model, theta, adam, jax.random.fold_in(key, number), pairs)

    return until_solved(
        tuple(state),
        run,
        lambda theta, key: test_score(engine(), theta, key),
        (policy_key, fresh_key),
        SOLVED,
        generations,
        show=lambda policy, best: {"mean_height": f"{policy:.2f}"},
        out=out,
        save_every=save_every,
    )


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
        game="a MuJoCo gymnast",
        episodes=TEST_EPISODES,
        ylabel="height of the feet above the bar (m)",
        goal_label="solved: -0.3 m",
    )

    print(f"{'solved' if result.solved else 'not solved'} on {session.where}")
    print(f"generations   {result.policy.size}")
    print(f"mean height   {result.fresh:.2f} m over {TEST_EPISODES} fresh episodes")
    print(f"picture       {picture}")
    print(f"seconds       {time.perf_counter() - start:.1f}")


if __name__ == "__main__":
    es_common.run(main, program="es_physics", generations=40)
