"""Several processes share a cache: with `enable`, each finds what it compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import cache
from jax_dist.testing import run_processes


def train(folder: str) -> dict[str, tuple[int, int, float]]:
    """Return hits, written programs and the result in this process, with jax alone and with us."""
    jax.config.update("jax_compilation_cache_dir", f"{folder}/jax")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    results = {"jax": _step()}
    cache.enable(f"{folder}/ours")
    return results | {"ours": _step()}


def _step() -> tuple[int, int, float]:
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def step(x):
        return jax.lax.psum(jnp.tanh(x @ x).sum(), "i")

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("i"), out_specs=P()))
    sharding = NamedSharding(mesh, P("i"))
    x = jax.make_array_from_callback((32, 8), sharding, lambda _: np.zeros((8, 8), np.float32))
    with cache.stats() as seen:
        compiled = mapped.lower(x).compile()
    return seen.hits, seen.written, float(np.asarray(compiled(x).addressable_data(0)))


@pytest.mark.thorough
def test_every_process_hits(tmp_path):
    cold, warm = (
        run_processes(train, str(tmp_path), processes=2, cpu_devices=2, timeout=300.0)
        for _ in range(2)
    )

    assert [outcome.error for outcome in (*cold, *warm)] == [None] * 4
    assert [outcome.value["ours"] for outcome in cold] == [(0, 1, 0.0)] * 2
    assert [outcome.value["ours"] for outcome in warm] == [(1, 0, 0.0)] * 2
    assert [outcome.value["jax"][0] for outcome in warm] == [1, 0]  # what enable() is for
