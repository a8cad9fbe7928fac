"""How far a reduction may move a result, by dtype; docs/rewriting.md states the same bounds."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import program_of
from gather_checks import mesh_of, planned, rewritten_leaves
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist

pytestmark = pytest.mark.rewriting

# In units in the last place of 1, the size of the terms, or of the largest element if larger.
BOUNDS = {"float32": 4, "float64": 4, "bfloat16": 0, "float16": 0}
BATCH = 10


@pytest.fixture(params=BOUNDS)
def dtype(request: pytest.FixtureRequest) -> Iterator[np.dtype]:
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.mark.thorough
def test_results_stay_within_the_bound(dtype: np.dtype):
    assert max(_differences(range(10), dtype, exact=False)) <= BOUNDS[dtype.name]


@pytest.mark.slow
def test_results_of_more_programs_stay_within_the_bound(dtype: np.dtype):
    for first in range(10, 200, 10):
        found = _differences(range(first, first + BATCH), dtype, exact=False)
        assert max(found) <= BOUNDS[dtype.name], first


def test_exact_changes_no_bit(dtype: np.dtype):
    assert max(_differences(range(10), dtype, exact=True)) == 0


def test_some_programs_are_rewritten_in_each_mode(dtype: np.dtype):
    """Else the bounds would say nothing."""
    programs = [program_of(seed, dtype) for seed in range(40)]
    reduced = [planned(each.function, each.x).evaluate for each in programs]
    assert sum(evaluate is not None for evaluate in reduced) >= 10


@pytest.mark.parametrize(
    ("order", "reduced"),
    [
        ("any", lambda x: jnp.max(lax.all_gather(x, "i"), 0)),
        ("any", lambda x: jnp.min(lax.all_gather(x, "i", tiled=True))),
        ("any", lambda x: jnp.sum(lax.all_gather((x * 9).astype(jnp.int32), "i"), 0)),
        ("its own", lambda x: jnp.sum(lax.all_gather(x, "i"), 0)),
        ("its own", lambda x: jnp.mean(lax.all_gather(x, "i"))),
        ("its own", lambda x: jax.nn.logsumexp(lax.all_gather(x, "i"), 0)),
    ],
)
def test_exact_takes_what_no_order_can_change(order: str, reduced: Any):
    mesh = mesh_of(i=8)
    function = jax.shard_map(reduced, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)
    x = jnp.linspace(0.0, 1.0, 64).reshape(8, 8)
    assert planned(function, x).evaluate is not None
    assert (planned(function, x, exact=True).evaluate is not None) == (order == "any")
    before = jax.jit(function)(x)
    after = jax.jit(rewritten_leaves(function, exact=True))(x)[0]
    np.testing.assert_array_equal(np.asarray(after), np.asarray(before))


@pytest.mark.parametrize("options", [{}, {"tiled": True}])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_what_a_gather_rounded_stays_rounded(name: str, options: dict[str, bool]):
    """Without the gather XLA would keep float32 between tanh and the sum."""

    def body(block: jax.Array) -> jax.Array:
        narrow = jnp.tanh(block.astype(name))
        return lax.all_gather(narrow, "i", axis=1, **options).astype(jnp.float32).sum()

    x = np.random.default_rng(0).normal(size=(8, 4, 64)).astype(np.float32)
    kept = jax_dist.pmap(body, axis_name="i", gathers="keep")
    reduced = jax_dist.pmap(body, axis_name="i")
    assert "all-gather" not in reduced.lower(x).compile().as_text()
    np.testing.assert_allclose(reduced(x), kept(x), rtol=4 * np.finfo(np.float32).eps)


def _differences(seeds: range, dtype: Any, *, exact: bool) -> list[float]:
    """Of each result, in units in the last place of 1, or of its largest element.

    Ten programs share a mesh and are compiled as one.
    """
    if len(seeds) > BATCH:
        parts = (seeds[first : first + BATCH] for first in range(0, len(seeds), BATCH))
        return [found for part in parts for found in _differences(part, dtype, exact=exact)]
    programs = [program_of(seed, dtype) for seed in seeds]

    def before(xs: list[jax.Array]) -> list[Any]:
        return [each.function(x) for each, x in zip(programs, xs, strict=True)]

    def after(xs: list[jax.Array]) -> list[Any]:
        changed = [rewritten_leaves(each.function, exact=exact) for each in programs]
        return [function(x) for function, x in zip(changed, xs, strict=True)]

    xs = [each.x for each in programs]
    wanted, found = (jax.tree.leaves(jax.jit(every)(xs)) for every in (before, after))
    epsilon = float(jnp.finfo(dtype).eps)
    return [
        float(np.max(np.abs(a - b)) / (epsilon * np.max(np.abs(b), initial=1.0)))
        for ours, theirs in zip(found, wanted, strict=True)
        for a, b in [(np.asarray(ours, np.float64), np.asarray(theirs, np.float64))]
    ]
