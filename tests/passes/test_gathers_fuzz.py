"""Random programs keep their values; docs/rewriting.md states the bounds of rounding."""

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


def leaves_of(function: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
    return lambda x: jax.tree.leaves(function(x))


def exactly(function: Callable[..., Any]) -> Callable[..., list[jax.Array]]:
    return rewritten_leaves(function, exact=True)


def squares(function: Callable[..., Any]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: sum((jnp.sum(leaf**2) for leaf in function(x)), jnp.zeros(()))


def run_all(
    seeds: Iterable[int], change: Callable[..., Any], dtype: Any = jnp.float32, every: int = 0
) -> list[list[np.ndarray]]:
    """Return the values of each program; of one of `every`, gradients before and after `change`."""
    programs = [program_of(seed, dtype) for seed in seeds]

    def run(xs: list[jax.Array]) -> list[list[jax.Array]]:
        results = [change(function)(x) for (function, _), x in zip(programs, xs, strict=True)]
        for number in range(0, len(programs), every) if every else ():
            (function, _), x = programs[number], xs[number]
            results[number] += change(jax.grad(squares(function)))(x)
            results[number] += [jax.grad(squares(change(function)))(x)]
        return results

    values = jax.jit(run)([x for _, x in programs])
    return [[np.asarray(leaf, np.float64) for leaf in leaves] for leaves in values]


@pytest.mark.thorough
@pytest.mark.parametrize("first", IN_EVERY_RUN[::BATCH])
def test_programs_keep_their_values(first: int):
    """Overflows and NaNs, too, must be the same before and after."""
    seeds = range(first, first + BATCH)
    actual, wanted = (run_all(seeds, change, every=5) for change in (rewritten_leaves, leaves_of))
    for seed, *both in zip(seeds, actual, wanted, strict=True):
        for ours, theirs in zip(*both, strict=True):
            scale = 1 + np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0)
            np.testing.assert_allclose(ours, theirs, 0, TOLERANCE * scale, err_msg=str(seed))


def test_a_good_part_of_the_programs_is_rewritten():
    """Else the other tests would say nothing."""
    plans = [planned(*program_of(seed)) for seed in IN_EVERY_RUN]
    assert sum(plan.jaxpr is not None for plan in plans) >= 25


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOUNDS)
def test_results_stay_within_the_bound_of_rounding(name: str):
    with jax.enable_x64(name == "float64"):
        dtype = jnp.dtype(name)
        wanted = run_all(range(BATCH), leaves_of, dtype)
        for change, bound in ((exactly, 0), (rewritten_leaves, BOUNDS[name])):
            for both in zip(run_all(range(BATCH), change, dtype), wanted, strict=True):
                for ours, theirs in zip(*both, strict=True):
                    unit = float(jnp.finfo(dtype).eps) * np.max(np.abs(theirs), initial=1)
                    assert np.max(np.abs(ours - theirs)) <= bound * unit
