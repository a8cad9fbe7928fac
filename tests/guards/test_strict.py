"""The guards of a training loop: what they stop, in which words, and that they are gone after."""
# ruff: noqa: PT012 - a guarded block is more than one statement

import asyncio
import functools
import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import allow_recompiles, allow_transfers, memory_guard, strict
from jax_dist.errors import DonationError, RecompileError, TransferError

_FILE = "tests/guards/test_strict.py"
_MESH = Mesh(np.array(jax.devices()), ("i",))
_SPLIT = NamedSharding(_MESH, P("i"))
_X = jnp.ones(8)
_XS = jax.device_put(jnp.ones((8, 2)), _SPLIT)
_YS = jax.device_put(jnp.ones((8, 3)), _SPLIT)
_WHOLE = jax.device_put(jnp.ones((8, 2)), NamedSharding(_MESH, P()))
_INTS = jax.device_put(jnp.ones((8, 2), int), _SPLIT)
_HOST = {"y": np.ones((8, 2), np.float32)}

recompiles = functools.partial(strict, transfers=False, donation=False)
transfers = functools.partial(strict, recompiles=False, donation=False)
donations = functools.partial(strict, recompiles=False, transfers=False)


def step(x, batch=None, times=1):
    return times * (x if batch is None else x + batch["y"].sum())


negative = jax.jit(lambda x: -x)


def is_guarded():
    """Return whether an array of the host is stopped here."""
    try:
        negative(_HOST["y"])
    except jax.errors.JaxRuntimeError:
        return True
    return False


def here(offset=0):
    return f"{_FILE}:{sys._getframe(1).f_lineno + offset}"


@pytest.fixture(autouse=True)
def _compiled_before():
    is_guarded()


_JIT, _PMAPS, _BOTH = (jax.jit,), (jax.pmap, jax_dist.pmap), (jax.jit, jax_dist.pmap)
_BATCH, _LONGER, _TWO = {"y": _XS}, {"y": _YS}, {"y": _XS, "z": _XS}
_CHANGES = {  # what maps the function, its arguments before and now, and the error
    "shape": (_BOTH, (_XS, _BATCH), (_XS, _LONGER), "batch['y']: float32[8,2] -> float32[8,3]"),
    "type": (_BOTH, (_XS,), (_INTS,), "x: float32[8,2] -> int32[8,2]"),
    "new leaf": (_BOTH, (_XS, _BATCH), (_XS, _TWO), "batch['z'] is new"),
    "gone leaf": (_BOTH, (_XS, _TWO), (_XS, _BATCH), "batch['z'] is gone"),
    "nearest call": (_BOTH, (_INTS, _BATCH), (_INTS, _LONGER), "batch['y']: float32[8,2] -> "),
    "weak type": (_JIT, (jnp.float32(1),), (1.0,), "x: float32[] -> ~float32[]"),
    "sharding": (_JIT, (_XS,), (_WHOLE,), "x: NamedSharding(mesh=Mesh('i': 8"),
    "static value": (_JIT, (_X, None, 2), (_X, None, 3), "times: 2 -> 3"),
}


@pytest.mark.parametrize(
    ("mapped", "name"), [(mapped, name) for name in _CHANGES for mapped in _CHANGES[name][0]]
)
def test_the_changed_argument_is_named(mapped, name):
    _, before, now, change = _CHANGES[name]
    options = {"static_argnums": 2} if mapped is jax.jit else {}
    fun = mapped(lambda x, batch=None, times=1: step(x, batch, times), **options)

    fun(_X[:, None])
    fun(*before)

    with pytest.raises(RecompileError) as caught, recompiles():
        line = here(1)
        fun(*now)

    lines = str(caught.value).splitlines()
    assert lines[0] == f"'<lambda>' is compiled after the warm-up, at {line}:"
    assert lines[1].strip().startswith(change)
    assert len(lines) == 3


@pytest.mark.parametrize("mapped", _BOTH)
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: lambda x: x + 1, "<lambda>"), (lambda: functools.partial(step, times=2), "step")],
)
def test_a_function_made_anew_in_each_step_is_told_by_its_source(mapped, make, name):
    with pytest.raises(RecompileError) as caught, recompiles() as guard:
        for _ in guard.steps(range(3)):
            line = here(1)
            mapped(make())(_XS)

    source = (step if name == "step" else make).__code__.co_firstlineno
    assert str(caught.value) == (
        f"'{name}' is compiled after the warm-up, at {line}:\n"
        f"  a new function object is made at {_FILE}:{source} each time\n"
        "Create it once before the loop, or use jax_dist.allow_recompiles()."
    )


def test_other_compilations_are_stopped():
    lowered = jax.jit(lambda x: x * 5).lower(_X)
    with pytest.raises(RecompileError, match=r"'sinh' is [^*]* x: float32\[8,3\]"), recompiles():
        jnp.sinh(_YS)
    with pytest.raises(RecompileError), recompiles():
        lowered.compile()
    with pytest.raises(RecompileError, match=r"no earlier call[^*]* x: float32\[8\]"), recompiles():
        jax.jit(lambda x: x - 7)(_X)
    with pytest.raises(RecompileError, match="no argument differs: a setting"), recompiles():
        jax.default_matmul_precision("float32")(negative)(_HOST["y"])


def test_a_stopped_call_has_run_nothing_and_can_be_made_later():
    ran = []
    fun = jax.jit(lambda x: (jax.debug.callback(lambda: ran.append(1)), x + 1)[1])

    with pytest.raises(RecompileError), recompiles():
        fun(_X)
    jax.effects_barrier()
    assert not ran

    with recompiles():
        with allow_recompiles():
            fun(_X)
        fun(_X)


@pytest.mark.parametrize("mapped", _BOTH)
@pytest.mark.parametrize(
    "make", [lambda: {1: _X, "a": _X}, lambda: weakref.proxy(set())], ids=["no tree", "dead proxy"]
)
def test_only_errors_of_the_guard_are_raised_whatever_the_frames_hold(mapped, make):
    fun, local, host = mapped(lambda x: x + 2), make(), _HOST["y"]
    fun(_XS)
    fun(_XS)

    with pytest.raises(RecompileError), recompiles():
        fun(_YS)
    with pytest.raises(TransferError, match=r"host float32\[8,2\] moves from host"), transfers():
        (fun(host), local)


_LOCAL = jnp.ones((8, 2))
_Y = r"^_HOST\['y'\] float32\[8,2\] moves from host"
_MOVES = {  # what maps the step, a line, and what the error says of it
    "argument": (_JIT, lambda f: f(_HOST["y"]), _Y),
    "leaf": (_JIT + _PMAPS, lambda f: f(_XS, _HOST), _Y),
    "operator": (_JIT, lambda f: _X + np.ones(8, np.float32), r"^float32\[8\] moves from host"),
    "number": (_JIT, lambda f: f(1.0), r"^float32\[\] moves from host to device"),
    "index": (_JIT, lambda f: _X[0], r"^int32\[\] moves from host to device"),
    "device": (_PMAPS, lambda f: f(_LOCAL), r"^_LOCAL float32\[8,2\] moves from device"),
}


@pytest.mark.parametrize(
    ("mapped", "name"), [(mapped, name) for name in _MOVES for mapped in _MOVES[name][0]]
)
def test_values_that_move_are_named(mapped, name):
    _, act, moved = _MOVES[name]
    fun = mapped(step)
    for _ in range(3):
        act(fun)

    with pytest.raises(TransferError, match=moved) as caught, transfers():
        act(fun)

    assert f"at {_FILE}:{act.__code__.co_firstlineno} in `" in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_what_is_explicit_or_allowed_moves():
    fun = jax.jit(step)
    fun(_X)
    fun(_HOST["y"])

    with transfers():
        fun(jax.device_put(np.ones(8, np.float32)))
        jax.device_get(fun(_X))
        with allow_transfers():
            fun(_HOST["y"])
    with jax.transfer_guard("disallow"), pytest.raises(jax.errors.JaxRuntimeError), recompiles():
        fun(_HOST["y"])  # the guard is another one


double = jax.jit(lambda s, n: {"w": n * s["w"]}, donate_argnums=0, static_argnums=1)


@pytest.mark.parametrize("mapped", _BOTH)
def test_a_program_that_cannot_use_a_donation_is_stopped_under_any_filter_of_warnings(mapped):
    total = mapped(lambda s: {"w": s["w"].sum(), "n": s["n"]}, donate_argnums=0)
    state = {"w": jnp.ones((8, 7)), "n": jnp.arange(8)}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = list(warnings.filters)
        with pytest.raises(DonationError) as caught, donations():
            with strict(donation=False), strict():
                pass
            line = here(1)
            total(state)
        assert list(warnings.filters) == before

    assert str(caught.value) == (
        f"'<lambda>' cannot use the memory of a donated argument, at {line}: no result is left "
        "that has the type of s['w'] float32[8,7]. Do not donate it."
    )


def test_a_donation_of_which_jax_has_warned_before_is_stopped():
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        jax.jit(lambda s: s.sum(), donate_argnums=0)(jnp.ones((8, 7)))
        with pytest.raises(DonationError), donations():
            jax.jit(lambda s: s.min(), donate_argnums=0)(jnp.ones((8, 7)))


def test_a_guarded_jit_object_checks_that_donated_arguments_are_gone():
    text = r"'<lambda>' did not take the memory of the donated s\['b'\], at "
    with pytest.raises(DonationError, match=text):
        donations()(double)({"w": jnp.ones(4), "b": jnp.ones(3)}, 2)


@pytest.mark.parametrize(("when", "checked"), [("first", 3), ("always", 10)])
def test_how_many_calls_are_checked(when, checked):
    guarded, errors = donations(donation=when)(double), 0
    for _ in range(10):
        array = jnp.ones(4)
        view = np.asarray(array)  # shares the memory
        try:
            guarded({"w": array}, 2)
        except DonationError:
            errors += 1
        del view
    assert errors == checked


# ---- blocks, steps and threads


@pytest.mark.parametrize(("warmup", "guarded"), [(None, "011"), (0, "111"), (2, "001")])
def test_the_first_steps_are_the_warm_up(warmup, guarded):
    with strict(warmup=warmup) as guard:
        assert "".join(str(int(is_guarded())) for _ in guard.steps(range(3))) == guarded
        assert is_guarded()
        for _ in guard.steps(range(3)):
            break
        assert is_guarded()


def test_entering_a_block_and_calling_a_function_are_steps():
    guard, train, seen = strict(warmup=2), strict()(is_guarded), []
    for _ in range(3):
        with guard:
            seen.append(is_guarded())
    assert seen == [False, False, True]
    assert [train(), train()] == [False, True]
    assert (train.__name__, train.__doc__) == (is_guarded.__name__, is_guarded.__doc__)


def test_blocks_nest_and_end_with_an_exception():
    guard = strict()
    with jax.transfer_guard("log"), guard:
        with strict(transfers=False), guard:
            assert is_guarded()
        with allow_transfers():
            assert not is_guarded()
            with strict():
                assert is_guarded()
            assert not is_guarded()
        assert is_guarded()
    with pytest.raises(KeyError), strict():
        raise KeyError("x")
    assert not is_guarded()


def test_a_warm_up_that_fails_leaves_no_guard_behind():
    guard = strict()
    with pytest.raises(KeyError), guard:
        batches = guard.steps(range(3))
        next(batches)
        raise KeyError("x")
    assert (list(batches), is_guarded()) == ([1, 2], False)


def test_each_thread_has_its_own_guards():
    train = strict(warmup=0)(is_guarded)

    def work(number):
        jax.jit(lambda x: x + number)(_HOST["y"])
        return is_guarded(), train()

    with strict(), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [(False, True)] * 4
        assert is_guarded()


def test_functions_and_arrays_may_die():
    fun, state = jax.jit(lambda s: s + 1), jnp.zeros(3)
    with strict() as guard:
        for _ in guard.steps(range(3)):
            state = fun(state)
    references = [weakref.ref(state), weakref.ref(fun.__wrapped__)]

    fun.clear_cache()
    del fun, state
    gc.collect()

    assert [reference() for reference in references] == [None, None]


def test_a_training_loop_is_written_as_usual():
    table = jnp.arange(3.0)
    add, add_table = (lambda s, b: s + b.sum()), (lambda s, b: s + table * b.sum())
    count = lambda s, b: {"w": s["w"] + b.sum(), "step": s["step"] + 1}
    for fun, state, batch in (
        (jax.jit(add, donate_argnums=0), jnp.zeros(3), jnp.ones(4)),
        (jax.jit(add, donate_argnames="s"), jnp.zeros(3), jnp.ones(4)),
        (jax.jit(count, donate_argnums=0), {"w": np.zeros(3, np.float32), "step": 0}, jnp.ones(4)),
        (jax_dist.pmap(add, donate_argnums=0), _XS + 0, _XS),
        (jax_dist.rewrite(jax.jit(add_table), captures="lift"), jnp.zeros(3), jnp.ones(2)),
    ):
        checked = strict(donation="always")(fun)
        with strict() as guard:
            for item in guard.steps([batch] * 4):
                state = checked(state, item)


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda: strict(donation=True), ValueError, "donation must be"),
        (lambda: strict(warmup=-1), ValueError, "warmup must be a number of steps"),
        (lambda: next(strict().steps([1])), RuntimeError, r"steps\(\) needs the block"),
        (lambda: strict()(asyncio.sleep), TypeError, "cannot guard sleep: a generator or coro"),
        (lambda: strict()(lambda: (yield)), TypeError, "<lambda>: a generator or coroutine"),
        (lambda: memory_guard()(lambda: (yield)), TypeError, "memory_guard cannot guard <lambda>"),
    ],
)
def test_misuse_is_an_error(act, kind, text):
    with pytest.raises(kind, match=text):
        act()
