"""Programs with pmaps inside, rewritten, in real processes: equal to one process with 8 devices.

The children run `rows`, which reports the slices that each process holds; the parent joins them in
the order of processes. Without rewriting, such programs reduce over the devices of one process.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from process_rows import assert_equal, held_slices, own_slices, values_of

import jax_dist
from jax_dist import explain, rewrite
from tests.array_classes import Counter


def _programs(pmap: Callable) -> dict[str, Callable]:
    """By name: functions of `[local devices]`, to be rewritten."""
    total = pmap(lambda x: lax.psum(x, "i"), "i")
    mean = pmap(lambda x: lax.pmean(x, "i") + x / 8, "i")
    square = pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    scaled = pmap(lambda x, scale: x - scale * lax.pmean(x, "i"), "i", in_axes=(0, None))
    table, key = jnp.arange(800.0).reshape(8, 100), jax.random.key(3)
    there = jax.device_put(jnp.full((300,), 0.5), jax.local_devices()[-1])
    index = lambda: lax.axis_index("i")
    drawn = lambda: jax.random.uniform(jax.random.fold_in(key, index()))
    return {
        "jit of a pmap": jax.jit(total),
        "scan": lambda x: lax.scan(lambda c, _: (mean(c), None), x, None, length=2)[0],
        "while": lambda x: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (mean(c[0]), c[1] + 1), (x, 0)
        )[0],
        "cond": lambda x: lax.cond(x.shape[0] > 1, total, lambda x: x, x),
        "grad": jax.grad(lambda x: square(x).sum()),
        "shared argument": lambda x: lax.fori_loop(0, 3, lambda _, c: scaled(c, 0.5), x),
        "gathered": lambda x: pmap(lambda x: lax.all_gather(x, "i").mean() + x, "i")(x),
        "captured": lambda x: pmap(lambda x: lax.psum(x, "i") * table[index(), 1], "i")(x),
        "a captured key": lambda x: pmap(lambda x: x + drawn(), "i")(x),
        "a counter": lambda x: pmap(lambda c: lax.psum(c.low, "i"), "i")(Counter(x)),
        "captured on a device": lambda x: pmap(lambda x: x + there.sum(), "i")(x),
    }


def rows() -> dict[str, list]:
    """Run in every process: each row the slices that it holds of the result."""
    warnings.filterwarnings("ignore", "JXD401")
    mesh = Mesh(np.array(jax.devices()), ("data",))
    total = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    calls = {
        "on a mesh": rewrite(lambda x: total(x), mesh=mesh),
        "grad of rewritten": jax.grad(lambda x: rewrite(lambda x: total(x) ** 2)(x).sum()),
    }
    for pmap in (jax.pmap, jax_dist.pmap):
        for name, fun in _programs(pmap).items():
            calls[f"{name}, {pmap.__module__}"] = rewrite(fun)
    return {name: held_slices(call(own_slices())) for name, call in calls.items()}


def rows_and_reports() -> tuple[dict[str, list], dict[str, Any]]:
    return rows(), reports()


def test_all_rows_equal_one_process_with_eight_devices():
    several, one = [value for value, _ in values_of(rows_and_reports, processes=2)], rows()

    assert_equal(several, one)
    # Without rewriting, jax.pmap under jit sums over one process: 6 and 22.
    assert one[f"jit of a pmap, {jax.pmap.__module__}"] == [28.0] * 8


def reports() -> dict[str, Any]:
    """Run in every process: what is told, and what is refused."""
    total = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    stale = jax.jit(lambda x: total(x) * 2)
    stale(own_slices())  # remembers the devices of this process
    stale_inside = lambda x: stale(x) + 1
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # its text is compared below
        rewrite(stale_inside)(own_slices())
    stale.clear_cache()
    findings = explain(jax.jit(lambda x: total(x)), own_slices()).findings
    return {
        "refused": str(refused.value),
        "after clear_cache": held_slices(rewrite(stale_inside)(own_slices())),
        "told": [(f.code, f.outcome, f.what) for f in findings],
    }


def test_what_an_inner_jit_remembers_is_an_error():
    what = "jax.pmap over 'i' of size 8: a shard_map over all processes"
    refused = r"(?s).*jax.pmap over 'i' at .*test_rewrite_in_processes.py:.*clear_cache\(\)"

    for _, report in values_of(rows_and_reports, processes=2):
        assert re.match(refused, report["refused"])
        assert report["after clear_cache"] == [57.0] * 4
        assert report["told"] == [("JXD002", "rewritten", what)]
