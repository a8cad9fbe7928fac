"""What goes through the parts of a container, where each of them was seen, loses the axis."""

from collections.abc import Callable
from typing import Any

import pytest
import recorded
from test_idiomatic_refused import numbers

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.results import Form

_ABOVE = """\
import collections

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils

S = np.arange(3.0, dtype=np.float32)


def step(state, batch):
    loss, grad = jax.value_and_grad(lambda s: ((batch - s) ** 2).mean())(state)
    grad = jax.lax.pmean(grad, "i")
    metrics = {"loss": jax.lax.pmean(loss, "i"), "size": jnp.abs(grad).sum()}
    return state - 0.1 * grad, metrics


p_step = jax.pmap(step, axis_name="i")


def batches():
    for seed in range(3):
        rows = np.random.default_rng(seed).normal(size=(jax.device_count(), 2, 3))
        yield rows.astype(np.float32)


def result():
    state = jax_utils.replicate(S)
    kept = []
    for batch in batches():
        state, metrics = p_step(state, batch)
        kept.append(metrics)
"""
_PROGRAMS = {
    "all entries": """\
    found = {}
    for name, value in metrics.items():
        found[name] = float(value[0])
""",
    "all entries, in order": """\
    found = [(len(name), float(value[0])) for name, value in sorted(metrics.items())]
""",
    "all values": """\
    found = [float(value[0]) for value in metrics.values()]
""",
    "by their names": """\
    found = {name: float(metrics[name][0]) for name in metrics}
""",
    "an entry that is written": """\
    found = float(metrics["loss"][0]), float(metrics.get("size")[0])
""",
    "the last of a list": """\
    found = float(kept[-1]["loss"][0]), float(kept.pop()["size"][0])
""",
    "all of a list": """\
    found = [float(each["loss"][0]) for each in kept]
""",
    "a field that is set again at once": """\
    class Kept:
        def __init__(self, weights):
            self.weights = weights
            self.weights = jax_utils.replicate(self.weights)
    weights = Kept(S).weights
    _, more = p_step(weights, batch)
    found = float(more["loss"][0]), weights[0]
""",
    "pairs of a list": """\
    pairs = [(number, each) for number, each in zip("abc", [m["loss"] for m in kept])]
    found = [float(value[0]) for _, value in pairs]
""",
}


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Any]) -> recorded.Recorded:
    pytest.importorskip("flax")
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    return recorded.once(made_once, {f"elements_{n}": _text(each) for n, each in _NUMBERED})


def _text(name: str) -> str:
    return f"{_ABOVE}{_PROGRAMS[name]}    return found, jax_utils.unreplicate(state)\n"


_NUMBERED = [*enumerate(_PROGRAMS)]


@pytest.mark.parametrize(("number", "name"), [pytest.param(*e, id=e[1]) for e in _NUMBERED])
def test_their_axis_goes(ran: recorded.Recorded, number: int, name: str):
    migrated = ran.migrated(f"elements_{number}")
    after = migrated.after.decode()

    reasons = [each.reason for each in migrated.outcomes]
    assert any(e.form is Form.IDIOMATIC and e.is_mapped for e in migrated.outcomes), reasons
    assert ("[0]" in after) == (name == "pairs of a list")  # what `zip` gives is not followed
    assert numbers(after) == numbers(_text(name))
