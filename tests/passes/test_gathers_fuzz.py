"""Random programs keep their values; and the comparison sees it where a rule is broken."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import program_of
from gather_checks import planned, rewritten_leaves

from jax_dist._rewrite import gather_rules, gathers

pytestmark = pytest.mark.rewriting

BATCH = 10  # programs compiled as one
IN_EVERY_RUN = range(60)
TOLERANCE = 1e-4  # of values of about 1, summed over up to 4000 elements in another order

Leaves = list[list[np.ndarray]]  # by program


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 60, BATCH))
def test_programs_keep_their_values(first: int):
    assert wrong(range(first, first + BATCH)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(60, 460, BATCH))
def test_more_programs_keep_their_values(first: int):
    assert wrong(range(first, first + BATCH)) == []


def test_a_good_part_of_the_programs_is_rewritten():
    """Else the other tests would say nothing."""
    programs = [program_of(seed) for seed in IN_EVERY_RUN]
    changed = [planned(program.function, program.x).evaluate is not None for program in programs]
    assert sum(changed) >= 25


@pytest.mark.thorough
def test_without_the_test_for_sameness_the_numbers_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gathers._Body, "same_of", lambda self, _: self.scope)
    assert any(wrong(range(first, first + BATCH)) for first in IN_EVERY_RUN[::BATCH])


@pytest.mark.thorough
def test_without_the_test_for_major_dimensions_the_numbers_are_wrong(
    monkeypatch: pytest.MonkeyPatch,
):
    def first_that_fits(old: Any, new: Any, first: Any) -> int | None:
        del old
        return next((dim for dim, length in enumerate(new) if length % first.size == 0), None)

    monkeypatch.setattr(gather_rules, "_major_dimension", first_that_fits)
    assert any(wrong(range(first, first + BATCH)) for first in IN_EVERY_RUN[::BATCH])


def wrong(seeds: Iterable[int]) -> list[int]:
    """The seeds of the programs whose values the pass changes."""
    seeds = tuple(seeds)
    found = run_all(seeds, rewritten_leaves)
    return [
        seed
        for seed, ours, wanted in zip(seeds, found, plain_values(seeds), strict=True)
        if not all(map(close, ours, wanted))
    ]


def close(ours: np.ndarray, wanted: np.ndarray) -> bool:
    """What overflows, or is no number, must do so in both."""
    scale = 1 + np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)
    return ours.shape == wanted.shape and np.allclose(
        ours, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True
    )


@functools.cache
def plain_values(seeds: tuple[int, ...]) -> Leaves:
    return run_all(seeds, lambda function: lambda x: jax.tree.leaves(function(x)))


def run_all(seeds: tuple[int, ...], change: Callable[[Any], Any]) -> Leaves:
    """Values, and gradients where a program has some: before the pass and after it."""
    programs = [program_of(seed) for seed in seeds]

    def every(xs: list[jax.Array]) -> list[list[jax.Array]]:
        return [
            change(program.function)(x)
            + (gradients(program.function, change, x) if program.differentiable else [])
            for program, x in zip(programs, xs, strict=True)
        ]

    found = jax.jit(every)([program.x for program in programs])
    return [[np.asarray(leaf) for leaf in leaves] for leaves in found]


def gradients(function: Any, change: Callable[[Any], Any], x: jax.Array) -> list[jax.Array]:
    def squares(changed: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: sum((jnp.sum(leaf**2) for leaf in changed(x)), jnp.zeros(()))

    before = change(jax.grad(squares(function)))(x)
    return [*before, jax.grad(squares(change(function)))(x)]
