"""What `rewrite` must leave as it is, on programs that it changes and on programs that it does not.

`_plain` has nothing to rewrite. `_busy` has something for three passes: it captures an array that
is lifted, and has a pmap that gathers for a mean.
"""

import functools
import re
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import assert_same, compiled_collectives, line_of, mesh_of, numbers, traced_names

import jax_dist
from jax_dist import explain, rewrite
from jax_dist._passes import rebind
from jax_dist._passes.interpreter import equations
from jax_dist.errors import ArgumentError, CapturedArrayWarning

pytestmark = pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning")

_MESH, _WIDE = mesh_of(data=4), mesh_of(data=4, model=2)
_W = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
_X = numbers(4, 100)


def _body(block):
    return jnp.mean(lax.all_gather(block, "i"), 0) - block


_mapped = jax_dist.pmap(_body, axis_name="i", gathers="keep")  # they are left to `rewrite`


def _plain(x):
    """`[4, 100] -> [4, 100]`."""
    return jnp.sin(x) * 2.0


def _busy(x):
    """`[4, 100] -> [4, 100]`."""
    return _mapped(x * _W)


_OF_BUSY = np.mean(_X * _W, 0) - _X * _W  # what `_busy` gives of `_X`
_FUNCTIONS = pytest.mark.parametrize(
    ("fun", "mesh"),
    [(_plain, _MESH), (_busy, None), (_busy, _MESH), (_busy, _WIDE)],
    ids=["plain", "busy", "busy, 4", "busy, 4x2"],
)


def _close(result, expected):
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_busy_is_rewritten_by_three_passes():
    """Else the tests here would prove nothing."""
    names = traced_names(rewrite(_busy, mesh=_MESH), _X)
    assert (names["all_gather"], names["psum"]) == (0, 1)

    with pytest.warns(CapturedArrayWarning, match=r"_W"):
        _close(rewrite(_busy)(_X), _OF_BUSY)
    report = explain(_busy, _X, mesh=_MESH)
    outcomes = [(finding.code, finding.outcome) for finding in report.findings]
    assert outcomes == [("JXD002", "rewritten"), ("JXD301", "rewritten")]
    assert [(array.name, array.action) for array in report.captured] == [("_W", "lifted")]


# ---- composition

_scanned = lambda f, x: lax.scan(lambda c, _: (jnp.sin(f(c)), None), x, length=3)[0]
_square = lambda f: lambda x: (f(x) ** 3).sum()
_TRANSFORMS = {
    "jit": jax.jit,
    "rewrite": rewrite,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])),
    "vmap of others": lambda f: lambda x: jax.vmap(f, 1, 2)(jnp.stack([x, x], 1)),
    "scan": lambda f: lambda x: lax.scan(lambda c, x: (c, f(x)), 0, jnp.stack([x, x]))[1],
    "cond": lambda f: lambda x: lax.cond(jnp.all(x < 99), f, lambda x: x, x),
    "grad": lambda f: jax.grad(_square(f)),
    "grad of remat": lambda f: jax.grad(_square(jax.checkpoint(f))),
    "grad of scan": lambda f: jax.grad(_square(lambda x: _scanned(f, x))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "second derivative": lambda f: lambda x: jax.jvp(jax.grad(_square(f)), (x,), (x,))[1],
}


@pytest.mark.thorough
@_FUNCTIONS
@pytest.mark.parametrize("name", _TRANSFORMS)
def test_it_composes_with_the_transforms_of_jax(name, fun, mesh):
    transform = _TRANSFORMS[name]
    expected = jax.jit(transform(fun))(_X)

    _close(transform(rewrite(fun, mesh=mesh))(_X), expected)
    _close(rewrite(transform(fun), mesh=mesh)(_X), expected)


_SETTINGS = {
    "set_mesh": lambda: jax.set_mesh(_MESH),
    "no jit": jax.disable_jit,
    "checks": lambda: jax.enable_checks(new_val=True),
}


@pytest.mark.parametrize("fun", [_plain, _busy])
@pytest.mark.parametrize("setting", _SETTINGS)
def test_under_a_setting_of_jax(setting, fun):
    expected = jax.jit(fun)(_X)
    with _SETTINGS[setting]():
        for mesh in (None, _MESH):
            _close(rewrite(fun, mesh=mesh)(_X), expected)
            _close(jax.jit(rewrite(fun, mesh=mesh))(_X), expected)


@_FUNCTIONS
def test_it_can_be_exported(fun, mesh):
    exported = jax.export.export(jax.jit(rewrite(fun, mesh=mesh)))(_X)
    devices = 1 if fun is _plain else (mesh or _MESH).size
    place = None if devices == 1 else NamedSharding(mesh or _MESH, P())

    assert exported.nr_devices == devices
    _close(jax.jit(exported.call)(jax.device_put(_X, place)), jax.jit(fun)(_X))


# ---- programs whose numbers and types stay


def _trees_and_weak_types(state, *, scale=2.0, batch=None):
    first, (second, nothing) = state["a"], state["b"]
    moved = _mapped(first * scale * _W)
    return {"out": (moved, nothing), "weak": second * 2, "batch": batch, "three": 3}


def _random_keys(key):
    now, later = jax.random.split(key)
    return later, jax_dist.pmap(jax.random.normal)(jax.random.split(now, 4))


@functools.partial(jax.shard_map, mesh=_MESH, in_specs=(P("data"), P()), out_specs=P("data"))
def _checked_types(block, w):
    """With check_vma=True a psum is invariant, and a gather varies: the rewriting must say so."""
    mean = jnp.mean(lax.all_gather(block, "data"), 0)
    total = lax.scan(lambda c, _: (c + mean * w.sum(), None), block, None, length=2)[0]
    return total + lax.psum(w, "data").sum()


_slopes = jax.grad(lambda x, w: jnp.sum(_checked_types(x, w) ** 2), (0, 1))
_STATE = {"a": _X, "b": [1.5, None]}
_PROGRAMS = {
    "trees and weak types": (_trees_and_weak_types, (_STATE,), {"batch": (jnp.int8(2),)}),
    "keywords": (_trees_and_weak_types, (_STATE,), {"scale": 3.0}),
    "random keys": (_random_keys, (jax.random.key(3),), {}),
    "types of a checked shard_map": (_checked_types, (_X, numbers(5, seed=1)), {}),
    "gradients of a checked shard_map": (_slopes, (_X, numbers(5, seed=1)), {}),
}


@pytest.mark.parametrize("mesh", [None, _MESH], ids=["no mesh", "4"])
@pytest.mark.parametrize("name", _PROGRAMS)
def test_numbers_and_types_stay(name, mesh):
    fun, args, kwargs = _PROGRAMS[name]
    rewritten = rewrite(fun, mesh=mesh)

    assert_same(rewritten(*args, **kwargs), jax.jit(fun)(*args, **kwargs), rtol=1e-4)
    assert traced_names(rewritten, *args, **kwargs)["all_gather"] == 0


# ---- options of an inner jit


def test_static_arguments_of_an_inner_jit():
    def fun(x, power, *, mode):
        assert isinstance(power, int)
        return _mapped(x**power) if mode == "map" else x

    numbered = rewrite(jax.jit(fun, static_argnums=1, static_argnames="mode"), mesh=_MESH)
    named = rewrite(jax.jit(fun, static_argnames=("power", "mode")))

    _close(numbered(_X, 2, mode="map"), np.mean(_X**2, 0) - _X**2)
    _close(named(_X, power=2, mode="map"), np.mean(_X**2, 0) - _X**2)
    _close(named(_X, 2, mode="not"), _X)


def _add(state, other):
    return state + 0.0 * _busy(other), other * 2


@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
@pytest.mark.parametrize("options", [{"donate_argnums": 0}, {"donate_argnames": "state"}])
def test_donation_of_an_inner_jit(options, by_name):
    place = NamedSharding(_MESH, P("data"))
    step = rewrite(jax.jit(_add, **options), mesh=_MESH)
    state, other = jax.device_put((_X + 1, _X + 2), place)

    for _ in range(3):
        before = state
        state, _ = step(state=before, other=other) if by_name else step(before, other)
        assert before.is_deleted()
    _close(state, _X + 1)
    assert not other.is_deleted()
    text = step.lower(state, other).as_text()
    assert "tf.aliasing_output" in text or "donor" in text


def test_shardings_of_an_inner_jit():
    rows, columns = NamedSharding(_WIDE, P("data")), NamedSharding(_WIDE, P(None, "model"))
    shardings = {"in_shardings": (rows, columns), "out_shardings": (columns, rows)}
    plain = jax.jit(lambda x, y: (_busy(x) + 1, y * 2), **shardings)
    results = rewrite(plain, mesh=_WIDE)(np.asarray(_X), np.asarray(_X))

    _close(results[0], _OF_BUSY + 1)
    _close(results[1], 2 * _X)
    assert [array.sharding for array in results] == [columns, rows]


# ---- effects, names


def test_remat_is_kept_with_its_policy():
    def fun(x):
        saved = jax.checkpoint_policies.everything_saveable
        inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(_mapped(x))))
        return jnp.sum(inner(x) + jax.checkpoint(lambda x: jnp.sin(x * _W), policy=saved)(x))

    rewritten = rewrite(fun, mesh=_MESH)
    _close(jax.grad(rewritten)(_X), jax.grad(fun)(_X))
    remats = [eqn for eqn in equations(rewritten.trace(_X).jaxpr) if "policy" in eqn.params]
    assert [eqn.params["policy"] is None for eqn in remats] == [True, False]


def test_effects_happen_once_and_in_order():
    events = []

    def ask(x):
        events.append(float(x))
        return np.float32(x + 1)

    def step(x):
        return io_callback(ask, jax.ShapeDtypeStruct((), np.float32), x, ordered=True)

    def fun(x):
        jax.debug.callback(ask, x[0, 0], ordered=True)
        total, _ = lax.scan(lambda c, _: (step(c), None), step(x[0, 5]), None, length=2)
        jax.debug.callback(ask, total * 2, ordered=True)
        return total + jnp.sum(jax.jit(lambda x: x * _W)(x)) * 0

    rewritten = rewrite(fun)
    for _ in range(2):
        events.clear()
        assert float(rewritten(jnp.arange(400.0).reshape(4, 100))) == 8.0
        jax.effects_barrier()
        assert events == [0.0, 5.0, 6.0, 7.0, 16.0]


def test_names_and_source_lines_stay():
    def body(block):
        with jax.named_scope("inner_scope"):
            both = lax.all_gather(block, "i")  # line + 2
            return jnp.mean(both, 0) * 3.0

    def fun(x):
        with jax.named_scope("outer_scope"):
            y = jnp.tanh(x)  # line + 2
        return jax_dist.pmap(body, "i")(y * _W)

    for mesh in (None, _MESH):
        text = rewrite(fun, mesh=mesh).lower(_X).as_text(debug_info=True)
        scopes = set(re.findall(r"\w+_scope/\w+", text))
        assert {"outer_scope/tanh", "inner_scope/psum"} <= scopes
        assert "module @jit_fun" in text
        lines = set(re.findall(r'test_rewrite_mechanism.py":(\d+)', text))
        # Also of the psum that stands where the gather and the mean were.
        wanted = (line_of(fun, 2), line_of(fun, 3), line_of(body, 3))
        assert {str(line) for line in wanted} <= lines
        assert "/jax_dist/" not in text


# ---- the wrapper


@pytest.mark.parametrize(
    "around",
    [jax.checkpoint, lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0]],
)
def test_a_body_that_is_traced_again_may_come_to_hold_arrays(around):
    table = jnp.arange(3.0)
    replace_sin = lambda eqn, values: [values[0] * table]
    handler_of = lambda eqn: replace_sin if eqn.primitive.name == "sin" else None
    x = jnp.ones(3)

    (result,) = rebind.evaluate(jax.make_jaxpr(around(jnp.sin))(x), [x], handler_of)

    np.testing.assert_array_equal(result, table)


def test_a_rewritten_function_looks_like_the_one_it_is_made_from():
    rewritten = rewrite(_busy)

    assert (rewritten.__name__, rewritten.__doc__) == ("_busy", _busy.__doc__)
    assert rewritten.__wrapped__ is _busy
    assert re.match(r"<jax_dist.rewrite of _busy at .*mechanism.py:\d+", repr(rewritten))
    assert compiled_collectives(rewritten.lower(_X).compile()) == {"all-reduce": 1}
    assert rewritten.report(_X).name == "_busy"
    # jax.jit copies the attributes of a function, `lower` among them.
    jitted = jax.jit(rewritten, donate_argnums=0)
    assert [info.donated for info in jax.tree.leaves(jitted.lower(_X).args_info)] == [True]


def test_methods_partials_and_callables():
    class Model:
        w = _W

        def apply(self, x):
            return _mapped(x * self.w)

        @rewrite
        def decorated(self, x):
            return x * self

        __call__ = apply

    model = Model()
    for fun in (model.apply, model, functools.partial(Model.apply, model)):
        _close(rewrite(fun, mesh=_MESH)(_X), _OF_BUSY)
    assert isinstance(model.decorated, types.MethodType)
    _close(Model.decorated(2.0, _X), 2 * _X)


# ---- options and arguments


_WRONG = {  # by words of the error
    "rewrite takes a function, not 3": {"fun": 3},
    "captures= of rewrite must be one of 'lift', 'warn', 'allow', 'error', not": {
        "captures": "lit"
    },
    "gathers= of rewrite must be one of 'reduce', 'exact', 'keep'": {"gathers": None},
    "partitioning= of rewrite must be one of": {"partitioning": "on"},
    "mesh= of rewrite must be a jax.sharding.Mesh, not ('i',)": {"mesh": ("i",)},
    "not AbstractMesh": {"mesh": _WIDE.abstract_mesh},
    "specs= of rewrite must be a dict {'name of the op': (in_specs, out_specs)}": {"specs": ["op"]},
}


@pytest.mark.parametrize("message", _WRONG)
def test_a_wrong_option_is_named(message):
    options = {"fun": _plain, **_WRONG[message]}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rewrite(**options)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        explain(options.pop("fun"), _X, **options)


_FIVE = Mesh(np.array(jax.devices()[:5]), ("five",))
_ELSEWHERE = {
    "from a pmap outside": jax.pmap(lambda x: x * 1),
    "on one device": lambda x: jax.device_put(x, jax.devices()[5]),
    "over another axis": lambda x: jax.device_put(x, NamedSharding(_FIVE, P(None, "five"))),
}


@pytest.mark.parametrize("name", _ELSEWHERE)
def test_arguments_elsewhere_are_put_on_the_mesh(name):
    mapped = jax.pmap(lambda x: x + lax.psum(x, "i"), "i")

    result = rewrite(lambda x: mapped(x), mesh=_WIDE)(_ELSEWHERE[name](_X))

    np.testing.assert_allclose(result, _X + _X.sum(0))
    assert result.sharding.spec == P("data")
    assert result.sharding.device_set == set(jax.devices())


def test_other_errors_are_passed_on():
    def fails(x):
        raise ValueError("by the user")

    with pytest.raises(ValueError, match="^by the user"):
        rewrite(fails, mesh=_WIDE)(jax.device_put(_X, NamedSharding(_WIDE, P())))
    mapped = jax.pmap(lambda x: x + 1)
    with pytest.raises(ValueError, match="incompatible devices"):  # without a mesh
        rewrite(lambda x: mapped(x))(jax.device_put(_X, jax.devices()[5]))
