"""Drawn programs in two processes: values, shapes and shardings of jax.pmap."""

import pathlib
import sys

import pytest

from jax_dist.testing import run_processes

pytestmark = pytest.mark.mapping


def compare(first: int, last: int) -> list[str]:
    """Runs in every process: what differs from jax.pmap, by program."""
    import jax  # noqa: PLC0415  # in the children alone
    import numpy as np  # noqa: PLC0415

    sys.path.append(str(pathlib.Path(__file__).parents[1] / "pmap"))
    from drawn_programs import draw_results  # noqa: PLC0415

    import jax_dist  # noqa: PLC0415

    def attempt(pmap, seed):
        body, out_axes = draw_results(seed)
        local = jax.local_device_count()
        rows = np.arange(4.0 * jax.device_count(), dtype=np.float32).reshape(-1, 4)
        x = rows[jax.process_index() * local :][:local] / 16
        try:
            return pmap(body, "i", out_axes=out_axes)(x)
        except Exception as error:  # noqa: BLE001
            return type(error).__name__

    def describe(leaf):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        sharding = str(leaf.sharding.spec), [d.id for d in leaf.sharding.mesh.devices.flat]
        values = np.asarray(leaf).tolist()
        return leaf.shape, str(leaf.dtype), leaf.weak_type, sharding, repr(values)

    differences = []
    for seed in range(first, last):
        theirs, ours = attempt(jax.pmap, seed), attempt(jax_dist.pmap, seed)
        if isinstance(theirs, str) or isinstance(ours, str):
            same = isinstance(theirs, str) and isinstance(ours, str) and theirs == ours
        else:
            same = jax.tree.structure(theirs) == jax.tree.structure(ours)
            pairs = zip(jax.tree.leaves(theirs), jax.tree.leaves(ours), strict=True)
            same = same and all(describe(a) == describe(b) for a, b in pairs)
        if not same:
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

    assert [outcome.value or outcome.error for outcome in outcomes] == [[], []]
