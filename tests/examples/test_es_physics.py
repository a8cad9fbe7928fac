"""The gymnast moves as MuJoCo says, learns to circle the bar, and goes on where it was stopped."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from types import ModuleType

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "es_physics.py"

pytest.importorskip("mujoco", reason="needs the physics engine: pip install mujoco-mjx")
pytestmark = [
    pytest.mark.slow,  # the engine compiles for long
    pytest.mark.filterwarnings("ignore"),  # the engine's own
]


@pytest.fixture(scope="module")
def es() -> ModuleType:
    pytest.importorskip("mujoco.mjx")
    return importlib.import_module("es_physics")


@pytest.fixture(scope="module")
def trained(es):
    return es.train(seed=0, devices=jax.devices(), generations=40)


def test_each_step_is_mujocos(es):
    import mujoco

    model = mujoco.MjModel.from_xml_string(es.MODEL)
    there = mujoco.MjData(model)
    here = jax.jit(lambda model, q, v, control: es.step(model, body_at(es, q, v), control))
    drawn = np.random.default_rng(0).uniform(-1, 1, (50, 8)).astype(np.float32)
    for row in drawn:
        q, v, control = 3 * row[:3], 5 * row[3:6], row[6:]
        there.qpos, there.qvel, there.ctrl = q, v, control
        mujoco.mj_step(model, there, nstep=2)

        after = here(es.engine(), q, v, control)

        np.testing.assert_allclose(after.qpos, there.qpos, atol=2e-5)  # float32 here
        np.testing.assert_allclose(after.qvel, there.qvel, atol=2e-3)


def body_at(es, q, v):
    from mujoco import mjx

    return mjx.make_data(es.engine()).replace(qpos=q, qvel=v)


@pytest.mark.parametrize(
    ("angles", "height"),
    [((0, 0, 0), -2.0), ((np.pi, 0, 0), 2.0), ((np.pi / 2, np.pi / 2, 0), 1.4)],
    ids=["hangs", "stands on the hands", "arms level, the rest upright"],
)
def test_the_height_of_the_feet(es, angles, height):
    assert es.height_of_feet(jnp.array(angles)) == pytest.approx(height, abs=1e-6)


def test_seed_0_is_solved(es, trained):
    assert trained.solved
    assert trained.policy[-1] >= es.SOLVED


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_curve_is_the_same_on_fewer_devices(es, trained, count):
    few = es.train(seed=0, devices=jax.devices()[:count], generations=2)

    for name in ("best", "mean", "policy"):
        np.testing.assert_allclose(
            getattr(few, name), getattr(trained, name)[:2], atol=1e-6, err_msg=name
        )


def test_the_script_goes_on_where_it_stopped(trained, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(_EXAMPLE), f"--out={out}", "--save_every=1"]
    environment = os.environ | {
        "PYTHONPATH": str(_ROOT),
        "JAX_DIST_CACHE_DIR": str(tmp_path / "cache"),
    }
    for options in (["--generations=2"], []):
        ran = subprocess.run(
            [*command, *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr

    generations = len(trained.policy)
    assert re.search(r"2/40 ", ran.stderr)  # where the bar of the second begins
    assert re.sub(r"\d+\.\d+", "#.#", ran.stdout[ran.stdout.index("solved") :]) == textwrap.dedent(
        f"""\
        solved on 8 x cpu
        generations   {generations}
        mean height   {"-" if trained.fresh < 0 else ""}#.# m over 32 fresh episodes
        picture       {out / "learning_curve.png"}
        seconds       #.#
        """
    )
    rows = np.genfromtxt(out / "curve.csv", delimiter=",", names=True)
    chex.assert_trees_all_close(rows["policy"], trained.policy, atol=1e-6)
