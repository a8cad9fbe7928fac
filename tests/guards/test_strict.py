"""The guard as a whole: when it is on, for whom, what it costs, and that it is gone afterwards."""

import contextlib
import gc
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import forget, functions_entered, refused, text

import jax_dist
from jax_dist.errors import DonationError, RecompileError, TransferError
from jax_dist.guards.strict import allow_recompiles, allow_transfers, strict

_ON_HOST = np.ones(4, np.float32)


def new_step():
    """As new to JAX in each test."""

    def step(state, batch):
        return state + batch.sum()

    return jax.jit(step, donate_argnums=0)


@jax.jit
def double(x):
    return 2 * x


def is_guarded():
    """Whether an array of the host is refused here."""
    try:
        double(_ON_HOST)
    except TransferError:
        forget()
        return True
    return False


double(_ON_HOST)


# ---- the warm-up ----


def test_a_training_loop_is_written_as_usual():
    step, state, batches = new_step(), jnp.zeros(3), [jnp.ones(4)] * 10

    with strict() as guard:
        for batch in guard.steps(batches):
            state = step(state, batch)

    assert state.tolist() == [40.0, 40.0, 40.0]


@pytest.mark.parametrize(("warmup", "guarded"), [(None, [0, 1, 1]), (0, [1, 1, 1]), (2, [0, 0, 1])])
def test_the_first_steps_are_the_warm_up(warmup, guarded):
    with strict(warmup=warmup) as guard:
        assert [is_guarded() for _ in guard.steps(range(3))] == [bool(each) for each in guarded]
        assert is_guarded()


def test_a_loop_left_in_the_warm_up_leaves_the_rest_of_the_block_guarded():
    with strict() as guard:
        for _ in guard.steps(range(3)):
            break
        assert is_guarded()


@pytest.mark.parametrize(("warmup", "guarded"), [(None, [1, 1, 1]), (2, [0, 0, 1])])
def test_a_block_entered_again_is_the_next_step(warmup, guarded):
    guard, seen = strict(warmup=warmup), []

    for _ in range(3):
        with guard:
            seen.append(is_guarded())

    assert seen == [bool(each) for each in guarded]


def test_the_first_call_of_a_decorated_function_is_the_warm_up():
    @strict()
    def train(step, state):
        """Trains."""
        return step(state, jnp.ones(4)), is_guarded()

    step = new_step()
    state, first = train(step, jnp.zeros(3))
    _, second = train(step, state)

    assert (first, second) == (False, True)
    assert (train.__name__, train.__doc__) == ("train", "Trains.")


def test_donation_is_not_looked_at_in_the_warm_up():
    step = jax.jit(lambda x: 2 * x, donate_argnums=0)

    with strict() as guard:
        for number in guard.steps(range(2)):
            if number == 0:
                step(np.ones(4))  # a first state may come from the host


# ---- each part on its own ----


@pytest.mark.parametrize("part", ["transfers", "recompiles", "donation"])
def test_a_part_alone(part):
    only = {"transfers": False, "recompiles": False, "donation": False} | {
        part: "first" if part == "donation" else True
    }
    unused = jax.jit(lambda a, b: a + 1, donate_argnums=(0, 1))
    said = []

    with strict(**only):
        for name, act in {
            "transfers": lambda: float(jnp.float32(1.5)),
            "recompiles": lambda: jax.jit(lambda x: x - 1)(_ON_HOST if part != "transfers" else 1),
            "donation": lambda: unused(*jax.device_put((np.ones(4), np.ones(4)))),
        }.items():
            try:
                act()
            except (TransferError, RecompileError, DonationError) as error:
                forget()
                said.append((name, type(error).__name__))

    names = {"transfers": "TransferError", "recompiles": "RecompileError"}
    expected = [(part, names.get(part, "DonationError"))]
    if part == "recompiles":
        expected.append(("donation", "RecompileError"))  # its first call is one
    assert said == expected


# ---- in and out, in any order ----


def test_an_exception_in_the_block_passes_and_ends_the_guard():
    with pytest.raises(KeyError), strict():
        raise KeyError("x")

    assert not is_guarded()


def test_inner_guards_leave_the_outer_one_on():
    with strict():
        with strict(transfers=False):
            assert is_guarded()
        assert is_guarded()
        with allow_transfers():
            assert not is_guarded()
            with strict():
                assert is_guarded()
            assert not is_guarded()
        assert is_guarded()
    assert not is_guarded()


def test_a_guard_may_be_entered_inside_itself():
    guard = strict()
    with guard:
        with guard:
            assert is_guarded()
        assert is_guarded()
    assert not is_guarded()


def test_guards_may_end_in_any_order():
    def block(guard):
        with guard:
            yield

    first, second = block(strict()), block(strict())
    next(first)
    next(second)
    first.close()
    assert is_guarded()
    second.close()
    assert not is_guarded()

    first, allowed = block(strict()), block(allow_transfers())
    next(first)
    next(allowed)
    first.close()
    assert not is_guarded()
    allowed.close()
    assert not is_guarded()
    assert jax.config.jax_transfer_guard_host_to_device in (None, "allow")


def test_what_the_user_said_to_jax_comes_back():
    with jax.transfer_guard("log"):
        with strict():
            pass
        assert jax.config.jax_transfer_guard_host_to_device == "log"


def _generator():
    yield 1


async def _coroutine():
    return 1


async def _asynchronous_generator():
    yield 1


@pytest.mark.parametrize("fun", [_generator, _coroutine, _asynchronous_generator])
def test_what_pauses_is_refused(fun):
    with pytest.raises(TypeError) as error:
        strict()(fun)

    assert str(error.value) == text(f"""
        strict cannot guard a generator or a coroutine:
          * {fun.__name__} is one
        Because others run in the same thread between its parts.
        Decorate the function that does one step, or use a block without await and yield in it.
    """)


# ---- threads ----


def in_a_thread(act):
    results = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()
    thread.join()
    return results[0]


def test_other_threads_are_free():
    def freely():
        compiled = jax.jit(lambda x: x + 3)(_ON_HOST)
        return is_guarded(), float(compiled[0]), np.asarray(compiled).tolist()

    with strict():
        assert in_a_thread(freely) == (False, 4.0, [4.0] * 4)
        assert is_guarded()


def test_a_guard_stays_when_another_thread_leaves_its_own():
    def guarded():
        with strict():
            return is_guarded()

    ones = jnp.ones(3)  # compiled before: that is not what is refused here
    with strict():
        assert in_a_thread(guarded)
        assert is_guarded()
        with refused(TransferError):
            np.asarray(ones)
    assert not is_guarded()


def test_a_guard_that_another_thread_ends_is_off_in_its_own():
    def block(guard):
        with guard:
            yield

    generator = block(strict())
    next(generator)
    assert is_guarded()
    in_a_thread(generator.close)

    assert not is_guarded()
    assert float(jnp.float32(2.5)) == 2.5
    with strict():
        assert is_guarded()
    assert not is_guarded()


def test_one_guard_in_many_threads():
    train = strict(warmup=0)(lambda: is_guarded())
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.extend(train() for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == [True] * 80


# ---- cost, and what is kept ----


def test_a_steady_call_runs_no_python_of_ours():
    step, state, batch = new_step(), [jnp.zeros(3)], jnp.ones(4)
    counts = []

    with strict() as guard:
        for _ in guard.steps(range(8)):
            counts.append(functions_entered(lambda: state.append(step(state.pop(), batch))))

    assert [count > 0 for count in counts] == [True] * 4 + [False] * 4


def test_each_block_looks_anew():
    step, state, batch = new_step(), [jnp.zeros(3)], jnp.ones(4)

    def looked_at():
        call = lambda: state.append(step(state.pop(), batch))
        with strict(recompiles=False):
            return [functions_entered(call) > 0 for _ in range(6)]

    assert looked_at() == [True, True, True, True, False, False]
    assert looked_at() == [True, True, True, False, False, False]


def test_a_function_that_comes_late_is_looked_at():
    step, late, state = new_step(), new_step(), [jnp.zeros(3)]
    batch = jnp.ones(4)
    jax.block_until_ready(late(jnp.zeros(3), batch))

    def call(which):
        return functions_entered(lambda: state.append(which(state.pop(), batch))) > 0

    with strict() as guard:
        for _ in guard.steps(range(6)):
            call(step)
        assert not call(step)
        assert [call(late) for _ in range(5)] == [True, True, True, False, False]


def test_functions_and_arrays_may_die():
    step, state = new_step(), jnp.zeros(3)
    function = weakref.ref(step.__wrapped__)
    with strict() as guard:
        for batch in guard.steps([jnp.ones(4)] * 3):
            state = step(state, batch)
    arrays = [weakref.ref(state), weakref.ref(batch)]

    step.clear_cache()
    del step, state, batch
    gc.collect()

    assert [array() for array in arrays] == [None, None]
    assert function() is None


@pytest.mark.parametrize("donate", [(), 0])
def test_jax_dist_pmap_is_steady(donate):
    step = jax_dist.pmap(lambda s, b: s + b.sum(), axis_name="i", donate_argnums=donate)
    state = jnp.zeros((8, 3))  # misplaced, for the first call
    if donate != 0:  # not donated, it is not moved to its place, but another program compiled
        state = jax_dist.shard(state, mesh(), P("i"))
    batches = [jax_dist.shard(np.ones((8, 2), np.float32), mesh(), P("i")) for _ in range(6)]

    with strict(donation="always" if donate == 0 else False) as guard:
        for batch in guard.steps(batches):
            state = step(state, batch)

    assert jax.device_get(state).tolist() == [[12.0] * 3] * 8


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()), ("i",))


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="rewrite needs 0.10")
def test_rewrite_is_steady():
    table = jnp.arange(3.0)
    step = jax_dist.rewrite(jax.jit(lambda s, b: s + table * b.sum()), captures="lift")
    state, batches = jnp.zeros(3), [jnp.ones(2)] * 6

    with strict() as guard:
        for batch in guard.steps(batches):
            state = step(state, batch)

    assert jax.device_get(state).tolist() == [0.0, 12.0, 24.0]


# ---- words ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"donation": True},
            """
            strict got an unknown donation:
              * donation=True
            Because it is "first", "always" or False.
            Leave it out to look at the first calls.
            """,
        ),
        (
            {"warmup": -1},
            """
            strict got an unknown warmup:
              * warmup=-1
            Because it is a number of steps.
            Leave it out for one step, or give a whole number from 0 on.
            """,
        ),
    ],
)
def test_options_that_mean_nothing(options, message):
    with pytest.raises(ValueError, match="strict got") as error:
        strict(**options)

    assert str(error.value) == text(message)


def test_steps_belong_into_a_block():
    with pytest.raises(RuntimeError) as error:
        strict().steps([1])

    assert str(error.value) == text("""
        steps of a guard were asked for outside of its block:
          * steps(...)
        Because the guard is on in its block only.
        Write `with strict() as guard:` around, and loop over guard.steps(...) in it.
    """)


def test_what_only_jax_has_seen_is_said_in_our_words():
    jax_says = "INVALID_ARGUMENT: Disallowed device-to-host transfer: shape=(3)"

    with refused(TransferError) as error, strict():
        jnp.zeros(3)
        raise jax.errors.JaxRuntimeError(jax_says)

    line = error.value.__cause__.__traceback__.tb_lineno
    first, *rest = str(error.value).splitlines()
    where = f"tests/guards/test_strict.py:{line}"
    assert first == f"An array would move without being asked to, at {where}:"
    assert rest == [
        "  * device-to-host transfer: shape=(3)",
        "Because strict lets arrays move only where the program says so.",
        "Use jax.device_put or jax.device_get, or `with jax_dist.allow_transfers():`.",
    ]


def test_the_message_is_the_last_thing_the_user_reads():
    with refused(TransferError) as error, strict():
        double(_ON_HOST)

    assert getattr(error.value, "__notes__", []) == []


def test_errors_in_a_traced_function_show_the_users_lines_only():
    def broken(x):
        raise KeyError("x")

    with pytest.raises(KeyError) as error, strict(recompiles=False):
        jax.jit(broken)(jnp.ones(3))

    names = [entry.name for entry in error.traceback]
    assert names == ["test_errors_in_a_traced_function_show_the_users_lines_only", "broken"]


def test_compiling_ahead_is_a_compilation_too():
    lowered = jax.jit(lambda x: x * 5).lower(jnp.ones(3))

    with strict():
        with refused(RecompileError, match="would be compiled after the warm-up"):
            lowered.compile()
        with allow_recompiles():
            lowered.compile()


@pytest.mark.skipif(jax.__version_info__ >= (0, 8), reason="pmap is a jit since, and seen as one")
def test_an_old_pmap_is_named_without_its_arguments():
    mapped = jax.pmap(lambda x: x + 7)
    x = np.ones((8, 2), np.float32)

    with strict(transfers=False), refused(RecompileError) as error:
        mapped(x)

    assert str(error.value).splitlines()[1] == "  * its arguments are not known here"


def test_an_exit_stack_may_hold_a_guard():
    with contextlib.ExitStack() as stack:
        stack.enter_context(strict())
        assert is_guarded()
    assert not is_guarded()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="memory of the CPU goes past all of Python")
def test_a_refusal_that_numpy_swallows_is_raised_at_the_end():
    x = jnp.ones(8)

    with pytest.raises(TransferError, match="read by"), strict():
        np.array_equal(x, x)


def test_a_refusal_that_is_swallowed_is_raised_at_the_end():
    x = jnp.ones(8)
    x[0]

    with pytest.raises(TransferError, match="read by float") as caught, strict():
        _swallow(x)

    assert any("has caught it" in note for note in getattr(caught.value, "__notes__", []))


def _swallow(x):
    try:
        return float(x[0])
    except Exception:  # noqa: BLE001, what users write
        return None


def test_a_refusal_that_is_swallowed_is_raised_by_the_next_call():
    x, double = jnp.ones(8), jax.jit(lambda x: x * 2)
    reached = []

    def block():
        reached.append(double(x[0]))
        _swallow(x)
        reached.append("after it")
        double(x[0])
        reached.append("after the call")

    block()
    reached.clear()
    with pytest.raises(TransferError, match="float"), strict():
        block()

    assert reached[1:] == ["after it"]


def test_a_refusal_that_is_swallowed_is_raised_by_the_next_step():
    x, taken = jnp.ones(8), []

    def block(steps):
        for step in steps:
            taken.append(step)
            _swallow(x)

    x[0]
    with pytest.raises(TransferError, match="float"), strict(warmup=1) as guard:
        block(guard.steps(range(5)))

    assert taken == [0, 1]


def test_a_refusal_is_not_raised_twice():
    x, cleaned = jnp.ones(8), []

    def block():
        try:
            float(x[0])
        finally:
            cleaned.append(x * 2)  # a call on the way out of a refusal

    block()
    with pytest.raises(TransferError) as caught, strict(), strict():
        block()

    assert len(cleaned) == 2
    assert not any("has caught it" in note for note in getattr(caught.value, "__notes__", []))
    assert float(x[0]) == 1


def test_another_error_shows_the_refusal_that_led_to_it():
    x = jnp.ones(8)

    x[0]
    with pytest.raises(TransferError) as caught, strict():
        assert _swallow(x) == 1

    assert isinstance(caught.value.__context__, AssertionError)


def test_an_error_that_wraps_a_refusal_does_not_hide_it():
    x = jnp.ones(8)

    def wrapped():
        try:
            float(x[0])
        except TransferError as error:
            raise KeyError("loss") from error

    x[0]
    with pytest.raises(TransferError) as caught, strict():
        wrapped()

    assert isinstance(caught.value.__context__, KeyError)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_block_that_another_thread_ends_leaves_nothing_behind(end):
    def guarded():
        with strict():
            yield

    x = jnp.ones(7)
    parts = [guarded()]
    next(parts[0])
    thread = threading.Thread(target=parts[0].close if end == "close" else parts.clear)
    thread.start()
    thread.join()
    parts.clear()
    gc.collect()

    jax.jit(lambda x: x * 3)(x)  # compiles
    assert float(x[0]) == 1
    jax.jit(lambda x: x * 4)(x)
    assert float(jnp.ones(5)[0]) == 1
    assert np.array_equal(x, x)
