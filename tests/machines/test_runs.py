"""The step of a program that runs."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist.errors import UnsupportedError
from jax_dist.machines.runs import step_of

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="jax.pmap is taken over since 0.10"),
]

_N = jax.local_device_count()


def _rows(count: int) -> np.ndarray:
    return np.ones((_N, count, 8), np.float32)


def _step(weights, batch):
    gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    return weights - jax.lax.pmean(gradient, "i"), batch.sum()


def _init(key):
    return jax.random.normal(key, (8,))


def _train(way, calls):
    """Counts devices, makes its state and makes it the same everywhere, before it trains."""
    assert way(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones(_N))[0] == _N
    weights = way(_init)(jax.random.split(jax.random.key(0), _N))
    weights = way(lambda x: jax.lax.pmean(x, "i"), "i")(weights)
    step = way(_step, axis_name="i", donate_argnums=0)
    while True:
        weights, _ = step(weights, _rows(3))
        calls.append(weights)


@pytest.mark.parametrize("package", [jax, jax_dist], ids=lambda package: package.__name__)
def test_the_first_that_takes_its_result_and_a_batch_is_the_step_and_does_not_run(package):
    calls = []

    step = step_of(lambda: _train(package.pmap, calls))

    assert (step.name, step.axis_name, calls) == ("_step", "i", [])
    assert [leaf.shape for leaf in step.slices] == [(8,), (3, 8)]
    assert step.donated == (0,)
    assert step.state(_N) == (0,)


@pytest.mark.parametrize("package", [jax, jax_dist], ids=lambda package: package.__name__)
def test_one_that_takes_only_state_is_the_step_once_it_gets_its_own_result(package):
    def run():
        spread = package.pmap(lambda x: x * 2)
        again = package.pmap(_advance)
        state = spread(jnp.ones((_N, 3)))
        while True:
            state = again(spread(state) if state.sum() < 0 else state)

    assert step_of(run).name == "_advance"


def _advance(state):
    return state + 1


def test_functions_of_one_name_are_told_apart():
    def run():
        jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones(_N))
        jax.pmap(lambda weights, batch: weights - batch.sum())(jnp.ones((_N, 8)), _rows(2))

    assert [leaf.shape for leaf in step_of(run).slices] == [(8,), (2, 8)]


def test_a_named_function_is_the_step_at_its_first_call():
    assert step_of(lambda: _train(jax.pmap, []), "_init").name == "_init"


@pytest.mark.parametrize("name", ["step", "ours"])
def test_decorators_methods_and_static_arguments(name):
    step = step_of(lambda: getattr(_trainer(), name)(jnp.ones((_N, 2)), _rows(1)))

    assert (step.name, [leaf.shape for leaf in step.slices]) == (name, [(2,), (1, 8)])


def _trainer():
    class Trainer:
        scale = 3.0

        @functools.partial(jax.pmap, axis_name="i", static_broadcasted_argnums=0)
        def step(self, weights, batch):
            return weights * self.scale - jax.lax.pmean(batch.sum(), "i")

        @jax_dist.pmap(axis_name="i", static_broadcasted_argnums=0)
        def ours(self, weights, batch):
            return weights * self.scale - jax.lax.pmean(batch.sum(), "i")

    return Trainer()


def test_a_name_that_is_mapped_may_be_called_after_the_step():
    def run():
        step, last = jax.pmap(_step, "i"), jax.pmap(_init)
        step(jnp.ones((_N, 8)), _rows(2))
        last(jax.random.split(jax.random.key(0), _N))

    assert step_of(run, "_init").name == "_init"


def test_a_pmap_inside_of_a_jitted_function_runs_as_ever():
    def run():
        mapped = jax.pmap(_step, "i")
        weights, _ = jax.jit(mapped)(jnp.ones((_N, 8)), _rows(2))
        assert weights.shape == (_N, 8)

    with pytest.raises(UnsupportedError, match="the program ended before it called"):
        step_of(run)


def test_a_program_that_catches_everything_is_still_understood():
    def run():
        try:
            jax.pmap(_step, "i")(jnp.ones((_N, 8)), _rows(2))
        except BaseException:  # noqa: BLE001  # as some programs do
            return

    assert step_of(run).name == "_step"


def test_what_is_patched_is_put_back():
    before = jax.pmap, jax_dist.pmap

    step_of(lambda: _train(jax.pmap, []))

    assert (jax.pmap, jax_dist.pmap) == before


def _leave():
    jax.pmap(_init)(jax.random.split(jax.random.key(0), _N))
    raise SystemExit(3)


def _fail():
    jax.pmap(lambda x: x + 1)(jnp.ones(_N))
    raise KeyError("rows")


def _misspelled():
    _train(jax.pmap, [])


@pytest.mark.parametrize(
    ("run", "name", "lines"),
    [
        (
            _leave,
            None,
            ["the program exited before it called a training step, which gets its result again:",
             "SystemExit: 3, at ", "test_runs.py:", "it called _init: no result is like an",
             "Give the name of a mapped function that it calls."],
        ),
        (
            _fail,
            "train_step",
            ["the program raised before it called 'train_step':", "KeyError: 'rows', at ",
             "test_runs.py:", "it called <lambda>: nothing else goes in", "Mend what it raised"],
        ),
        (
            _misspelled,
            "_stepp",
            ["the program came to its step before it called '_stepp':",
             "it called _step: another name", "Did you mean _step?"],
        ),
        (
            lambda: None,
            None,
            ["the program ended before it called a training step",
             "it called no function that jax.pmap or jax_dist.pmap has mapped"],
        ),
    ],
)  # fmt: skip
def test_a_program_without_such_a_step_says_what_it_called(run, name, lines):
    with pytest.raises(UnsupportedError) as caught:
        step_of(run, name)

    text = textwrap.dedent(str(caught.value))
    assert [line for line in lines if line not in text] == []
