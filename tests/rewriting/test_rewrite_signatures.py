"""What is done once per signature, and what becomes of captured arrays from call to call."""

import functools
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import compiles, mesh_of, numbers

import jax_dist
from jax_dist import rewrite
from jax_dist.errors import ArgumentError, CapturedArrayWarning

pytestmark = pytest.mark.rewriting

_MESH = mesh_of(data=4)
_X = numbers(4, 100)
_mean = jax.pmap(lambda v: jnp.mean(lax.all_gather(v, "i"), 0), axis_name="i")

# What captures an array says so once; here only what a test is about should be heard.
_QUIET = pytest.mark.filterwarnings(
    "ignore:JXD401. '.*' captures:jax_dist.errors.CapturedArrayWarning"
)


def _counting(body):
    """A function, and the number of times that its Python ran."""
    runs = []

    @functools.wraps(body)
    def fun(*args, **kwargs):
        runs.append(1)
        return body(*args, **kwargs)

    return fun, runs


def _heard(call):
    """What the call warns of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in heard]


def _inputs(lowered):
    """How many arrays the program takes, captured ones too."""
    main = next(line for line in lowered.as_text().splitlines() if "func public @main" in line)
    return main.count("%arg")


# ---- once per signature


@_QUIET
@pytest.mark.parametrize("mesh", [None, _MESH], ids=["no mesh", "4"])
def test_one_trace_and_one_compile_a_signature(mesh):
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    fun, runs = _counting(lambda x, scale=1.0: _mean(x * w[:, : x.shape[1]]) * scale)
    rewritten = rewrite(fun, mesh=mesh)
    x, short = jax.block_until_ready((_X, _X[:, :50]))

    first = rewritten(x)
    assert len(runs) == 1
    with compiles(0):
        for _ in range(3):
            again = rewritten(x)
    assert len(runs) == 1
    np.testing.assert_array_equal(first, again)

    rewritten(short)
    rewritten(x.astype(jnp.bfloat16))
    rewritten(x, scale=2.0)
    assert len(runs) == 4
    with compiles(0):
        for args, kwargs in (((x,), {}), ((short,), {}), ((x,), {"scale": 3.0})):
            rewritten(*args, **kwargs)
    assert len(runs) == 4
    np.testing.assert_allclose(rewritten(x, scale=2.0), 2 * first, rtol=1e-6)


def test_a_static_argument_is_part_of_the_signature():
    fun, runs = _counting(lambda x, power: x**power)
    rewritten = rewrite(jax.jit(fun, static_argnums=1))

    found = [float(rewritten(jnp.float32(3), power)) for power in (2, 3, 2, 3)]
    assert (found, len(runs)) == ([9.0, 27.0, 9.0, 27.0], 2)


def test_lower_trace_and_report_run_nothing():
    heard = []

    def fun(x):
        jax.debug.callback(lambda x: heard.append(float(x[0, 0])), x)
        return _mean(x)

    rewritten = rewrite(fun, mesh=_MESH)
    shape = jax.ShapeDtypeStruct((4, 100), jnp.float32)

    assert rewritten.lower(shape).args_info[0][-1].shape == (4, 100)
    assert rewritten.trace(shape).out_info.shape == (4, 100)
    assert rewritten.report(shape).before.moved_bytes > rewritten.report(shape).after.moved_bytes
    jax.effects_barrier()
    assert heard == []


# ---- captured arrays are lifted


def test_a_captured_array_is_named_and_lifted():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    fun = lambda x: x * w
    rewritten = rewrite(fun)
    line = fun.__code__.co_firstlineno

    (heard,) = _heard(lambda: rewritten(_X))
    place = f"test_rewrite_signatures.py:{line}"
    first, _, last = heard.partition(". They")[0].partition(", closure of ")
    assert first == "JXD401: '<lambda>' captures an array: w: float32[4,100], 1.6 kB"
    assert [part.rpartition("/")[2] for part in last.split(", used at ")] == [place, place]
    assert _heard(lambda: rewritten(_X)) == []  # once

    lowered = rewritten.lower(_X)
    assert "dense<" not in lowered.as_text()
    assert _inputs(lowered) == 2
    assert [info.shape for info in jax.tree.leaves(lowered.args_info)] == [(4, 100)]  # it is hidden


@pytest.mark.parametrize(("size", "lifted"), [(255, 0), (256, 1)])
def test_from_a_kilobyte_on_captures_are_lifted(size, lifted):
    table = jnp.linspace(0.0, 1.0, size)
    rewritten = rewrite(lambda x: x.sum() * table)

    assert len(_heard(lambda: rewritten(_X))) == lifted
    assert _inputs(rewritten.lower(_X)) == 1 + lifted


def test_a_random_key_is_lifted_whatever_its_size():
    key = jax.random.key(7)
    rewritten = rewrite(lambda x: x + jax.random.normal(key, x.shape))

    _heard(lambda: rewritten(_X))
    assert _inputs(rewritten.lower(_X)) == 2
    wanted = _X + jax.random.normal(key, (4, 100))
    np.testing.assert_allclose(rewritten(_X), wanted, rtol=1e-6, atol=1e-6)


@_QUIET
@pytest.mark.parametrize("of_numpy", [False, True], ids=["jax", "numpy"])
def test_a_lifted_array_is_placed_on_the_mesh_once(of_numpy):
    jax.clear_caches()  # of what tests before it have traced, with arrays
    gc.collect()
    w = np.linspace(0.0, 1.0, 400, dtype=np.float32).reshape(4, 100)
    w = w if of_numpy else jnp.asarray(w)
    rewritten = rewrite(lambda x: _mean(x * w), mesh=_MESH)
    x = jax.device_put(_X, NamedSharding(_MESH, P("data")))
    rewritten(x)

    before = _replicated(w.shape)
    for _ in range(3):
        with jax.transfer_guard("disallow"):
            rewritten(x)
    assert len(before) == 1
    assert before[0].sharding.device_set == set(_MESH.devices.flat)
    assert [id(array) for array in _replicated(w.shape)] == [id(array) for array in before]


def _replicated(shape):
    """The live arrays that every device of the mesh has whole."""
    whole = NamedSharding(_MESH, P())
    return [a for a in jax.live_arrays() if a.shape == shape and a.sharding == whole]


@_QUIET
def test_signatures_with_different_captures():
    first, second = (jnp.full((4, 100), value) for value in (2.0, 3.0))
    fun, runs = _counting(lambda x, which: x * (first if which == "first" else second) + first)
    rewritten = rewrite(jax.jit(fun, static_argnames="which"))

    for _ in range(2):
        for which, factor in (("first", 2.0), ("second", 3.0)):
            np.testing.assert_allclose(rewritten(_X, which=which), _X * factor + 2.0, atol=1e-6)
    assert len(runs) == 2
    assert [_inputs(rewritten.lower(_X, which=w)) for w in ("first", "second")] == [2, 3]
    assert len(runs) == 2
    with compiles(0):
        rewritten(_X, which="first")
        rewritten(_X, which="second")


@_QUIET
def test_donation_counts_the_users_arguments():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    step = rewrite(jax.jit(lambda state, x: (state + x * w, x.sum()), donate_argnums=0))
    state = jnp.zeros((4, 100))
    for _ in range(3):
        given = state
        state, _ = step(state, _X)
        assert given.is_deleted()

    assert not w.is_deleted()
    np.testing.assert_allclose(state, 3 * _X * w, rtol=1e-6)


# ---- what is captured changes


class _Holder:
    def __init__(self, w):
        self.w = w

    def apply(self, x):
        return x * self.w


def _aligned(value):
    """A NumPy array at an address that JAX would share on CPU, instead of copying it."""
    memory = np.empty(4 * 400 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 4 * 400].view(np.float32).reshape(4, 100)
    array[:] = value
    return array


def _changes():
    """By name: a function, and how to change what it captures."""
    array = _aligned(2.0)
    holder = _Holder(jnp.full((4, 100), 2.0))

    def double_in_place():
        array[:] = 4.0

    def rebind():
        holder.w = jnp.full((4, 100), 5.0)

    return {
        "NumPy in place": (lambda x: x * array, double_in_place),
        "rebound": (holder.apply, rebind),
    }


@_QUIET
@pytest.mark.parametrize("name", list(_changes()))
def test_what_changed_after_the_trace_is_not_seen(name):
    fun, change = _changes()[name]
    rewritten = rewrite(fun)
    rewritten(_X)
    change()

    assert _heard(lambda: [rewritten(_X) for _ in range(9)]) == []
    np.testing.assert_allclose(rewritten(_X), 2 * _X, rtol=1e-6)


# ---- other policies


def test_captures_warn_keeps_them_and_says_so():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    rewritten = rewrite(lambda x: x * w, captures="warn")

    (heard,) = _heard(lambda: rewritten(_X))
    assert "They stay in the program, because captures='warn'" in heard
    assert _inputs(rewritten.lower(_X)) == 1
    np.testing.assert_allclose(rewritten(_X), _X * w, rtol=1e-6)


def test_captures_allow_says_nothing():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    rewritten = rewrite(lambda x: x * w, captures="allow")

    assert _heard(lambda: rewritten(_X)) == []
    assert _inputs(rewritten.lower(_X)) == 1


def test_captures_error_raises_again_and_again():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    rewritten = rewrite(lambda x: x * w, captures="error")

    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"w: float32\[4,100\], 1.6 kB"):
            rewritten(_X)


@pytest.mark.parametrize("outer", ["jit", "scan", "grad of jit"])
def test_under_a_jit_it_says_to_put_rewrite_outside(outer):
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    rewritten = rewrite(lambda x: x * w)
    calls = {
        "jit": lambda: jax.jit(rewritten)(_X),
        "scan": lambda: lax.scan(lambda c, _: (rewritten(c), None), _X, None, length=1)[0],
        "grad of jit": lambda: jax.grad(jax.jit(lambda x: (rewritten(x) * _X).sum()))(_X) * 1.0,
    }
    heard = _heard(calls[outer])

    assert len(heard) == 1
    assert (
        "because this call is traced by a jit or a scan around it (put rewrite outside" in heard[0]
    )
    np.testing.assert_allclose(calls[outer](), _X * w, rtol=1e-6)
    # Outside it is lifted, as if the call inside had never been.
    with pytest.warns(CapturedArrayWarning, match="They are arguments of the program now"):
        rewritten(_X)
    assert _inputs(rewritten.lower(_X)) == 2


@_QUIET
def test_a_failed_trace_leaves_no_traces():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    fails = [True]

    def fun(x):
        if fails[0]:
            raise RuntimeError("not now")
        return x * w

    rewritten = rewrite(fun)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not now"):
            rewritten(_X)
    fails[0] = False
    np.testing.assert_allclose(rewritten(_X), _X * w, rtol=1e-6)


@_QUIET
def test_a_rewritten_function_dies_with_its_captures():
    jax.clear_caches()  # of what tests before it have traced, with arrays
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    rewritten = rewrite(lambda x: _mean(x * w), mesh=_MESH)
    rewritten(_X)
    dead = weakref.ref(rewritten)

    del rewritten
    gc.collect()
    assert dead() is None
    assert _replicated((4, 100)) == []


def test_a_capture_of_a_pmap_inside_is_told_of_once():
    w = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
    inner = jax_dist.pmap(lambda v: v * w[0] + lax.psum(v, "i"), axis_name="i")

    (heard,) = _heard(lambda: rewrite(lambda x: inner(x))(_X))
    assert "They are arguments of the program now" in heard


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("kind", ["of weak type", "cut", "copies", "a key"])
def test_a_captured_array_may_be_deleted_elsewhere(kind):
    mesh = Mesh(np.array(jax.devices()), ("q",))
    array = {
        "of weak type": lambda: jnp.full((3000,), 2.5),
        "cut": lambda: jax.device_put(np.ones(3000), NamedSharding(mesh, P("q"))),
        "copies": lambda: jax.device_put(np.ones(3000), NamedSharding(mesh, P())),
        "a key": lambda: jax.random.key(0),
    }[kind]()

    def draw(x):
        return x + (jax.random.uniform(array) if kind == "a key" else array.sum())

    rewritten, x = rewrite(draw), np.arange(8.0, dtype=np.float32)
    expected = jax.block_until_ready(rewritten(x))
    array.delete()

    np.testing.assert_array_equal(rewritten(x), expected)
    np.testing.assert_allclose(rewritten(x + 1), expected + 1, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("kind", ["NumPy", "jax", "a key"])
def test_ahead_of_time_it_takes_what_the_function_takes(kind):
    array = jnp.arange(3000.0) if kind == "jax" else np.arange(3000.0, dtype=np.float32)
    key = jax.random.key(0)

    def draw(x):
        return x + (jax.random.uniform(key) if kind == "a key" else array.sum())

    mapped, x = jax.pmap(draw, "i"), np.arange(8.0, dtype=np.float32)

    for function in (draw, lambda x: mapped(x)):
        np.testing.assert_array_equal(rewrite(function).lower(x).compile()(x), draw(x))
