"""What a step leaves in memory: counted by device, and named."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import said_by, text

from jax_dist.errors import MemoryGrowthError
from jax_dist.guards.memory import memory_guard, memory_now

_CUT = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("i",)), P("i"))


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_of_other_tests() -> None:
    """Else it is freed within a step, and the step seems to leave less."""
    gc.collect()
    gc.freeze()  # what they keep need not be searched at each of the collections to come


@pytest.fixture(autouse=True)
def _no_garbage_of_the_last_test() -> None:
    gc.collect()


def guarded(act, **options):
    with memory_guard(**options):
        return act()


def test_what_is_left_is_named_by_device_and_kind():
    kept = []

    @memory_guard(warmup=0)
    def step():
        kept.append(jax.device_put(np.ones((2, 3), np.float32), _CUT))
        kept.append(jnp.ones(5))

    act = lambda: step()
    with pytest.raises(MemoryGrowthError) as error:
        act()

    assert said_by(error, act) == text("""
        A step left more in memory than it found, at HERE:
          * device 0 holds 32 bytes more
          * device 1 holds 12 bytes more
          * 1 more of float32[2,3]
          * 1 more of float32[5]
        Because what each step adds fills the device in the end.
        Drop what the step no longer needs, donate its state, or fetch what you keep with \
jax.device_get.
    """)


def test_the_line_of_a_block_is_named():
    kept = []

    with pytest.raises(MemoryGrowthError, match=r"at tests/guards/test_memory_guard\.py:\d+:"):
        guarded(lambda: kept.append(jnp.ones(3)))


@pytest.mark.parametrize("donate", [(), 0])
def test_a_state_that_replaces_the_last_one_is_no_growth(donate):
    step = jax.jit(lambda x: x + 1, donate_argnums=donate)
    state = step(jnp.zeros(8))

    for _ in range(3):
        with memory_guard():
            state = step(state)


def test_what_python_will_collect_does_not_count():
    def cycle():
        ring = [jnp.ones(4)]
        ring.append(ring)

    gc.disable()
    try:
        guarded(cycle)
    finally:
        gc.enable()


def test_what_waits_before_the_step_hides_no_growth():
    kept = []
    ring = [jnp.ones(400)]
    ring.append(ring)
    gc.disable()
    try:
        del ring
        with pytest.raises(MemoryGrowthError, match="holds 12 bytes more"):
            guarded(lambda: kept.append(jnp.ones(3)))
    finally:
        gc.enable()


def test_two_arrays_of_one_buffer_count_once():
    x = jax.device_put(np.ones((2, 3), np.float32), _CUT)
    before = memory_now().used[0]

    shards = [shard.data for shard in x.addressable_shards]

    assert (memory_now().used[0], len(shards)) == (before, 2)


@pytest.mark.parametrize(("slack", "fits"), [(12, True), (11, False)])
def test_slack_is_in_bytes(slack, fits):
    kept = []
    try:
        guarded(lambda: kept.append(jnp.ones(3)), slack=slack)
    except MemoryGrowthError:
        assert not fits
    else:
        assert fits


def test_the_first_call_of_a_decorated_function_is_the_warm_up():
    kept = []

    @memory_guard()
    def step():
        kept.append(jnp.ones(3))

    step()
    with pytest.raises(MemoryGrowthError):
        step()


def test_an_exception_in_the_step_passes():
    kept = []

    def fails():
        kept.append(jnp.ones(3))
        raise KeyError("x")

    with pytest.raises(KeyError):
        guarded(fails)


def test_a_guard_in_a_guard_and_in_threads():
    guard = memory_guard()
    with guard, guard:
        pass
    threads = [threading.Thread(target=lambda: guard.__enter__().__exit__(None, None, None))] * 1
    for thread in threads:
        thread.start()
        thread.join()


def test_keys_and_deleted_arrays_are_no_trouble():
    key = jax.random.key(0)
    deleted = jnp.ones(3)
    deleted.delete()

    with memory_guard():
        key = jax.random.split(key, 1)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"slack": -1},
            """
            memory_guard got a negative slack:
              * slack=-1
            Because it is a number of bytes.
            Leave slack out, or give a number from 0 on.
            """,
        ),
        (
            {"warmup": -2},
            """
            memory_guard got a negative warmup:
              * warmup=-2
            Because it is a number of steps.
            Leave warmup out, or give a number from 0 on.
            """,
        ),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match="negative") as error:
        memory_guard(**options)

    assert str(error.value) == text(message)
