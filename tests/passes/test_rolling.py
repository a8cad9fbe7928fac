"""Unrolled loops become scans: how many equations are left, and the same numbers."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_checks import assert_close, lines
from jax import lax
from rolling_cases import CASES, ROWS, Case, carried, dense, episode, indexed, reads_two_back

from jax_dist.passes.findings import Plan
from jax_dist.passes.interpreter import equations
from jax_dist.passes.rolling import note_loops, plan_rolling

pytestmark = pytest.mark.rewriting


def planned(function: Callable[..., Any], *args: Any) -> Plan:
    return plan_rolling(jax.make_jaxpr(function)(*args))


def rolled(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function after the pass, as leaves."""

    def call(*args: Any) -> list[Any]:
        plan = planned(function, *args)
        assert plan.evaluate is not None, plan.findings
        return plan.evaluate(*jax.tree.leaves(args))

    return call


def count(function: Callable[..., Any], primitive: str, *args: Any) -> int:
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args))]
    return names.count(primitive)


def scans(function: Callable[..., Any], *args: Any) -> tuple[int, ...]:
    eqns = equations(jax.make_jaxpr(function)(*args))
    return tuple(eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan")


def plain(value: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def assert_same(function: Callable[..., Any], *args: Any, tolerance: float = 0.0) -> None:
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    found = jax.jit(rolled(function))(*args)
    for one, other in zip(found, wanted, strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        assert_close(plain(one), plain(other), tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_copy_is_left(case: Case):
    after = rolled(case.function)

    assert count(case.function, case.primitive, *case.args) == case.before
    assert count(after, case.primitive, *case.args) == case.after
    assert scans(after, *case.args) == case.scans


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_are_the_same(case: Case):
    assert_same(case.function, *case.args, tolerance=case.tolerance)


# ---- with JAX's transformations


def loss(rows: jax.Array) -> jax.Array:
    return jnp.sum(dense(rows) ** 2)


def test_a_rolled_loop_has_a_gradient():
    after = jax.grad(lambda rows: rolled(loss)(rows)[0])

    assert count(after, "sin", ROWS) < 15  # of 36, and as many in the gradient
    assert_close(jax.jit(after)(ROWS), jax.jit(jax.grad(loss))(ROWS), 1e-5)


def test_the_loops_of_a_gradient_are_rolled():
    gradient = jax.grad(loss)

    assert count(gradient, "cos", ROWS) == 36
    assert count(rolled(gradient), "cos", ROWS) <= 12
    assert_same(gradient, ROWS, tolerance=1e-5)


def test_under_vmap_before_and_after():
    batch = jnp.stack([ROWS, ROWS + 1])

    wanted = jax.jit(jax.vmap(indexed))(batch)
    after = jax.jit(jax.vmap(lambda rows: rolled(indexed)(rows)[0]))
    before = jax.jit(rolled(jax.vmap(indexed)))

    assert_close(after(batch), wanted, 1e-6)
    assert_close(before(batch)[0], wanted, 1e-6)
    assert count(after, "while", batch) == 1
    assert count(before, "while", batch) == 2  # the first sum gets its batch there


def test_own_rules_of_differentiation_are_kept():
    @jax.custom_jvp
    def twice(x: jax.Array) -> jax.Array:
        return x * 2

    twice.defjvp(lambda primals, tangents: (twice(*primals), tangents[0] * 10))

    def loop(rows: jax.Array) -> jax.Array:
        x = twice(rows[0])
        for row in rows:
            x = jnp.sin(x) * lax.cond(x[0] > 0, lambda x: x, jnp.cos, row)
        return twice(x).sum()

    assert scans(rolled(loop), ROWS) == (8,)
    wanted = jax.grad(loop)(ROWS)
    assert_close(jax.grad(lambda rows: rolled(loop)(rows)[0])(ROWS), wanted, 1e-6)


# ---- what is left


def test_a_first_copy_that_differs_is_peeled():
    """It adds a number to a sum that has another type until then."""

    def loop(rows: jax.Array) -> jax.Array:
        total = 0
        for row in rows:
            total = total + episode(row).sum()
        return jnp.asarray(total)

    assert scans(rolled(loop), ROWS) in ((7,), (8,))
    assert_same(loop, ROWS)


def test_a_copy_that_differs_cuts_the_loop():
    def loop(rows: jax.Array) -> list[jax.Array]:
        results = [episode(row) for row in rows[:4]]
        results.append(episode(jnp.cos(rows[4])))
        return results + [episode(row + 1) for row in rows]

    assert scans(rolled(loop), ROWS) == (4, 8)
    assert_same(loop, ROWS)


def test_copies_wired_otherwise_are_not_taken_for_copies():
    """From the fifth on, they read the row before: the same equations, but another program."""

    def loop(rows: jax.Array) -> jax.Array:
        x = y = rows[0]
        for number in range(8):
            x, y = jnp.sin(episode(x if number < 4 else y)), x
        return x

    assert scans(rolled(loop), ROWS) in ((4,), (4, 4))
    assert_same(loop, ROWS)


def test_slices_of_what_a_copy_makes_stay_in_it():
    """They start elsewhere in each copy: nothing was there before the loop to be cut."""

    def loop(rows: jax.Array) -> list[jax.Array]:
        return [jnp.cos(episode(rows * 2)[i]) for i in range(8)]

    assert planned(loop, ROWS).evaluate is None


def test_branches_that_slice_elsewhere_are_not_alike():
    def loop(rows: jax.Array) -> list[jax.Array]:
        return [
            lax.cond(row[0] > 0, lambda i=i: rows[i] * 2, lambda: rows[0])
            for i, row in enumerate(rows)
        ]

    assert planned(loop, ROWS).evaluate is None


REFUSALS = {
    "prints": "they print, call back or write, which JAX orders and counts as it is written",
    "reads two back": "their operands do not come from alike places in 4 copies in a row",
    "large": "to stack what they take and make needs 25.6 MB on a device, more than 16.0 MB",
}


def prints(rows: jax.Array) -> jax.Array:
    x = rows[0]
    for _ in range(5):
        x = episode(x)
        jax.debug.print("{}", x)
    return x


def large(rows: jax.Array) -> list[jax.Array]:
    return [episode(jnp.broadcast_to(row[:, None], (3, 266_667))) for row in rows]


@pytest.mark.parametrize("function", [prints, reads_two_back, large], ids=list(REFUSALS))
def test_refusals_have_reasons(function: Callable[..., Any], request: pytest.FixtureRequest):
    reason = REFUSALS[request.node.callspec.id]

    plan = planned(function, ROWS)

    assert plan.evaluate is None
    (refusal,) = plan.findings
    assert (refusal.code, refusal.outcome, refusal.why) == ("JXD407", "refused", reason)
    assert refusal.what.endswith("are kept")
    assert refusal.where.split(":")[0].endswith(("test_rolling.py", "rolling_cases.py"))


@pytest.mark.parametrize("copies", [3, 4])
def test_few_copies_stay(copies: int):
    plan = planned(lambda rows: [episode(row) for row in rows[:copies]], ROWS)

    assert (plan.evaluate is None) == (copies < 4)


@pytest.mark.parametrize("equations_in_copy", [18, 20])
def test_short_copies_without_a_loop_stay(equations_in_copy: int):
    def loop(rows: jax.Array) -> jax.Array:
        for number in range(5):
            for _ in range(equations_in_copy - 2):
                rows = jnp.sin(rows)
            rows = rows * number + 1.0
        return rows

    plan = planned(loop, ROWS)

    assert (plan.evaluate is None) == (equations_in_copy < 20)


def test_where_there_is_no_loop_it_says_what_one_is():
    assert lines(planned(jnp.sin, ROWS)) == [
        "noted: no unrolled loop is found; one has at least 4 equal copies, each with a loop or "
        "a branch in it, or with 20 equations"
    ]


COPIES = "6 copies of 3 equations: one scan"


def test_what_is_rolled_is_told_with_its_line():
    (finding,) = planned(carried, ROWS).findings

    assert (finding.outcome, finding.what) == ("rewritten", COPIES)
    line = carried.__code__.co_firstlineno
    assert finding.where.endswith(f"rolling_cases.py:{line + 3}")


def test_a_loop_that_is_kept_is_noted():
    (note,) = note_loops(jax.make_jaxpr(carried)(ROWS))

    assert (note.outcome, note.why) == ("noted", "")
    assert note.what == f"{COPIES}, with loops='roll'"
    assert note_loops(jax.make_jaxpr(jnp.sin)(ROWS)) == ()
    assert note_loops(jax.make_jaxpr(prints)(ROWS)) == ()


def test_the_largest_loop_is_rolled_before_a_smaller_one_in_it():
    (outer, inner) = planned(
        lambda rows: [episode(episode(episode(episode(row)))) for row in rows], ROWS
    ).findings

    assert outer.what.startswith("8 copies of ")
    assert inner.what.startswith("4 copies of ")


def test_slices_side_by_side_are_cut_out_in_one_piece():
    """Counted, so that no stack of eight slices comes instead."""
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(rolled(indexed))(ROWS))]

    assert names.count("stack") == names.count("concatenate") == 0


def test_the_program_is_the_same_every_time():
    texts = {
        jax.jit(rolled(case.function)).lower(*case.args).as_text()
        for case, _ in itertools.product([CASES[2]], range(3))
    }
    assert len(texts) == 1
