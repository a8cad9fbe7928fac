"""The step that a program calls, which `jax-dist plan -- python train.py` compiles."""

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist._steps import find_step

N = jax.local_device_count()


def rows_of(count):
    return np.ones((N, count, 8), np.float32)


def train_step(weights, batch):
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    return weights - jax.lax.pmean(gradient, "i"), batch.sum()


def init(key):
    return jax.random.normal(key, (8,))


def train(pmap, calls):
    """Count devices, make a state and make it the same everywhere, before training."""
    assert pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones(N))[0] == N
    weights = pmap(init)(jax.random.split(jax.random.key(0), N))
    weights = pmap(lambda x: jax.lax.pmean(x, "i"), "i")(weights)
    mapped = pmap(train_step, axis_name="i", donate_argnums=0)
    while True:
        weights, _ = mapped(weights, rows_of(3))
        calls.append(weights)


@pytest.mark.parametrize("package", [jax, jax_dist], ids=lambda package: package.__name__)
def test_the_first_that_takes_its_result_and_a_batch_is_the_step(package):
    calls, before = [], (jax.pmap, jax_dist.pmap)

    found = find_step(lambda: train(package.pmap, calls))

    assert (found.name, found.state(N), found.options.donated) == ("train_step", (0,), (0,))
    assert calls == []
    assert [leaf.shape for leaf in found.slices] == [(8,), (3, 8)]
    assert find_step(lambda: train(package.pmap, []), "init").name == "init"
    assert (jax.pmap, jax_dist.pmap) == before


def test_a_method_is_found_in_a_program_that_catches_everything():
    def run():
        class Trainer:
            @functools.partial(jax.pmap, axis_name="i", static_broadcasted_argnums=0)
            def step(self, weights, batch):
                return weights - jax.lax.pmean(batch.sum(), "i")

        with contextlib.suppress(BaseException):
            Trainer().step(jnp.ones((N, 2)), rows_of(1))

    found = find_step(run)

    assert (found.name, [leaf.shape for leaf in found.slices]) == ("step", [(2,), (1, 8)])


def fail():
    jax.pmap(init)(jax.random.split(jax.random.key(0), N))
    raise KeyError("rows")


def run_under_jit():
    mapped = jax.jit(jax.pmap(train_step, "i"))
    assert mapped(jnp.ones((N, 8)), rows_of(2))[0].shape == (N, 8)


@pytest.mark.parametrize(
    ("run", "name", "lines"),
    [
        (fail, None, ["raised KeyError('rows'), and did not call a training", "called: init"]),
        (lambda: sys.exit(3), "train_step", ["raised SystemExit(3), and did not", "'train_step'"]),
        (lambda: train(jax.pmap, []), "other", ["trains", "<lambda>, init, <lambda>, train_step"]),
        (run_under_jit, None, ["The program ended", "called: none"]),
    ],
)
def test_a_program_without_such_a_step_says_what_it_called(run, name, lines):
    with pytest.raises(NotImplementedError) as caught:
        find_step(run, name)

    assert [line for line in lines if line not in str(caught.value)] == []
