"""Random programs keep their values; docs/rewriting.md states the bounds of rounding."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import program_of
from gather_checks import planned, rewritten_leaves

BATCH = 10  # programs compiled as one
IN_EVERY_RUN = range(60)
TOLERANCE = 1e-4  # of values of about 1, summed over up to 4000 elements in another order
# In units in the last place of 1, the size of the terms, or of the largest element if larger.
BOUNDS = {"float32": 4, "float64": 4, "bfloat16": 0, "float16": 0}

Leaves = list[list[np.ndarray]]  # by program


@pytest.mark.thorough
@pytest.mark.parametrize("first", IN_EVERY_RUN[::BATCH])
def test_programs_keep_their_values(first: int):
    assert wrong(range(first, first + BATCH)) == []


def test_a_good_part_of_the_programs_is_rewritten():
    """Else the other tests would say nothing."""
    programs = [program_of(seed) for seed in IN_EVERY_RUN]
    changed = [planned(program.function, program.x).jaxpr is not None for program in programs]
    assert sum(changed) >= 25


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOUNDS)
def test_results_stay_within_the_bound_of_rounding(name: str):
    with jax.enable_x64(name == "float64"):
        dtype = jnp.dtype(name)
        programs = [program_of(seed, dtype) for seed in range(BATCH)]
        inputs = [program.x for program in programs]
        wanted = jax.jit(lambda xs: [p.function(x) for p, x in zip(programs, xs, strict=True)])
        for exact, bound in ((True, 0), (False, BOUNDS[name])):
            changed = [rewritten_leaves(program.function, exact=exact) for program in programs]
            actual = jax.jit(lambda xs: [f(x) for f, x in zip(changed, xs, strict=True)])  # noqa: B023
            pairs = zip(*map(jax.tree.leaves, (actual(inputs), wanted(inputs))), strict=True)
            assert max(_units(dtype, *pair) for pair in pairs) <= bound


def _units(dtype: Any, actual: jax.Array, wanted: jax.Array) -> float:
    a, b = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return float(
        np.max(np.abs(a - b)) / (float(jnp.finfo(dtype).eps) * np.max(np.abs(b), initial=1))
    )


def wrong(seeds: Iterable[int]) -> list[int]:
    """Return the seeds of the programs whose values the pass changes."""
    seeds = tuple(seeds)
    triples = zip(seeds, run_all(seeds, rewritten_leaves), plain_values(seeds), strict=True)
    return [seed for seed, ours, wanted in triples if not all(map(close, ours, wanted))]


def close(ours: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether values are equal; what overflows, or is no number, must do so in both."""
    scale = 1 + np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)
    return ours.shape == wanted.shape and np.allclose(
        ours, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True
    )


@functools.cache
def plain_values(seeds: tuple[int, ...]) -> Leaves:
    return run_all(seeds, lambda function: lambda x: jax.tree.leaves(function(x)))


def run_all(seeds: tuple[int, ...], change: Callable[[Any], Any]) -> Leaves:
    """Return values, and gradients where a program has some: before the pass and after it."""
    programs = [program_of(seed) for seed in seeds]

    def every(xs: list[jax.Array]) -> list[list[jax.Array]]:
        return [
            change(program.function)(x)
            + (gradients(program.function, change, x) if program.differentiable else [])
            for program, x in zip(programs, xs, strict=True)
        ]

    values = jax.jit(every)([program.x for program in programs])
    return [[np.asarray(leaf) for leaf in leaves] for leaves in values]


def gradients(function: Any, change: Callable[[Any], Any], x: jax.Array) -> list[jax.Array]:
    def squares(changed: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: sum((jnp.sum(leaf**2) for leaf in changed(x)), jnp.zeros(()))

    before = change(jax.grad(squares(function)))(x)
    return [*before, jax.grad(squares(change(function)))(x)]
