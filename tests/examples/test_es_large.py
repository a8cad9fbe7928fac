"""All ways to make and send the noise learn alike; they differ in bytes and memory."""

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys

import es_common
import es_large
import jax
import jax.numpy as jnp
import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_EXAMPLE = _ROOT / "examples" / "es_large.py"
_SIZE = 1_600


@dataclasses.dataclass(frozen=True)
class Trained:
    theta: np.ndarray  # after 3 generations
    losses: list[float]  # the mean of each generation
    exchanged: dict[str, int]


class ThetaAfter3(es_common.Checkpoints):
    def save(self, done, state):
        if done == 3:
            self.theta = np.asarray(state[0])


@functools.cache  # the bytes are those of programs that others compile
def trained(noise="scan", comm="gradient", devices=8, generations=3):
    losses, saved = [], ThetaAfter3()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(es_large, "SMALLEST_TABLE", 100_000)
        program, _ = es_large.train(
            es_large.Plan(_SIZE, noise, comm),
            jax.devices()[:devices],
            0,
            generations,
            lambda _, loss: losses.append(loss),
            saved,
        )
    return Trained(saved.theta, losses, program.exchanged)


def built(**options):
    return es_large.build(es_large.Plan(**options), jax.devices(), jax.random.key(0))


@pytest.fixture(scope="module")
def usual():
    return trained(generations=12)


def test_it_learns(usual):
    losses = usual.losses

    assert 19 < losses[0] < 21  # theta starts around 2.5, between two valleys
    assert losses[-1] < losses[0] - 1.5


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("noise", "comm", "devices"),
    [
        ("scan", "scalar", 2),
        ("scan", "slice", 8),
        ("scan", "gradient", 1),
        ("materialise", "gradient", 4),
        ("materialise", "scalar", 2),
        ("materialise", "slice", 8),
    ],
)
def test_who_draws_and_who_sends_makes_no_difference(usual, noise, comm, devices):
    other = trained(noise=noise, comm=comm, devices=devices)

    # Two scores that differ by rounding may change places, and with them two ranks of 256.
    np.testing.assert_allclose(other.theta, usual.theta, atol=1e-3)
    np.testing.assert_allclose(other.losses, usual.losses[:3], rtol=1e-5)


@pytest.mark.thorough
def test_noise_of_a_table_is_the_same_for_all_who_send(usual):
    theta = trained(noise="table", comm="gradient", devices=8).theta

    for comm, devices in (("scalar", 2), ("slice", 8)):
        other = trained(noise="table", comm=comm, devices=devices)
        np.testing.assert_allclose(other.theta, theta, atol=1e-3)
    assert np.abs(theta - usual.theta).max() > 0.02


# The bytes of 256 scores, and of 1,600 parameters.
@pytest.mark.parametrize(
    ("comm", "expected"),
    [
        ("scalar", {"all-gather": 1024}),
        ("gradient", {"all-gather": 1024, "all-reduce": 6400}),
        ("slice", {"all-gather": 1024 + 6400}),
    ],
)
@pytest.mark.parametrize("noise", ["scan", "table"])
def test_bytes_exchanged(usual, noise, comm, expected):
    # On these devices they are trained above; what one device gets is the same on any number.
    devices = 2 if comm == "scalar" else 8
    is_usual = (noise, comm) == ("scan", "gradient")
    program = usual if is_usual else trained(noise=noise, comm=comm, devices=devices)

    assert program.exchanged == expected


@pytest.mark.thorough
def test_memory_at_100_000_parameters():
    materialised = built(parameters=100_000, noise="materialise").temporary
    scanned = built(parameters=100_000, noise="scan").temporary
    table = built(parameters=100_000, noise="table", comm="scalar")

    assert materialised > 15_000_000  # 16 pairs with two members of 400 kB each, and more
    assert scanned <= 0.1 * materialised
    assert table.temporary <= 0.1 * materialised
    assert table.table_bytes == 16_000_000


@pytest.mark.thorough
def test_rows_are_alike_in_parts_and_in_any_batch():
    for plan in (es_large.Plan(_SIZE), es_large.Plan(_SIZE, "table")):
        table = jax.random.normal(jax.random.key(1), (plan.table_size,))
        row = jax.jit(es_large.row_maker(plan, jax.random.key(2), table))
        pairs, blocks = jnp.arange(64), jnp.arange(8)

        rows = jax.vmap(row, in_axes=(0, None))(pairs, blocks)
        halves = [row(pairs[5], blocks[:4]), row(pairs[5], blocks[4:])]

        np.testing.assert_array_equal(jnp.concatenate(halves), rows[5])
        assert rows.shape == (64, _SIZE)
        assert rows.std() == pytest.approx(1.0, abs=0.05)
        assert rows.mean() == pytest.approx(0.0, abs=0.05)
        assert not np.allclose(rows[5], rows[6])


@pytest.mark.slow
def test_the_script_prints_what_it_costs_and_goes_on_where_it_stopped(tmp_path):
    def run(folder: str, *options: str) -> tuple[str, str]:
        command = [sys.executable, _EXAMPLE, "--parameters=800", "--devices=2", "--comm=slice"]
        environment = os.environ | {
            "PYTHONPATH": str(_ROOT),
            "JAX_DIST_CACHE_DIR": str(tmp_path / "cache"),
        }
        command += [f"--out={tmp_path / folder}", *options]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout, (tmp_path / folder / "curve.csv").read_text()

    printed, whole = run("whole", "--generations=4")
    run("parts", "--generations=2", "--save_every=2")
    _, parts = run("parts", "--generations=4", "--save_every=2")

    assert parts == whole
    assert "exchanged    4,224 bytes {'all-gather': 4224}" in printed
    assert re.search(r"^temporary    [\d,]+ bytes on each device$", printed, re.M)
    assert (tmp_path / "whole" / "learning_curve.png").stat().st_size > 10_000
