"""The quickstart balances the pole, on any number of devices, and sends nothing but scores."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import chex
import es_common
import es_quickstart as es
import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "es_quickstart.py"


@pytest.fixture(scope="module")
def trained():
    return es.train(seed=0, devices=jax.devices(), generations=60)


def random_states(count: int) -> np.ndarray:
    """`[count, 4]`: standing ones, a good part of them about to fall."""
    limits = np.array([2.4, 3.0, 0.2095, 3.0])
    return np.random.default_rng(0).uniform(-limits, limits, (count, 4)).astype(np.float32)


def test_each_step_is_gymnasiums():
    game = gymnasium.make("CartPole-v1").unwrapped
    states = random_states(500)
    actions = np.arange(500) % 2
    after, ended = np.empty((500, 4)), np.empty(500, bool)
    for i in range(500):
        game.reset()
        game.state = states[i].astype(np.float64)
        _, _, ended[i], _, _ = game.step(actions[i])
        after[i] = game.state

    ours = jax.vmap(es.step)(states, actions)

    np.testing.assert_allclose(ours, after, atol=1e-6)  # float32 here, float64 there
    np.testing.assert_array_equal(jax.vmap(es.fallen)(ours), ended)
    assert 30 < ended.sum() < 60  # both happen


def test_who_only_pushes_left_falls_as_soon_as_in_gymnasium():
    pushes_left = np.zeros(114, np.float32)

    returns = jax.vmap(es.episode_return, in_axes=(None, 0))(
        pushes_left, jax.random.split(jax.random.key(0), 1000)
    )

    assert set(np.unique(returns)) <= {8.0, 9.0, 10.0, 11.0}
    assert returns.mean() == pytest.approx(9.35, abs=0.1)  # 10,000 episodes there: 9.35
    assert es.return_in_gymnasium(pushes_left, seed=0) == pytest.approx(9.35, abs=0.25)


@pytest.mark.parametrize(
    ("fitness", "expected"),
    [
        ([3.0, 1.0, 2.0], [0.5, -0.5, 0.0]),
        ([10.0, 500.0, 500.0, 30.0], [-1 / 2, 1 / 3, 1 / 3, -1 / 6]),
        ([500.0, 500.0, 9.0, 500.0, 9.0], [0.25, 0.25, -0.375, 0.25, -0.375]),
        ([7.0, 7.0, 7.0], [0.0, 0.0, 0.0]),
    ],
    ids=["all unlike", "two equals", "two and three equals", "all equal"],
)
def test_equals_share_the_average_of_their_ranks(fitness, expected):
    np.testing.assert_allclose(es.centred_ranks(jnp.array(fitness)), expected, atol=1e-7)


def test_a_pair_has_the_same_noise_in_any_batch():
    key = jax.random.key(5)

    everyones = es.noise_of(key, jnp.arange(128))

    chex.assert_trees_all_equal(everyones[48:64], es.noise_of(key, jnp.arange(48, 64)))
    assert everyones.std() == pytest.approx(1.0, abs=0.02)
    assert np.unique(everyones).size > 14_000  # of 128 * 114: rows are not copies of each other


@pytest.mark.parametrize("implementation", ["rbg", "unsafe_rbg"])
def test_a_key_whose_noise_depends_on_the_batch_is_refused(implementation):
    with pytest.raises(ValueError, match=f"drawn twice from a '{implementation}' key"):
        es.noise_of(jax.random.key(0, impl=implementation), jnp.arange(128))


@pytest.mark.parametrize(
    "count", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 4))]
)
def test_the_curve_is_the_same_on_fewer_devices(trained, count):
    few = es.train(seed=0, devices=jax.devices()[:count], generations=6)

    assert len(few.curve) == 6
    for name in ("best", "mean", "policy"):
        np.testing.assert_allclose(
            few.curve[name], trained.curve[name][:6], atol=1e-3, err_msg=name
        )


def test_seed_0_is_solved_and_holds_in_gymnasium(trained):
    chex.assert_shape(trained.theta, (114,))
    assert trained.solved
    assert not trained._replace(fresh=474.9).solved
    assert len(trained.curve) <= 60
    assert min(trained.curve["policy"][-1], trained.fresh) >= 475
    assert es.return_in_gymnasium(trained.theta, seed=0) >= 475


def test_only_the_256_scores_are_sent():
    theta = jnp.zeros(114)
    pairs = np.arange(128).reshape(8, 16)
    update = es.make_generation(jax.devices())

    program = update.lower(theta, es.ADAM.init(theta), jax.random.key(0), pairs).compile()

    assert es_common.exchanged(program.as_text()) == {"all-gather": 4 * 256}


@pytest.mark.thorough
def test_the_script_leaves_a_picture_and_a_policy(tmp_path):
    options = ["--generations=1", "--devices=4", "--gym", f"--out={tmp_path / 'out'}"]
    ran = subprocess.run(
        [sys.executable, _EXAMPLE, *options],
        env=os.environ | {"PYTHONPATH": str(_ROOT), "JAX_DIST_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    picture = tmp_path / "out" / "learning_curve.png"
    numbers = re.sub(r"\d+\.\d", "#.#", ran.stdout)
    assert numbers == textwrap.dedent(f"""\
        not solved on 4 x cpu
        generations   1
        mean return   #.# over 100 fresh episodes
        picture       {picture}
        in Gymnasium  #.# over 100 episodes
        seconds       #.#
        """)
    assert picture.stat().st_size > 10_000
    assert matplotlib.image.imread(picture).shape == (540, 840, 4)
    assert np.load(tmp_path / "out" / "policy.npz")["theta"].shape == (114,)
    assert "policy=" in ran.stderr  # the progress bar
