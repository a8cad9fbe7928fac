"""How often a training loop is compiled, beside `jax.pmap`, whatever came before it."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from watching import compilations, mesh

import jax_dist

pytestmark = pytest.mark.mapping

_BATCH = np.ones((8, 4), np.float32)


def _tree(make: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        "params": {"w": make(np.ones((8, 3, 4), np.float32)), "b": make(np.zeros((8, 3), "f"))},
        "step": make(np.zeros(8, np.int32)),
    }


_FIRST_STATES = {
    "numpy": lambda: _tree(np.copy),
    "jnp": lambda: _tree(jnp.asarray),
    "committed": lambda: _tree(lambda x: jax.device_put(x, jax.devices()[0])),
    "stacked": lambda: _tree(lambda x: jax_dist.device_put_sharded(list(x), jax.devices())),
    "restored": lambda: _tree(lambda x: jax.device_put(x, NamedSharding(mesh("data"), P("data")))),
}


def _step(state: dict, batch: jax.Array) -> tuple[dict, dict]:
    """A state in a tuple with metrics."""

    def loss(params: dict) -> jax.Array:
        return jnp.sum((params["w"] @ batch + params["b"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    gradient = lax.pmean(gradient, "i")
    params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], gradient)
    return {"params": params, "step": state["step"] + 1}, {"loss": lax.pmean(value, "i")}


def _evaluate(state: dict, batch: jax.Array) -> jax.Array:
    return lax.pmean(jnp.sum(state["params"]["w"] @ batch), "i")


def _nothing(step: Any, first: Callable) -> None:
    pass


def _lowered(step: Any, first: Callable) -> None:
    step.lower(first(), _BATCH)


def _traced(step: Any, first: Callable) -> None:
    if hasattr(step, "trace"):
        step.trace(first(), _BATCH)


def _another_shape(step: Any, first: Callable) -> None:
    step.lower(first(), np.ones((8, 4, 2), np.float32)[..., 0])


_BEFORE = {"nothing": _nothing, "lower": _lowered, "trace": _traced, "shape": _another_shape}


def _compilations(
    pmap: Callable, first: Callable, before: Callable, *, donated: bool, evaluates: bool
) -> tuple[int, Any]:
    """Of the step and the evaluation together, in three rounds."""

    def train(state: dict, batch: jax.Array) -> Any:
        return _step(state, batch)

    def evaluate(state: dict, batch: jax.Array) -> Any:
        return _evaluate(state, batch)

    step = pmap(train, "i", donate_argnums=0 if donated else ())
    evaluation = pmap(evaluate, "i")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax.pmap warns of NumPy that is donated
        before(step, first)
        state = first()
        with compilations("train", "evaluate", "_fun") as count:  # the last is jax.pmap
            for _ in range(3):
                state, metrics = step(state, _BATCH)
                if evaluates:
                    evaluation(state, _BATCH)
        return count(), (state, metrics)


@pytest.mark.parametrize("before", _BEFORE)
@pytest.mark.parametrize("first", _FIRST_STATES)
def test_a_loop_compiles_once(first: str, before: str):
    for donated, evaluates in ((False, True), (True, False)):
        ours, result = _compilations(
            jax_dist.pmap,
            _FIRST_STATES[first],
            _BEFORE[before],
            donated=donated,
            evaluates=evaluates,
        )
        assert ours == 1 + evaluates, f"donated: {donated}, evaluates: {evaluates}"
        assert np.asarray(result[0]["step"]).tolist() == [3] * 8


@pytest.mark.parametrize("first", ["numpy", "jnp", "stacked"])  # the others it refuses, or moves
def test_a_loop_compiles_half_as_often_as_with_jax_pmap(first: str):
    for donated in (False, True):
        counts = [
            _compilations(pmap, _FIRST_STATES[first], _nothing, donated=donated, evaluates=False)
            for pmap in (jax_dist.pmap, jax.pmap)
        ]
        (ours, our_result), (theirs, their_result) = counts
        assert ours <= theirs
        jax.tree.map(np.testing.assert_array_equal, our_result, their_result)
