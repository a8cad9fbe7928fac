"""How often a training loop is compiled, whatever came before it."""

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
    "replicated": lambda: _tree(lambda x: jax.device_put(x, NamedSharding(mesh("i"), P()))),
    "stacked": lambda: _tree(lambda x: jax_dist.device_put_sharded(list(x), jax.devices())),
    "restored": lambda: _tree(lambda x: jax.device_put(x, NamedSharding(mesh("data"), P("data")))),
}


def _step(state: dict, batch: jax.Array) -> tuple[dict, dict]:
    """Return a state in a tuple with metrics."""

    def loss(params: dict) -> jax.Array:
        return jnp.sum((params["w"] @ batch + params["b"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    gradient = lax.pmean(gradient, "i")
    params = jax.tree.map(lambda p, g: p - 0.01 * g, state["params"], gradient)
    return {"params": params, "step": state["step"] + 1}, {"loss": lax.pmean(value, "i")}


def _evaluate(state: dict, batch: jax.Array) -> jax.Array:
    return lax.pmean(jnp.sum(state["params"]["w"] @ batch), "i")


_BEFORE = {
    "nothing": lambda step, state: None,
    "lower": lambda step, state: step.lower(state, _BATCH),
    "trace": lambda step, state: step.trace(state, _BATCH),
    "shape": lambda step, state: step.lower(state, np.ones((8, 4, 2), np.float32)[..., 0]),
}


@pytest.mark.parametrize("before", _BEFORE)
@pytest.mark.parametrize("first", _FIRST_STATES)
def test_a_loop_compiles_once(first: str, before: str):
    for donated, evaluates in ((False, True), (True, False)):

        def train(state: dict, batch: jax.Array) -> Any:
            return _step(state, batch)

        def evaluate(state: dict, batch: jax.Array) -> Any:
            return _evaluate(state, batch)

        step = jax_dist.pmap(train, "i", donate_argnums=0 if donated else ())
        evaluation = jax_dist.pmap(evaluate, "i")
        _BEFORE[before](step, _FIRST_STATES[first]())
        state = _FIRST_STATES[first]()
        with compilations("train", "evaluate") as count:
            for _ in range(3):
                state, _ = step(state, _BATCH)
                if evaluates:
                    evaluation(state, _BATCH)

        assert count() == 1 + evaluates, f"donated: {donated}, evaluates: {evaluates}"
        assert np.asarray(state["step"]).tolist() == [3] * 8
