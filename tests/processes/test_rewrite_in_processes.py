"""Programs with pmaps inside, rewritten, in real processes: equal to one process with 8 devices.

The children run `rows`, which reports the slices that each process holds; the parent joins them in
the order of processes. Without rewriting, such programs reduce over the devices of one process.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jax_dist
from jax_dist import explain, rewrite
from jax_dist.testing import run_processes


def _own() -> np.ndarray:
    """Return the slices of this process of 0 to 7."""
    local = jax.local_device_count()
    start = jax.process_index() * local
    return np.arange(start, start + local, dtype=np.float32)


def _slices(tree: Any) -> list:
    """Return the values on the devices of this process, in order."""
    (array,) = jax.tree.leaves(tree)
    parts = {shard.index[0].start or 0: shard.data.tolist() for shard in array.addressable_shards}
    return [value for _, part in sorted(parts.items()) for value in part]


def _programs(pmap: Callable) -> dict[str, Callable]:
    """By name: functions of `[local devices]`, to be rewritten."""
    total = pmap(lambda x: lax.psum(x, "i"), "i")
    mean = pmap(lambda x: lax.pmean(x, "i") + x / 8, "i")
    square = pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    gathered = pmap(lambda x: jnp.mean(lax.all_gather(x, "i")) + x, "i")
    scaled = pmap(lambda x, scale: x - scale * lax.pmean(x, "i"), "i", in_axes=(0, None))
    table, key = jnp.arange(800.0).reshape(8, 100), jax.random.key(3)
    there = jax.device_put(jnp.full((300,), 0.5), jax.local_devices()[-1])
    index = lambda: lax.axis_index("i")
    drawn = lambda: jax.random.uniform(jax.random.fold_in(key, index()))
    scan = lambda step, x: lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]
    return {
        "jit of a pmap": jax.jit(total),
        "jit in a jit": jax.jit(lambda x: jax.jit(total)(x) * 2),
        "scan": lambda x: scan(mean, x),
        "while": lambda x: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (mean(c[0]), c[1] + 1), (x, 0)
        )[0],
        "cond": lambda x: lax.cond(x.shape[0] > 1, total, lambda x: x, x),
        "grad": jax.grad(lambda x: square(x).sum()),
        "grad of a scan": jax.grad(lambda x: scan(lambda c: jnp.sin(mean(c)), x).sum()),
        "two pmaps": lambda x: total(mean(x) * 2),
        "shared argument": lambda x: lax.fori_loop(0, 3, lambda _, c: scaled(c, 0.5), x),
        "gathered": lambda x: gathered(x),
        "captured": lambda x: pmap(lambda x: lax.psum(x, "i") * table[index(), 1], "i")(x),
        "a captured key": lambda x: pmap(lambda x: x + drawn(), "i")(x),
        "captured on a device": lambda x: pmap(lambda x: x + there.sum(), "i")(x),
    }


def rows() -> dict[str, list]:
    """Run in every process: each row the slices that it holds of the result."""
    warnings.filterwarnings("ignore", "JXD401")
    found = {}
    for pmap in (jax.pmap, jax_dist.pmap):
        for name, fun in _programs(pmap).items():
            found[f"{name}, {pmap.__module__}"] = _slices(rewrite(fun)(_own()))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    total = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    found["on a mesh"] = _slices(rewrite(lambda x: total(x), mesh=mesh)(_own()))
    found["grad of rewritten"] = _slices(
        jax.grad(lambda x: rewrite(lambda x: total(x) ** 2)(x).sum())(_own())
    )
    return found


def rows_and_reports() -> dict[str, Any]:
    return {"rows": rows(), "reports": reports()}


@pytest.fixture(scope="module")
def values() -> list[dict[str, Any]]:
    """Return the report of each process."""
    outcomes = run_processes(rows_and_reports, processes=2, cpu_devices=4, timeout=240)
    assert [outcome.error for outcome in outcomes] == [None, None]
    return [outcome.value for outcome in outcomes]


def test_all_rows_equal_one_process_with_eight_devices(values):
    one = rows()

    assert all(set(value["rows"]) == set(one) for value in values)
    for row, expected in one.items():
        several = [slice_ for value in values for slice_ in value["rows"][row]]
        np.testing.assert_allclose(several, expected, rtol=1e-5, err_msg=row)
    # Without rewriting, jax.pmap under jit sums over one process: 6 and 22.
    assert one[f"jit of a pmap, {jax.pmap.__module__}"] == [28.0] * 8


def reports() -> dict[str, Any]:
    """Run in every process: what is told, and what is refused."""
    total = jax.pmap(lambda x: lax.psum(x, "i"), "i")
    stale = jax.jit(lambda x: total(x) * 2)
    stale(_own())  # remembers the devices of this process
    stale_inside = lambda x: stale(x) + 1
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # its text is compared below
        rewrite(stale_inside)(_own())
    stale.clear_cache()
    findings = explain(jax.jit(lambda x: total(x)), _own()).findings
    return {
        "refused": str(refused.value),
        "after clear_cache": _slices(rewrite(stale_inside)(_own())),
        "told": [(f.code, f.outcome, f.what) for f in findings],
    }


def test_what_an_inner_jit_remembers_is_an_error(values):
    for value in (value["reports"] for value in values):
        assert "jax.pmap over 'i' at " in value["refused"]
        assert "test_rewrite_in_processes.py:" in value["refused"]
        assert "clear_cache()" in value["refused"]
        assert value["after clear_cache"] == [57.0] * 4
        assert value["told"] == [
            ("JXD002", "rewritten", "jax.pmap over 'i' of size 8: a shard_map over all processes")
        ]
