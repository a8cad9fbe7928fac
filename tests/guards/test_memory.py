"""What a step leaves in memory: counted by device, and named."""
# ruff: noqa: PT012 - a guarded block is more than one statement

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import memory_guard
from jax_dist.errors import MemoryGrowthError
from jax_dist.memory import measure_memory

_SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("i",)), P("i"))


@pytest.fixture(autouse=True)
def _no_garbage_collection():
    """Else garbage is freed within a step, which then seems to leave less."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_is_left_is_named_by_device_and_type():
    kept = []
    with pytest.raises(MemoryGrowthError) as caught, memory_guard():
        kept.append(jax.device_put(np.ones((2, 3), np.float32), _SPLIT))
        kept.append(jnp.ones(5))

    assert str(caught.value) == (
        "device 0 holds 32 bytes more, device 1 holds 12 bytes more after a step, at "
        f"tests/guards/test_memory.py:{sys._getframe().f_lineno - 6}\nNew arrays: "
        "1 float32[2,3], 1 float32[5]. Drop them, donate the state, or fetch them with "
        "jax.device_get."
    )


def _cycle(kept):
    ring = [jnp.ones(4)]
    ring.append(ring)


def _donating_step(kept):
    kept[0] = jax.jit(lambda x: x + 1, donate_argnums=0)(kept[0])


def _keys_and_deleted(kept):
    jnp.ones(3).delete()
    kept[0] = jax.random.split(jax.random.key(0), 1)[0]


@pytest.mark.parametrize("act", [_cycle, _donating_step, _keys_and_deleted])
def test_what_is_no_growth(act):
    kept = [jnp.zeros(8)]
    for _ in range(2):
        with memory_guard():
            act(kept)


def test_garbage_of_before_hides_no_growth():
    kept = []
    _cycle(kept)
    with pytest.raises(MemoryGrowthError, match="holds 12 bytes more"), memory_guard():
        kept.append(jnp.ones(3))


def test_two_arrays_of_one_buffer_count_once():
    x = jax.device_put(np.ones((2, 3), np.float32), _SPLIT)
    before = measure_memory()[0]
    shards = [shard.data for shard in x.addressable_shards]
    assert (measure_memory()[0], len(shards)) == (before, 2)


def test_slack_is_in_bytes_and_the_first_call_the_warm_up():
    kept = []
    with memory_guard(slack=12):
        kept.append(jnp.ones(3))
    with pytest.raises(MemoryGrowthError), memory_guard(slack=11):
        kept.append(jnp.ones(3))
    step = memory_guard()(lambda: kept.append(jnp.ones(3)))
    step()
    step()
    with pytest.raises(MemoryGrowthError):
        step()


def test_results_that_replace_those_of_the_call_before_are_no_growth():
    step = jax.jit(lambda state, batch: (state + batch, (state * batch).sum()), donate_argnums=0)
    train, state, batch = memory_guard()(step), jnp.ones(4), jnp.ones(4)
    losses = []
    for _ in range(4):
        state, loss = train(state, batch)
    with pytest.raises(MemoryGrowthError, match="holds 4 bytes more"):
        for _ in range(3):
            state, loss = train(state, batch)
            losses.append(loss)


def test_an_exception_passes_and_guards_nest_in_all_threads():
    kept, guard = [], memory_guard()
    with pytest.raises(KeyError), guard:
        kept.append(jnp.ones(3))
        raise KeyError("x")

    def work():
        with guard, guard:
            pass

    with guard, ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("options", [{"slack": -1}, {"warmup": -2}, {"warmup": 1.5}])
def test_negative_options_are_errors(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number from 0 on"):
        memory_guard(**options)
