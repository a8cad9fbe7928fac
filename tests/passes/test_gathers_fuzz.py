"""Random programs keep their values; docs/rewriting.md states the bounds of rounding."""

from collections.abc import Callable
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
    seeds = range(first, first + BATCH)
    plain = lambda function: lambda x: jax.tree.leaves(function(x))
    changed, wanted = (run_all(seeds, change) for change in (rewritten_leaves, plain))
    for seed, *pair in zip(seeds, changed, wanted, strict=True):
        assert all(map(close, *pair)), seed


def test_a_good_part_of_the_programs_is_rewritten():
    """Else the other tests would say nothing."""
    plans = [planned(one.function, one.x) for one in map(program_of, IN_EVERY_RUN)]
    assert sum(plan.jaxpr is not None for plan in plans) >= 25


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
    unit = float(jnp.finfo(dtype).eps) * np.max(np.abs(b), initial=1)
    return float(np.max(np.abs(a - b)) / unit)


def close(ours: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether values are equal; what overflows, or is no number, must do so in both."""
    scale = 1 + np.max(np.abs(wanted[np.isfinite(wanted)]), initial=0.0)
    return ours.shape == wanted.shape and np.allclose(
        ours, wanted, rtol=0, atol=TOLERANCE * scale, equal_nan=True
    )


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
