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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from observing import assert_same, compiled_collectives, line_of, mesh_of, numbers, traced_names

import jax_dist
from jax_dist import rewrite
from jax_dist._passes import rebind
from jax_dist._passes.interpreter import equations
from jax_dist.errors import CapturedArrayWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore:JXD401. '.*' captures:jax_dist.errors.CapturedArrayWarning"
)

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


def _body_of_all(x):
    return np.mean(np.asarray(x), 0) - np.asarray(x)


_OF_BUSY = _body_of_all(_X * _W)
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
    report = jax_dist.explain(_busy, _X, mesh=_MESH)
    told = [(f.code, f.outcome) for f in report.findings]
    assert told == [("JXD002", "rewritten"), ("JXD301", "rewritten")]
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
    devices = exported.nr_devices
    place = None if devices == 1 else NamedSharding(mesh or _MESH, P())

    _close(jax.jit(exported.call)(jax.device_put(_X, place)), jax.jit(fun)(_X))
    assert devices == {_plain: 1, _busy: 8 if mesh is not None and mesh.size == 8 else 4}[fun]


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

    _close(numbered(_X, 2, mode="map"), _body_of_all(_X**2))
    _close(named(_X, power=2, mode="map"), _body_of_all(_X**2))
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


# ---- rules, effects, names


@jax.custom_jvp
def _forward(x):
    return x * 2


@jax.custom_vjp
def _backward(x):
    return x * 3


# They are not the derivatives, so they tell whether the rules were used.
_forward.defjvp(lambda primals, tangents: (_forward(*primals), 7.0 * tangents[0]))
_backward.defvjp(lambda x: (x * 3, None), lambda _, g: (11.0 * g,))
_in_a_pmap = jax_dist.pmap(lambda x: _backward(_forward(x)) + 0.0 * _body(x), "i")


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [None, _MESH], ids=["no mesh", "4"])
@pytest.mark.parametrize("fun", [lambda x: _backward(_forward(x)), _in_a_pmap])
def test_custom_rules_are_used_by_later_derivatives(fun, mesh):
    loss = lambda f: lambda x: f(x).sum()
    rewritten = rewrite(fun, mesh=mesh)
    after = jax.grad(jax.jit(loss(rewritten)))

    _close(rewritten(_X), 6 * _X)
    for slope in (jax.grad(loss(rewritten)), after, rewrite(jax.grad(loss(fun)), mesh=mesh)):
        _close(slope(_X), np.full((4, 100), 77.0))


def test_remat_is_kept_with_its_policy():
    def fun(x):
        saved = jax.checkpoint_policies.everything_saveable
        inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(_mapped(x))))
        return jnp.sum(inner(x) + jax.checkpoint(lambda x: jnp.sin(x * _W), policy=saved)(x))

    rewritten = rewrite(fun, mesh=_MESH)
    _close(jax.grad(rewritten)(_X), jax.grad(fun)(_X))
    held = [eqn for eqn in equations(rewritten.trace(_X).jaxpr) if "policy" in eqn.params]
    assert [eqn.params["policy"] is None for eqn in held] == [True, False]


def test_effects_happen_once_and_in_order():
    events = []

    def note(what):
        heard = lambda x: events.append((what, float(x)))
        return functools.partial(jax.debug.callback, heard, ordered=True)

    def ask(x):
        events.append(("asked", float(x)))
        return np.float32(x + 1)

    def fun(x):
        note("first")(x[0, 0])
        answer = io_callback(ask, jax.ShapeDtypeStruct((), np.float32), x[0, 1], ordered=True)

        def step(carry, _):
            note("step")(carry)
            return carry + answer, None

        total, _ = lax.scan(step, answer, None, length=2)
        note("last")(total)
        return total + jnp.sum(jax.jit(lambda x: x * _W)(x)) * 0

    rewritten = rewrite(fun)
    expected = [("first", 0.0), ("asked", 1.0), ("step", 2.0), ("step", 4.0), ("last", 6.0)]
    for _ in range(2):
        events.clear()
        assert float(rewritten(jnp.arange(400.0).reshape(4, 100))) == 6.0
        jax.effects_barrier()
        assert events == expected


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
    assert compiled_collectives(rewritten, _X) == {"all-reduce": 1}
    assert rewritten.report(_X).name == "_busy"
    # jax.jit copies the attributes of a function, `lower` among them.
    jitted = jax.jit(rewritten, donate_argnums=0)
    assert [info.donated for info in jax.tree.leaves(jitted.lower(_X).args_info)] == [True]


def test_methods_partials_and_callables():
    class Model:
        def __init__(self, w):
            self.w = w

        def apply(self, x):
            return _mapped(x * self.w)

        __call__ = apply

    model = Model(_W)
    for fun in (model.apply, model, functools.partial(Model.apply, model)):
        _close(rewrite(fun, mesh=_MESH)(_X), _OF_BUSY)

    class Decorated:
        @rewrite
        def scaled(self, x):
            return x * self

    _close(Decorated.scaled(2.0, _X), 2 * _X)
    assert isinstance(Decorated().scaled, types.MethodType)
