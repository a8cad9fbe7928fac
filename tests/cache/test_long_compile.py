"""Two processes whose program takes longer to compile than a collective waits for the other."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import cache
from jax_dist.testing import Outcome, run_processes

LAYERS = 2200  # about a minute on the two cores where this was written
PATIENCE = 30.0  # seconds that gloo lets a process wait for the others


def train(folder: str, stock: bool, layers: int) -> dict[str, object]:  # noqa: FBT001
    """Runs in every process: one step, with a sum over all devices at its end."""
    if stock:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    else:
        cache.enable(folder)
    mesh = Mesh(np.array(jax.devices()), ("i",))

    def step(x):
        for i in range(layers):
            x = jnp.tanh(x @ x + i)
        return jax.lax.psum(x.sum(), "i")

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("i"), out_specs=P()))
    sharding = jax.sharding.NamedSharding(mesh, P("i"))
    x = jax.make_array_from_callback((4 * 8, 8), sharding, lambda _: np.zeros((8, 8), np.float32))
    with cache.stats() as seen:
        start = time.monotonic()
        compiled = mapped.lower(x).compile()
        seconds = time.monotonic() - start
    return {
        "hits": seen.hits,
        "written": seen.written,
        "seconds": seconds,
        "value": float(np.asarray(compiled(x).addressable_data(0))),
    }


def train_twice(folder: str) -> dict[str, dict[str, object]]:
    """A small program: with JAX alone, then, in a folder of its own, with us."""
    return {
        "stock": train(f"{folder}/stock", stock=True, layers=2),
        "ours": train(f"{folder}/ours", stock=False, layers=2),
    }


@pytest.fixture
def all_passes(monkeypatch):
    """The other tests leave out most of XLA's passes, and then this compiles in seconds."""
    monkeypatch.delenv("XLA_FLAGS")


def _run(folder, *, stock: bool):
    return run_processes(
        train, str(folder), stock, LAYERS, processes=2, cpu_devices=2, timeout=900.0
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[list[Outcome], list[Outcome]]:
    """With cold caches, and with warm ones."""
    folder = str(tmp_path_factory.mktemp("caches"))
    cold, warm = (
        run_processes(train_twice, folder, processes=2, cpu_devices=2, timeout=300.0)
        for _ in range(2)
    )
    assert [outcome.error for outcome in (*cold, *warm)] == [None] * 4
    return cold, warm


@pytest.mark.thorough
def test_every_process_hits(runs):
    cold, warm = ([outcome.value["ours"] for outcome in each] for each in runs)

    assert [each["written"] for each in cold] == [1, 1]
    assert [each["hits"] for each in warm] == [1, 1]
    assert len({each["value"] for each in (*cold, *warm)}) == 1


@pytest.mark.thorough
def test_jax_alone_leaves_the_second_process_without(runs):
    _, warm = runs

    assert [outcome.value["stock"]["hits"] for outcome in warm] == [1, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("all_passes")
def test_a_program_that_compiles_for_longer_than_gloo_waits(tmp_path):
    cold = _run(tmp_path / "ours", stock=False)
    warm = _run(tmp_path / "ours", stock=False)

    assert [outcome.error for outcome in (*cold, *warm)] == [None] * 4
    assert min(outcome.value["seconds"] for outcome in cold) > PATIENCE
    assert [outcome.value["hits"] for outcome in warm] == [1, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("all_passes")
def test_jax_alone_crashes_in_the_warm_run(tmp_path):
    cold = _run(tmp_path / "stock", stock=True)
    warm = _run(tmp_path / "stock", stock=True)

    assert [outcome.error for outcome in cold] == [None, None]
    assert any("Gloo context initialization failed" in outcome.output for outcome in warm) or any(
        "Gloo context initialization failed" in str(outcome.error) for outcome in warm
    )
