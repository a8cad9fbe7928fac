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
from jax_dist.errors import CapturedArrayWarning

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.filterwarnings("ignore:JXD401. '.*' captures:jax_dist.errors.CapturedArrayWarning"),
]

_MESH = mesh_of(data=4)
_W = jnp.linspace(0.0, 1.0, 400).reshape(4, 100)
_X = numbers(4, 100)


def _body(block):
    return jnp.mean(lax.all_gather(block, "i"), 0) - block


_mapped = jax_dist.pmap(_body, axis_name="i", gathers="keep")  # they are left to `rewrite`


# Its gradient keeps the cosine, in blocks of another shape than what is mapped.
_bent = jax_dist.pmap(lambda block: jnp.sin(_body(block)), axis_name="i")


def _plain(x):
    """`[4, 100] -> [4, 100]`."""
    return jnp.sin(x) * 2.0


def _busy(x):
    """`[4, 100] -> [4, 100]`."""
    return _mapped(x * _W)


_OF_PLAIN = np.sin(np.asarray(_X)) * 2
_OF_BUSY = np.mean(np.asarray(_X * _W), 0) - np.asarray(_X * _W)

_FUNCTIONS = pytest.mark.parametrize(
    ("fun", "expected"), [(_plain, _OF_PLAIN), (_busy, _OF_BUSY)], ids=["plain", "busy"]
)
_FUNCTIONS_AND_MESHES = pytest.mark.parametrize(
    ("fun", "expected", "mesh"),
    [
        (_plain, _OF_PLAIN, _MESH),
        (_busy, _OF_BUSY, None),
        (_busy, _OF_BUSY, _MESH),
        (_busy, _OF_BUSY, mesh_of(data=4, model=2)),
    ],
    ids=["plain", "busy", "busy, 4", "busy, 4x2"],
)
_MESHES = pytest.mark.parametrize(
    "mesh", [None, _MESH, mesh_of(data=4, model=2)], ids=["no mesh", "4", "4x2"]
)


def _close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


# ---- composition


@pytest.mark.thorough
@_FUNCTIONS_AND_MESHES
def test_it_composes_with_the_transforms_of_jax(fun, expected, mesh):
    rewritten = rewrite(fun, mesh=mesh)
    pair = jnp.stack([_X, _X])
    slope = jax.grad(lambda x: (fun(x) ** 2).sum())(_X)

    _close(rewritten(_X), expected)
    _close(rewrite(jax.jit(fun), mesh=mesh)(_X), expected)
    _close(jax.jit(rewritten)(_X), expected)
    _close(jax.vmap(rewritten)(pair), np.stack([expected, expected]))
    _close(jax.vmap(rewritten, in_axes=1, out_axes=2)(pair.swapaxes(0, 1))[..., 1], expected)
    _close(lax.scan(lambda c, x: (c, rewritten(x)), 0, pair)[1][1], expected)
    _close(lax.cond(jnp.all(_X < 99), rewritten, lambda x: x, _X), expected)
    _close(jax.grad(lambda x: (rewritten(x) ** 2).sum())(_X), slope)
    _close(jax.grad(lambda x: (jax.checkpoint(rewritten)(x) ** 2).sum())(_X), slope)
    _close(rewrite(jax.grad(lambda x: (fun(x) ** 2).sum()), mesh=mesh)(_X), slope)
    _close(jax.jvp(rewritten, (_X,), (_X,))[1], jax.jvp(fun, (_X,), (_X,))[1])
    _close(rewrite(rewritten, mesh=mesh)(_X), expected)


@_FUNCTIONS
def test_second_derivatives(fun, expected):
    curved = lambda f: lambda x: jax.jvp(jax.grad(lambda x: (f(x) ** 3).sum()), (x,), (x,))[1]

    wanted = jax.jit(curved(fun))(_X)
    np.testing.assert_allclose(curved(rewrite(fun))(_X), wanted, rtol=1e-4, atol=1e-5)


@_FUNCTIONS_AND_MESHES
def test_it_can_be_exported(fun, expected, mesh):
    exported = jax.export.export(jax.jit(rewrite(fun, mesh=mesh)))(_X)
    devices = exported.nr_devices
    place = None if devices == 1 else NamedSharding(mesh or _MESH, P())

    _close(jax.jit(exported.call)(jax.device_put(_X, place)), expected)
    assert devices == {_plain: 1, _busy: 8 if mesh is not None and mesh.size == 8 else 4}[fun]


@_FUNCTIONS
def test_under_set_mesh(fun, expected):
    with jax.set_mesh(_MESH):
        _close(rewrite(fun)(_X), expected)
        _close(rewrite(fun, mesh=_MESH)(_X), expected)
        _close(jax.jit(rewrite(fun))(_X), expected)


@_FUNCTIONS
def test_with_jit_disabled(fun, expected):
    with jax.disable_jit():
        _close(rewrite(fun)(_X), expected)


@_FUNCTIONS_AND_MESHES
def test_with_the_checks_of_jax_enabled(fun, expected, mesh):
    with jax.enable_checks(new_val=True):
        rewritten = rewrite(fun, mesh=mesh)
        _close(rewritten(_X), expected)
        _close(jax.grad(lambda x: rewritten(x).sum())(_X), jax.grad(lambda x: fun(x).sum())(_X))


def test_busy_is_rewritten_by_three_passes():
    """Else the tests here would prove nothing."""
    names = traced_names(rewrite(_busy, mesh=_MESH), _X)
    assert (names["all_gather"], names["psum"]) == (0, 1)

    with pytest.warns(CapturedArrayWarning, match=r"_W"):
        _close(rewrite(_busy)(_X), _OF_BUSY)
    report = jax_dist.explain(_busy, _X, mesh=_MESH)
    assert [(f.code, f.outcome) for f in report.findings] == [
        ("JXD002", "rewritten"),
        ("JXD301", "rewritten"),
    ]
    assert [(array.name, array.action) for array in report.captured] == [("_W", "lifted")]


# ---- arguments and results


def test_trees_keywords_and_weak_types():
    def fun(state, *, scale=2.0, batch=None):
        first, (second, nothing) = state["a"], state["b"]
        moved = _mapped(first * scale * _W)
        return {"out": (moved, nothing), "weak": second * 2, "batch": batch, "three": 3}

    state = {"a": _X, "b": [1.5, None]}
    found = rewrite(fun, mesh=_MESH)(state, batch=(jnp.int8(2),), scale=3.0)

    wanted = jax.jit(fun)(state, batch=(jnp.int8(2),), scale=3.0)
    assert_same(found, wanted)
    assert found["weak"].weak_type
    assert found["three"].weak_type
    assert not found["out"][0].weak_type
    assert_same(rewrite(fun)(state), jax.jit(fun)(state))


def test_what_is_said_to_an_inner_jit_about_static_arguments():
    def fun(x, power, *, mode):
        assert isinstance(power, int)
        return _mapped(x**power) if mode == "map" else x

    numbered = rewrite(jax.jit(fun, static_argnums=1, static_argnames="mode"), mesh=_MESH)
    named = rewrite(jax.jit(fun, static_argnames=("power", "mode")))

    squares = np.asarray(_X) ** 2
    _close(numbered(_X, 2, mode="map"), squares.mean(0) - squares)
    _close(named(_X, power=2, mode="map"), squares.mean(0) - squares)
    _close(named(_X, 2, mode="not"), _X)


def _add(state, other):
    return state + 0.0 * _busy(other), other * 2


@pytest.mark.parametrize(
    "said", [{"donate_argnums": 0}, {"donate_argnames": "state"}], ids=["number", "name"]
)
@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
def test_what_is_donated_to_an_inner_jit(said, by_name):
    place = NamedSharding(_MESH, P("data"))
    step = rewrite(jax.jit(_add, **said), mesh=_MESH)
    state, other = jax.device_put((_X + 1, _X + 2), place)

    for _ in range(3):
        given = state
        state, _ = step(state=given, other=other) if by_name else step(given, other)
        assert given.is_deleted()
    _close(state, _X + 1)
    assert not other.is_deleted()
    assert (
        "tf.aliasing_output" in step.lower(state, other).as_text()
        or "donor" in step.lower(state, other).as_text()
    )


def test_what_is_said_to_an_inner_jit_about_shardings():
    mesh = mesh_of(data=4, model=2)
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))

    def fun(x, y):
        return _busy(x) + 1, y * 2

    plain = jax.jit(fun, in_shardings=(rows, columns), out_shardings=(columns, rows))
    x = np.asarray(_X)
    found = rewrite(plain, mesh=mesh)(x, x)

    _close(found[0], _OF_BUSY + 1)
    _close(found[1], 2 * x)
    assert [array.sharding for array in found] == [columns, rows]


# ---- rules, effects, names


def _with_odd_rules(mapped):
    """Functions whose rules are not their derivatives: they tell whether the rules were used."""

    @jax.custom_jvp
    def forward(x):
        return x * 2

    forward.defjvp(lambda primals, tangents: (forward(*primals), 7.0 * tangents[0]))

    @jax.custom_vjp
    def backward(x):
        return x * 3

    backward.defvjp(lambda x: (x * 3, None), lambda _, g: (11.0 * g,))
    if mapped:
        return jax_dist.pmap(lambda x: backward(forward(x)) + 0.0 * _body(x), "i")
    return lambda x: backward(forward(x))


@pytest.mark.thorough
@_MESHES
@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "in a pmap"])
def test_custom_rules_are_used_by_later_derivatives(mapped, mesh):
    fun = _with_odd_rules(mapped)
    loss = lambda f: lambda x: f(x).sum()
    rewritten = rewrite(fun, mesh=mesh)

    _close(rewritten(_X), 6 * _X)
    _close(jax.grad(loss(rewritten))(_X), np.full((4, 100), 77.0))
    _close(jax.grad(jax.jit(loss(rewritten)))(_X), np.full((4, 100), 77.0))
    _close(rewrite(jax.grad(loss(fun)), mesh=mesh)(_X), np.full((4, 100), 77.0))


def test_effects_happen_once_and_in_order():
    heard = []

    def hear(what, x):
        heard.append((what, float(np.sum(x))))

    def ask(x):
        heard.append(("asked", float(x)))
        return np.float32(x + 1)

    def fun(x):
        jax.debug.callback(functools.partial(hear, "first"), x[0, 0], ordered=True)
        answer = io_callback(ask, jax.ShapeDtypeStruct((), np.float32), x[0, 1], ordered=True)

        def step(carry, _):
            jax.debug.callback(functools.partial(hear, "step"), carry, ordered=True)
            return carry + answer, None

        total, _ = lax.scan(step, answer, None, length=2)
        jax.debug.callback(functools.partial(hear, "last"), total, ordered=True)
        table = jnp.asarray(_W[0, :4])
        return total + jnp.sum(table) * 0 + jnp.sum(jax.jit(lambda x: x * _W)(x)) * 0

    x = jnp.arange(400.0).reshape(4, 100)
    rewritten = rewrite(fun)
    for _ in range(2):
        heard.clear()
        assert float(rewritten(x)) == 6.0
        jax.effects_barrier()
        assert heard == [
            ("first", 0.0),
            ("asked", 1.0),
            ("step", 2.0),
            ("step", 4.0),
            ("last", 6.0),
        ]


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


# ---- control flow


def _in_loops(x):
    """`[4, 100] -> [4, 100]`: the gathers stand in the bodies."""

    def body(block):
        def step(carry, scale):
            return carry - jnp.mean(lax.all_gather(carry, "i"), 0) * scale, carry.sum()

        block, sums = lax.scan(step, block, jnp.arange(3.0) / 10)
        block = lax.fori_loop(0, 2, lambda i, b: b + jnp.sum(lax.all_gather(b, "i"), 0) / 8, block)
        block = lax.cond(
            sums.shape[0] > 2, lambda b: jnp.max(lax.all_gather(b, "i"), 0) + b, jnp.sin, block
        )
        return lax.switch(jnp.int32(1), [jnp.cos, lambda b: b * 2], block)

    return jax_dist.pmap(body, "i")(x)


@_MESHES
def test_control_flow_in_a_mapped_function(mesh):
    rewritten = rewrite(_in_loops, mesh=mesh)

    assert_same(rewritten(_X), _in_loops(_X), rtol=1e-5)
    names = traced_names(rewritten, _X)
    assert names["all_gather"] == 0
    assert (names["scan"], names["cond"]) == (2, 2)


@_MESHES
def test_reverse_mode_through_a_scan(mesh):
    def loss(x):
        step = lambda c, w: (_bent(c) * w, c[0])
        return jnp.sum(lax.scan(step, x * _W, jnp.arange(1.0, 4.0))[0] ** 2)

    wanted = jax.grad(loss)(_X)
    np.testing.assert_allclose(jax.grad(rewrite(loss, mesh=mesh))(_X), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rewrite(jax.grad(loss), mesh=mesh)(_X), wanted, rtol=1e-4, atol=1e-5)


def test_types_of_a_checked_shard_map():
    """With check_vma=True a psum is invariant, and a gather varies: the rewriting must say so."""
    mesh = mesh_of(data=4)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    def fun(block, w):
        mean = jnp.mean(lax.all_gather(block, "data"), 0)
        total = lax.scan(lambda c, _: (c + mean * w.sum(), None), block, None, length=2)[0]
        return total + lax.psum(w, "data").sum()

    w = numbers(5, seed=1)
    rewritten = rewrite(fun)
    _close(rewritten(_X, w), fun(_X, w))
    names = traced_names(rewritten, _X, w)
    assert (names["all_gather"], names["shard_map"]) == (0, 1)
    loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
    slopes = jax.jit(jax.grad(loss(fun), (0, 1)))(_X, w)
    before = jax.jit(jax.grad(loss(rewritten), (0, 1)))(_X, w)
    after = rewrite(jax.grad(loss(fun), (0, 1)))(_X, w)
    for ours, theirs in zip((*before, *after), (*slopes, *slopes), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


# ---- the wrapper


def test_a_rewritten_function_looks_like_the_one_it_is_made_from():
    rewritten = rewrite(_busy)

    assert rewritten.__name__ == "_busy"
    assert rewritten.__doc__ == _busy.__doc__
    assert rewritten.__wrapped__ is _busy
    assert compiled_collectives(rewritten, _X) == {"all-reduce": 1}
    assert rewritten.report(_X).name == "_busy"


def test_its_methods_are_its_own_around_a_jit_of_a_pmap():
    """That jit has copied the `lower` of the pmap, which knows of no rewriting."""
    jitted = jax.jit(jax.pmap(_body, axis_name="i"))

    text = rewrite(jitted).lower(_X).as_text()

    assert text.count("stablehlo.all_reduce") == 1
    assert "stablehlo.all_gather" not in text


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
