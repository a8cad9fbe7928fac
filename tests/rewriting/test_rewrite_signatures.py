"""What is done once per signature, and what becomes of captured arrays from call to call."""

import gc
import types
import warnings
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from observing import mesh_of, no_compiles, numbers

import jax_dist
from jax_dist import rewrite
from jax_dist.errors import ArgumentError, CapturedArrayWarning

_MESH = mesh_of(data=4)
_X = numbers(4, 100)
_W = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
_mean = jax.pmap(lambda v: jnp.mean(lax.all_gather(v, "i"), 0), axis_name="i")

pytestmark = pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning")


def _heard(call):
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in heard]


def _inputs(lowered):
    """How many arrays the program takes, captured ones too."""
    main = next(line for line in lowered.as_text().splitlines() if "func public @main" in line)
    return main.count("%arg")


# ---- once per signature


@pytest.mark.parametrize("mesh", [None, _MESH], ids=["no mesh", "4"])
def test_one_trace_and_one_compile_a_signature(mesh):
    python = mock.Mock(wraps=lambda x, scale=1.0: _mean(x * _W[:, : x.shape[1]]) * scale)
    rewritten = rewrite(lambda x, **options: python(x, **options), mesh=mesh)
    short, small = jax.block_until_ready((_X[:, :50], _X.astype(jnp.bfloat16)))
    calls = [((_X,), {}), ((short,), {}), ((small,), {}), ((_X,), {"scale": 2.0})]

    results = [rewritten(*args, **kwargs) for args, kwargs in calls]
    assert python.call_count == len(calls)
    with no_compiles():
        again = [rewritten(*args, **kwargs) for args, kwargs in [*calls, *calls]]
        rewritten(_X, scale=3.0)
    assert python.call_count == len(calls)
    for result, other in zip(results * 2, again, strict=True):
        np.testing.assert_array_equal(result, other)
    np.testing.assert_allclose(results[-1], 2 * results[0], rtol=1e-6)


def test_lower_trace_and_report_run_nothing():
    callback = mock.Mock()
    rewritten = rewrite(lambda x: (jax.debug.callback(callback, x), _mean(x))[1], mesh=_MESH)
    shape = jax.ShapeDtypeStruct((4, 100), jnp.float32)

    assert rewritten.lower(shape).args_info[0][-1].shape == (4, 100)
    assert rewritten.trace(shape).out_info.shape == (4, 100)
    assert rewritten.report(shape).before.moved_bytes > rewritten.report(shape).after.moved_bytes
    jax.effects_barrier()
    callback.assert_not_called()


# ---- captured arrays are lifted


# By name: what is captured, the policy, the warnings, and the inputs of the program.
_CAPTURES = {
    "a kilobyte": (jnp.linspace(0.0, 1.0, 256), "lift", 1, 2),
    "less": (jnp.linspace(0.0, 1.0, 255), "lift", 0, 1),
    "a random key": (jax.random.key(7), "lift", 0, 2),
    "warn": (_W, "warn", 1, 1),
    "allow": (_W, "allow", 0, 1),
}


def _number_of(array):
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.uniform(array) if is_key else array.sum()


@pytest.mark.parametrize("name", _CAPTURES)
def test_which_captures_are_lifted(name):
    array, policy, warned, inputs = _CAPTURES[name]
    fun = lambda x: x.sum() + _number_of(array)
    rewritten = rewrite(fun, captures=policy)
    texts = _heard(lambda: [rewritten(_X) for _ in range(2)])
    assert len(texts) == warned
    assert all((policy == "lift") != ("because captures='warn'" in text) for text in texts)
    lowered = rewritten.lower(_X)
    assert _inputs(lowered) == inputs
    assert [info.shape for info in jax.tree.leaves(lowered.args_info)] == [_X.shape]  # it is hidden
    np.testing.assert_allclose(rewritten(_X), fun(_X), rtol=1e-5, atol=1e-5)


def test_captures_error_raises_again_and_again():
    rewritten = rewrite(lambda x: x * _W, captures="error")
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"_W: float32\[4,100\], 1.6 kB"):
            rewritten(_X)


@pytest.mark.parametrize("of_numpy", [False, True], ids=["jax", "numpy"])
def test_a_lifted_array_is_placed_on_the_mesh_once_and_dies_with_the_function(of_numpy):
    jax.clear_caches()  # of what tests before it have traced, with arrays
    gc.collect()
    w = np.array(_W) if of_numpy else jnp.array(_W)
    rewritten = rewrite(lambda x: _mean(x * w), mesh=_MESH)
    x = jax.device_put(_X, NamedSharding(_MESH, P("data")))
    rewritten(x)

    before = [id(array) for array in _replicated()]
    for _ in range(3):
        with jax.transfer_guard("disallow"):
            rewritten(x)
    assert len(before) == 1
    assert [id(array) for array in _replicated()] == before

    dead = weakref.ref(rewritten)
    del rewritten
    gc.collect()
    assert dead() is None
    assert _replicated() == []


@pytest.mark.parametrize("make", [rewrite, jax_dist.pmap])
def test_programs_and_captured_arrays_are_forgotten_with_the_caches_of_jax(make):
    holder, counts = types.SimpleNamespace(), []
    call = make(lambda x: x * holder.w)
    for _ in range(3):
        holder.w = jnp.ones((1, 300))
        call(_X[:, :1])
        jax.clear_caches()
        gc.collect()
        arrays = sum(array.shape == (1, 300) for array in jax.live_arrays())
        counts.append((arrays, sum(isinstance(x, ClosedJaxpr) for x in gc.get_objects())))
    assert counts[1] == counts[2]


def _replicated():
    """Return the live arrays that every device of the mesh has whole."""
    whole = NamedSharding(_MESH, P())
    return [a for a in jax.live_arrays() if a.shape == (4, 100) and a.sharding == whole]


def test_signatures_with_different_captures():
    first, second = (jnp.full((4, 100), value) for value in (2.0, 3.0))
    fun = lambda x, which: x * (first if which == "first" else second) + first
    rewritten = rewrite(jax.jit(fun, static_argnames="which"))

    for _ in range(2):
        for which, factor in (("first", 2.0), ("second", 3.0)):
            np.testing.assert_allclose(rewritten(_X, which=which), _X * factor + 2.0, atol=1e-6)
    assert [_inputs(rewritten.lower(_X, which=w)) for w in ("first", "second")] == [2, 3]
    with no_compiles():
        rewritten(_X, which="first")
        rewritten(_X, which="second")


# ---- what is captured changes


def test_what_changed_after_the_trace_is_not_seen(shared_ones):
    array = shared_ones((4, 100))
    array[:] = 2.0
    holder = types.SimpleNamespace(w=jnp.full((4, 100), 2.0))
    rewritten = rewrite(lambda x: x * array + x * holder.w)
    rewritten(_X)
    array[:], holder.w = 4.0, jnp.full((4, 100), 5.0)

    assert _heard(lambda: [rewritten(_X) for _ in range(9)]) == []
    np.testing.assert_allclose(rewritten(_X), 4 * _X, rtol=1e-6)


# ---- other ways to call it


_OUTER = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "grad of jit": lambda f: jax.grad(jax.jit(lambda x: (f(x) * _X).sum())),
}


@pytest.mark.parametrize("outer", _OUTER)
def test_a_jit_around_rewrite_is_warned_of(outer):
    rewritten = rewrite(lambda x: x * _W)
    traced_by = r"because this call is traced by a jit or a scan around it \(put rewrite outside"
    with pytest.warns(CapturedArrayWarning, match=traced_by):
        np.testing.assert_allclose(_OUTER[outer](rewritten)(_X), _X * _W, rtol=1e-6)
    # Outside it is lifted, as if the call inside had never been.
    with pytest.warns(CapturedArrayWarning, match="They are arguments of the program now"):
        rewritten(_X)
    assert _inputs(rewritten.lower(_X)) == 2


def test_a_capture_of_a_pmap_inside_is_warned_of_once():
    inner = jax_dist.pmap(lambda v: v * _W[0] + lax.psum(v, "i"), axis_name="i")

    (text,) = _heard(lambda: rewrite(lambda x: inner(x))(_X))
    assert "They are arguments of the program now" in text


def test_a_trace_that_fails_is_made_again():
    fails = [RuntimeError("not now"), RuntimeError("not now"), mock.DEFAULT]
    fun = mock.Mock(side_effect=fails, wraps=lambda x: x + 1)
    rewritten = rewrite(lambda x: fun(x))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not now"):
            rewritten(_X)
    np.testing.assert_allclose(rewritten(_X), _X + 1, rtol=1e-6)
