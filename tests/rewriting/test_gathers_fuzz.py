"""The cases and random programs keep their values; docs/rewriting.md states the bounds of rounding.

All programs of a test are compiled as one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import program_of
from gather_cases import CASES
from jax.sharding import PartitionSpec as P
from observing import assert_close, mesh_of, numbers, plan_for, rewrite_gathers

Function = Callable[[jax.Array], Any]
Change = Callable[[Function], Function]

BATCH = 10
IN_EVERY_RUN = range(60)
TOLERANCE = 1e-4  # of values of about 1, summed over up to 4000 elements in another order
# In units in the last place of 1, the size of the terms, or of the largest element if larger.
BOUNDS = {"float32": 4, "float64": 4, "bfloat16": 0, "float16": 0}


def values_of(functions: Sequence[Function], xs: Sequence[jax.Array], change: Change) -> list:
    """Return what each function gives of its argument after a change."""
    run = lambda xs: [jax.tree.leaves(change(f)(x)) for f, x in zip(functions, xs, strict=True)]
    return [[np.asarray(leaf) for leaf in leaves] for leaves in jax.jit(run)(xs)]


def gradient(function: Function) -> Function:
    """Return the gradient of half the sum of squares of what a function gives."""

    def loss(x: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(function(x))
        return sum((jnp.sum(leaf.astype(jnp.float32) ** 2) / 2 for leaf in leaves), jnp.zeros(()))

    return jax.grad(loss)


# A transformation, and the same with the pass before or after it.
MODES: dict[str, tuple[Change, Change]] = {
    "plain": (lambda f: f, rewrite_gathers),
    "vmap before": (jax.vmap, lambda f: rewrite_gathers(jax.vmap(f))),
    "vmap after": (jax.vmap, lambda f: jax.vmap(rewrite_gathers(f))),
    "grad before": (gradient, lambda f: rewrite_gathers(gradient(f))),
    "grad after": (gradient, lambda f: gradient(rewrite_gathers(f))),
}
THOROUGH = (
    (4, False, "plain"),
    (4, True, "vmap before"),
    (8, False, "grad after"),
    (8, True, "plain"),
    (8, True, "grad before"),
)
RUNS = [
    pytest.param(*run, marks=pytest.mark.thorough if run in THOROUGH else pytest.mark.slow)
    for run in itertools.product((4, 8), (False, True), MODES)
]


@pytest.mark.parametrize(("devices", "check_vma", "mode"), RUNS)
def test_cases_keep_their_values(devices: int, mode: str, *, check_vma: bool):
    is_gradient = mode.startswith("grad")
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    cases = {
        name: case
        for name, case in CASES.items()
        if (case.typed or not check_vma) and (case.differentiable or not is_gradient)
    }
    on_devices = lambda body: jax.shard_map(body, mesh=mesh_of(i=devices), **specs)
    functions = [on_devices(case.body) for case in cases.values()]
    x = numbers(devices * 2, 3)
    xs = [jnp.stack([x, x - 1]) if mode.startswith("vmap") else x] * len(cases)

    wanted, actual = (values_of(functions, xs, change) for change in MODES[mode])
    for (name, case), *both in zip(cases.items(), actual, wanted, strict=True):
        for ours, theirs in zip(*both, strict=True):
            # A gradient is a sum of sums, even of what is exact itself.
            assert_close(ours, theirs, max(case.tolerance, 2e-6 * is_gradient), name)


@pytest.mark.thorough
@pytest.mark.parametrize("first", IN_EVERY_RUN[::BATCH])
def test_programs_keep_their_values(first: int):
    """Overflows and NaNs, too, must be the same before and after; of every fifth, gradients."""
    seeds = range(first, first + BATCH)
    for mode, step in (("plain", 1), ("grad before", 5), ("grad after", 5)):
        functions, xs = zip(*map(program_of, seeds[::step]), strict=True)
        wanted, actual = (values_of(functions, xs, change) for change in MODES[mode])
        for seed, *both in zip(seeds[::step], actual, wanted, strict=True):
            for ours, theirs in zip(*both, strict=True):
                scale = 1 + np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0)
                np.testing.assert_allclose(ours, theirs, 0, TOLERANCE * scale, err_msg=str(seed))


def test_a_good_part_of_the_programs_is_rewritten():
    """Else the other tests would say nothing."""
    plans = [plan_for(*program_of(seed)) for seed in IN_EVERY_RUN]
    assert sum(plan.jaxpr is not None for plan in plans) >= 25


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOUNDS)
def test_results_stay_within_the_bound_of_rounding(name: str):
    exactly = lambda function: rewrite_gathers(function, exact=True)
    with jax.enable_x64(name == "float64"):
        programs = [program_of(seed, jnp.dtype(name)) for seed in range(BATCH)]
        functions, xs = zip(*programs, strict=True)
        wanted = values_of(functions, xs, lambda function: function)
        for change, bound in ((exactly, 0), (rewrite_gathers, BOUNDS[name])):
            for both in zip(values_of(functions, xs, change), wanted, strict=True):
                for ours, theirs in zip(*both, strict=True):
                    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
                    unit = float(jnp.finfo(name).eps) * np.max(np.abs(theirs), initial=1)
                    assert np.max(np.abs(ours - theirs)) <= bound * unit
