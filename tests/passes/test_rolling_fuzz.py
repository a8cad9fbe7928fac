"""Random programs of straight lines, with loops of Python planted in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_dist.passes.rolling import plan_rolling

pytestmark = pytest.mark.rewriting

OPERATIONS = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: jnp.maximum(x, -y),
    lambda x, y: jnp.where(x > y, x, y * 0.5),
    lambda x, y: jnp.roll(x, 1) - y,
    lambda x, y: x.at[1].set(y[0]),
)

STEP = st.tuples(
    st.sampled_from(range(len(OPERATIONS))),
    st.integers(0, 5),  # which of the recent values
    st.integers(0, 5),
    st.sampled_from(["value", "row", "next row", "number", "count"]),
)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "steps": draw(st.lists(STEP, min_size=2, max_size=6)),
        "copies": draw(st.integers(4, 7)),
        "another": draw(st.none() | st.tuples(st.integers(0, 6), STEP)),
        "kept": draw(st.integers(1, 4)),
    }


def evaluate(program: dict[str, Any], rows: jax.Array) -> list[jax.Array]:
    """Values stay between -1 and 1: `tanh` after each step, so that rounding does not grow."""
    values = [rows[0], rows[1] * 0.5, rows[2] - 1]
    for copy in range(program["copies"]):
        steps = list(program["steps"])
        if program["another"] is not None and program["another"][0] == copy:
            steps[-1] = program["another"][1]
        for operation, left, right, kind in steps:
            recent = values[-1 - left % min(len(values), 6)]
            other = {
                "value": values[-1 - right % min(len(values), 6)],
                "row": rows[right],
                "next row": rows[(copy + right) % len(rows)],
                "number": jnp.float32(right),
                "count": jnp.full(3, copy * 0.25),
            }[kind]
            made = OPERATIONS[operation](recent, jnp.broadcast_to(other, (3,)))
            values.append(jax.lax.cond(made[0] > 9, jnp.cos, jnp.tanh, made))
    return values[:: -program["kept"]]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(programs())
def test_random_loops_give_the_same_numbers(program: dict[str, Any]):
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    jaxpr = jax.make_jaxpr(lambda rows: evaluate(program, rows))(rows)
    plan = plan_rolling(jaxpr)
    if plan.evaluate is None:
        return

    found = jax.jit(plan.evaluate)(rows)

    for one, other in zip(found, jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, rows), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_most_of_the_random_loops_are_rolled():
    """So that the test above compares something."""
    step = (0, 0, 1, "next row")
    program = {"steps": [step, (1, 1, 0, "value")], "copies": 6, "another": None, "kept": 1}
    plan = plan_rolling(jax.make_jaxpr(lambda rows: evaluate(program, rows))(np.ones((8, 3))))

    assert plan.evaluate is not None
