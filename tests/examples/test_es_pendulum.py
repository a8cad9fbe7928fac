"""The pendulum swings up and stays; the curve is the same, to the last bit, however it is run."""

import dataclasses
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import ModuleType

import chex
import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "es_pendulum.py"


@pytest.fixture(scope="module")
def es() -> ModuleType:
    return importlib.import_module("es_pendulum")


@pytest.fixture(scope="module")
def trained(es):
    return es.train(seed=0, devices=jax.devices(), generations=60)


def test_each_step_is_gymnasiums(es):
    game = gymnasium.make("Pendulum-v1").unwrapped
    game.reset()
    limits = np.array([9.0, 8.0, 2.0])  # more than one turn to either side
    drawn = np.random.default_rng(0).uniform(-limits, limits, (500, 3)).astype(np.float32)
    after, rewards = np.empty((500, 2)), np.empty(500)
    for i in range(500):
        game.state = drawn[i, :2].astype(np.float64)
        _, rewards[i], _, _, _ = game.step(drawn[i, 2:])
        after[i] = game.state

    ours, our_rewards = jax.vmap(es.step)(drawn[:, :2], drawn[:, 2])

    np.testing.assert_allclose(ours, after, atol=5e-6)  # float32 here, float64 there
    np.testing.assert_allclose(our_rewards, rewards, atol=2e-5)
    assert (np.abs(after[:, 1]) == 8).sum() == 9  # these would be too fast


def test_one_step_by_hand(es):
    after, reward = es.step(jnp.array([np.pi / 2, 1.0]), jnp.float32(2.0))

    np.testing.assert_allclose(after, [np.pi / 2 + 0.05 * 2.05, 2.05], rtol=1e-6)
    assert reward == pytest.approx(-(2.4674011 + 0.1 + 0.004))  # (pi / 2) squared


def test_the_mirrored_state_has_the_mirrored_torque(es, trained):
    states = np.random.default_rng(1).uniform(-3, 3, (200, 2)).astype(np.float32)
    act = jax.vmap(es.act, in_axes=(None, 0))

    torques = act(trained.theta, states)

    np.testing.assert_allclose(act(trained.theta, -states), -torques, atol=1e-6)
    assert 1.9 < torques.max() <= 2.0


def test_both_of_a_pair_start_alike_and_mirror_each_other(es):
    theta = 0.3 * jax.random.normal(jax.random.key(0), (80,))
    noise = es.noise_of(jax.random.key(1), jnp.int32(3))
    key = jax.random.key(2)

    play = jax.jit(es.play)

    twins = play(theta, jnp.zeros(80), key)

    assert twins[0] == twins[1]
    chex.assert_trees_all_equal(play(theta, noise, key), play(theta, -noise, key)[::-1])


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_a_key_whose_noise_depends_on_the_batch_is_refused(es, implementation):
    with jax.default_prng_impl(implementation), pytest.raises(ValueError, match="drawn twice"):
        es.train(seed=0, devices=jax.devices(), generations=1)


@pytest.mark.parametrize(
    "count",
    [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.thorough)],
)
def test_the_curve_is_the_same_on_fewer_devices(es, trained, count):
    few = es.train(seed=0, devices=jax.devices()[:count], generations=4)

    for name in ("best", "mean", "policy"):
        np.testing.assert_array_equal(getattr(few, name), getattr(trained, name)[:4], err_msg=name)


def test_another_seed_has_another_curve(es, trained):
    other = es.train(seed=1, devices=jax.devices(), generations=2)

    assert (other.mean != trained.mean[:2]).all()


def test_seed_0_is_solved_and_holds_in_gymnasium(es, trained):
    chex.assert_shape(trained.theta, (80,))
    assert trained.solved
    assert trained.policy[0] < -1000
    assert trained.policy[-1] >= -200
    assert trained.fresh >= -200
    assert es.return_in_gymnasium(trained.theta, seed=0) >= -220  # of 100 other episodes


def test_solved_takes_both_evaluations(trained):
    assert not dataclasses.replace(trained, fresh=-200.1).solved
    assert not dataclasses.replace(trained, policy=np.array([-100.0, -200.1])).solved


def test_only_the_256_scores_are_sent(es):
    theta = jnp.zeros(80)
    mesh = jax.sharding.Mesh(jax.devices(), ("devices",))
    update = es.make_generation(mesh)

    program = update.lower(theta, es.ADAM.init(theta), jax.random.key(0), np.arange(128))

    hlo = program.compile().as_text()
    assert re.findall(r" = (\S+?)\{[\d,]*\} (all-\w+|reduce-scatter|collective-\w+)\(", hlo) == [
        ("f32[128,2]", "all-gather")
    ]


def script(out: pathlib.Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, _EXAMPLE, f"--out={out}", "--save_every=4", *options],
        env=os.environ | {"PYTHONPATH": str(_ROOT), "JAX_DIST_CACHE_DIR": str(out / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: pathlib.Path, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_the_script_goes_on_where_it_was_killed(trained, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    out = tmp_path / "out"
    killed = script(out)
    wait_for(out / "4", killed)  # a checkpoint has its name when it is whole
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    lines = (out / "curve.csv").read_text().count("\n") - 1
    assert lines < len(trained.policy)

    resumed = script(out, "--devices=4", "--gym")
    output, progress = resumed.communicate(timeout=300)

    assert resumed.returncode == 0, progress
    first = re.search(r"(\d+)/60", progress)  # where the bar begins
    assert int(first[1]) in range(4, lines + 1, 4)
    rows = np.genfromtxt(out / "curve.csv", delimiter=",", names=True)
    for name in ("best", "mean", "policy"):
        np.testing.assert_allclose(rows[name], getattr(trained, name), rtol=1e-6)
    picture = out / "learning_curve.png"
    assert re.sub(r"\d+\.\d", "#.#", output) == textwrap.dedent(f"""\
        solved on 4 x cpu
        generations   {len(trained.policy)}
        mean return   -#.# over 100 fresh episodes
        in Gymnasium  -#.# over 100 episodes
        picture       {picture}
        seconds       #.#
        """)
    assert matplotlib.image.imread(picture).shape == (540, 840, 4)
    np.testing.assert_array_equal(np.load(out / "policy.npz")["theta"], trained.theta)


@pytest.mark.slow
def test_20_of_20_seeds_are_solved_within_60_generations(es):
    results = [es.train(seed, jax.devices(), 60) for seed in range(20)]

    assert [seed for seed, result in enumerate(results) if not result.solved] == []
    in_gymnasium = [es.return_in_gymnasium(result.theta, seed=0) for result in results]
    assert min(in_gymnasium) >= -210
