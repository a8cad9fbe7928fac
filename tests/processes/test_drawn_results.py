"""Drawn programs in two processes: values, shapes and shardings of jax.pmap."""

import pathlib
import sys

import pytest

from jax_dist.testing import run_processes


def compare(first: int, last: int) -> list[str]:
    """Run in every process: what differs from jax.pmap, by program."""
    import jax  # in the children alone
    import numpy as np

    sys.path.append(str(pathlib.Path(__file__).parents[1] / "pmap"))
    from test_drawn_programs import draw_results

    import jax_dist

    def describe(pmap, seed):
        """Return all that a caller sees of the results, or the type of the error."""
        body, out_axes = draw_results(seed)
        local = jax.local_device_count()
        rows = np.arange(4.0 * jax.device_count(), dtype=np.float32).reshape(-1, 4)
        x = rows[jax.process_index() * local :][:local] / 16
        options = {} if pmap is jax.pmap else {"gathers": "keep"}
        try:
            results = pmap(body, "i", out_axes=out_axes, **options)(x)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__
        return [describe_leaf(leaf) for leaf in jax.tree.leaves(results)]

    def describe_leaf(leaf):
        sharding = leaf.sharding
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        shards = [(s.device.id, s.index[: leaf.ndim]) for s in leaf.addressable_shards]
        placed = str(sharding.spec), [d.id for d in sharding.mesh.devices.flat], str(shards)
        return leaf.shape, str(leaf.dtype), leaf.weak_type, placed, repr(np.asarray(leaf).tolist())

    differences = []
    for seed in range(first, last):
        theirs, ours = describe(jax.pmap, seed), describe(jax_dist.pmap, seed)
        if theirs != ours:
            differences.append(f"program {seed}: {ours}, with jax.pmap {theirs}")
        if seed % 20 == 19:
            jax.clear_caches()
    return differences


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 12), *(pytest.param(k, k + 100, marks=pytest.mark.slow) for k in range(0, 500, 100))],
)
def test_drawn_programs_in_two_processes_are_as_with_jax_pmap(first: int, last: int):
    outcomes = run_processes(
        compare, first, last, processes=2, cpu_devices=2, timeout=60 + 3 * (last - first)
    )

    assert [(outcome.value, outcome.error) for outcome in outcomes] == [([], None)] * 2
