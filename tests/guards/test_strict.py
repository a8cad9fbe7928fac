"""The guards of a training loop: what they stop, in which words, and that they are gone after."""
# ruff: noqa: PT012 - a guarded block is more than one statement

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
from jax_dist import allow_recompiles, allow_transfers, strict
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


@jax.jit
def negative(x):
    return -x


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


# ---- compilations


@pytest.mark.parametrize("mapped", [jax.jit, jax_dist.pmap], ids=["jit", "pmap"])
@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        ((_XS, {"y": _XS}), (_XS, {"y": _YS}), "batch['y']: float32[8,2] -> float32[8,3]"),
        ((_XS,), (_INTS,), "x: float32[8,2] -> int32[8,2]"),
        ((_XS, {"y": _XS}), (_XS, {"y": _XS, "z": _XS}), "batch['z'] is new"),
        ((_XS, {"y": _XS, "z": _XS}), (_XS, {"y": _XS}), "batch['z'] is gone"),
        ((_INTS, {"y": _XS}), (_INTS, {"y": _YS}), "batch['y']: float32[8,2] -> "),
    ],
    ids=["shape", "type", "structure", "gone", "nearest"],
)
def test_the_changed_argument_is_named(mapped, before, now, change):
    fun = mapped(lambda x, batch=None: step(x, batch))

    with pytest.raises(RecompileError) as caught, recompiles() as guard:
        for number in guard.steps(range(2)):
            if number == 0:
                fun(_X[:, None])
                fun(*before)
            else:
                line = here(1)
                fun(*now)

    lines = str(caught.value).splitlines()
    assert lines[0] == f"'<lambda>' is compiled after the warm-up, at {line}:"
    assert lines[1].strip().startswith(change)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (lambda f: f(jnp.float32(1)), lambda f: f(1.0), "x: float32[] -> ~float32[]"),
        (lambda f: f(_XS), lambda f: f(_WHOLE), "x: NamedSharding(mesh=Mesh('i': 8"),
        (lambda f: f(_X, times=2), lambda f: f(_X, times=3), "times: 2 -> 3"),
        (
            lambda f: f(_X),
            lambda f: jax.default_matmul_precision("float32")(f)(_X),
            "no argument differs: a setting of JAX does, or its caches were cleared",
        ),
    ],
    ids=["weak", "sharding", "static", "setting"],
)
def test_the_cause_is_named(before, now, change):
    fun = jax.jit(lambda x, times=1: step(x, times=times), static_argnames="times")
    before(fun)

    with pytest.raises(RecompileError) as caught, recompiles():
        now(fun)

    assert str(caught.value).splitlines()[1].strip().startswith(change)


@pytest.mark.parametrize("mapped", [jax.jit, jax_dist.pmap], ids=["jit", "pmap"])
@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: lambda x: x + 1, "<lambda>"), (lambda: functools.partial(step, times=2), "step")],
    ids=["lambda", "partial"],
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
    x, lowered = jnp.ones((3, 5)), jax.jit(lambda x: x * 5).lower(_X)
    with (
        pytest.raises(RecompileError, match=r"'sinh' is compiled[^*]* x: float32\[3,5\]"),
        recompiles(),
    ):
        jnp.sinh(x)
    with pytest.raises(RecompileError), recompiles():
        lowered.compile()
    with pytest.raises(RecompileError, match=r"no earlier call[^*]* x: float32\[8\]"), recompiles():
        jax.jit(lambda x: x - 7)(_X)


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


class _Raises:
    """A value that raises whatever is asked of it, as a proxy without its target does."""

    __hash__ = object.__hash__

    def __getattribute__(self, name):
        raise RuntimeError(f"{name} was asked for")

    def __repr__(self):
        raise RuntimeError("its text was asked for")


@pytest.mark.parametrize("mapped", [jax.jit, jax_dist.pmap], ids=["jit", "pmap"])
@pytest.mark.parametrize("make", [lambda: {1: _X, "a": _X}, _Raises])
def test_only_errors_of_the_guard_are_raised_whatever_the_frames_hold(mapped, make):
    fun, local, host = mapped(lambda x: x + 2), make(), _HOST["y"]
    fun(_XS)
    fun(_XS)

    with pytest.raises(RecompileError), recompiles():
        fun(_YS)
    with pytest.raises(TransferError, match=r"host float32\[8,2\] moves from host"), transfers():
        (fun(host), local)


# ---- transfers


@pytest.mark.parametrize(
    ("act", "moved"),
    [
        (lambda f: f(_HOST["y"]), r"_HOST\['y'\] float32\[8,2\] moves from host"),
        (lambda f: f(_XS, _HOST), r"_HOST\['y'\] float32\[8,2\] moves from host"),
        (lambda f: _X + np.ones(8, np.float32), r"float32\[8\] moves from host"),
        (lambda f: f(1.0), r"float32\[\] moves from host to device"),
        (lambda f: _X[0], r"int32\[\] moves from host to device"),
    ],
    ids=["argument", "leaf", "operator", "number", "index"],
)
def test_values_of_the_host_are_named(act, moved):
    fun = jax.jit(step)
    act(fun)
    act(fun)

    with pytest.raises(TransferError, match=moved) as caught, transfers():
        act(fun)

    line = f"{_FILE}:{act.__code__.co_firstlineno}"
    assert f"at {line} in `" in str(caught.value)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


@pytest.mark.parametrize("mapped", [jax.pmap, jax_dist.pmap], ids=["jax.pmap", "pmap"])
def test_arguments_of_a_pmap_are_named(mapped):
    fun, x = mapped(step), jnp.ones((8, 2))
    for _ in range(3):
        fun(_XS, _HOST)
        fun(x)

    with pytest.raises(TransferError, match=r"_HOST\['y'\] float32\[8,2\] moves"), transfers():
        fun(_XS, _HOST)
    with pytest.raises(TransferError, match=r"^x float32\[8,2\] moves from device"), transfers():
        fun(x)


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


# ---- donation

total = jax.jit(lambda s: {"w": s["w"].sum(), "n": s["n"]}, donate_argnums=0)
double = jax.jit(lambda s, n: {"w": n * s["w"]}, donate_argnums=0, static_argnums=1)


def test_a_program_that_cannot_use_a_donation_is_stopped():
    state = {"w": jnp.ones((5, 7)), "n": jnp.int32(3)}

    with pytest.raises(DonationError) as caught, donations():
        line = here(1)
        total(state)

    assert str(caught.value) == (
        f"'<lambda>' cannot use the memory of a donated argument, at {line}: no result is left "
        "that has the type of s['w'] float32[5,7]. Do not donate it."
    )

    pmapped = jax_dist.pmap(lambda s: s["w"].sum(), donate_argnums=0)
    with pytest.raises(DonationError, match=r"s\['w'\]"), donations():
        pmapped({"w": jnp.ones((8, 2))})


def test_it_is_stopped_under_other_warning_filters_too():
    sizes = jax.jit(lambda s: s.sum(), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DonationError), donations():
            sizes(jnp.ones((3, 11)))


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


def test_donations_that_happen_pass():
    programs = {
        "jit": (double, {"w": jnp.ones(4)}, (2,)),
        "name": (jax.jit(lambda x: x + 1, donate_argnames="x"), jnp.ones(4), ()),
        "pmap": (jax_dist.pmap(lambda x: x + 1, donate_argnums=0), _XS + 0, ()),
        "number": (
            jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0),
            {"step": 0, "w": jnp.ones(4)},
            (),
        ),
    }
    donations(donation="always")(double)({"w": np.ones(4, np.float32)}, 2)  # a first state
    for fun, state, rest in programs.values():
        guarded = strict(donation="always")(fun)
        for _ in range(3):
            state = guarded(state, *rest)


def test_the_filter_of_warnings_is_taken_away():
    before = list(warnings.filters)
    with strict(), strict(donation=False), strict():
        pass
    assert list(warnings.filters) == before


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
    @strict()
    def train():
        """Trains."""
        return is_guarded()

    assert [train(), train()] == [False, True]
    assert (train.__name__, train.__doc__) == ("train", "Trains.")
    guard, seen = strict(warmup=2), []
    for _ in range(3):
        with guard:
            seen.append(is_guarded())
    assert seen == [False, False, True]


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
    train, seen = strict(warmup=0)(is_guarded), []

    def work():
        seen.append(is_guarded())
        jax.jit(lambda x: x + 3)(_HOST["y"])
        seen.append(train())

    with strict(), ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(4)]:
            future.result()
        assert is_guarded()
    assert sorted(seen) == [False] * 4 + [True] * 4


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
    rewritten = jax_dist.rewrite(jax.jit(lambda s, b: s + table * b.sum()), captures="lift")
    mapped = jax_dist.pmap(lambda s, b: s + b.sum(), donate_argnums=0)
    jitted = jax.jit(lambda s, b: s + b.sum(), donate_argnums=0)
    for fun, state, batch in (
        (jitted, jnp.zeros(3), jnp.ones(4)),
        (rewritten, jnp.zeros(3), jnp.ones(2)),
        (mapped, _XS + 0, _XS),
    ):
        with strict() as guard:
            for item in guard.steps([batch] * 4):
                state = fun(state, item)


async def _coroutine():
    return 1


def _generator():
    yield 1


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (lambda: strict(donation=True), ValueError, "donation must be"),
        (lambda: strict(warmup=-1), ValueError, "warmup must be a number of steps"),
        (lambda: next(strict().steps([1])), RuntimeError, r"steps\(\) needs the block"),
        (lambda: strict()(_coroutine), TypeError, "strict cannot guard _coroutine"),
        (lambda: strict()(_generator), TypeError, "strict cannot guard _generator"),
    ],
)
def test_misuse_is_an_error(act, kind, text):
    with pytest.raises(kind, match=text):
        act()
