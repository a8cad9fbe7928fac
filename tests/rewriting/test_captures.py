"""Which arrays a program captures, once each, what is said of them, and programs without them."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import _compat
from jax_dist._passes.captures import Capture, find_captures, warning_text
from jax_dist._passes.constants import lift_arrays
from jax_dist._passes.interpreter import equations, evaluate

_NUMBERS = np.random.RandomState(0)
_W = jnp.asarray(_NUMBERS.randn(3, 5), jnp.float32)
_N = _NUMBERS.randn(5, 7).astype(np.float32)
_X = jnp.array([0.5, -1.0, 2.0])
_LITERALS = "jax_use_simplified_jaxpr_constants"


def _find(fun, *args):
    return find_captures(jax.make_jaxpr(fun)(*args), fun)


# ---- what is said of them


def test_what_is_known_of_captures():
    w, plain = jnp.ones((3, 5), jnp.bfloat16), jnp.array([3, 4], jnp.uint32)
    new, old = jax.random.key(1), jax.random.PRNGKey(2)
    twice = lambda x: lax.cond(x[0] > 0, lambda: x @ w, lambda: jax.jit(lambda x: x @ w)(x))
    fun = lambda x: (twice(x), jax.random.normal(new), jax.random.normal(old), plain[0])

    captures = _find(fun, _X)  # each once, though it is used at many depths
    assert [(c.name, c.shape, c.dtype, c.bytes, c.is_key) for c in captures] == [
        ("w", (3, 5), "bfloat16", 30, False),
        ("new", (), "key<fry>", 8, True),
        ("old", (2,), "uint32", 8, True),
        ("plain", (2,), "uint32", 8, False),
    ]
    assert (captures[0].refused, captures[0].value) == ("", w)
    place = f"test_captures.py:{twice.__code__.co_firstlineno}"
    assert captures[0].captured_at.endswith(place)
    assert captures[0].used_at.endswith(place)


def test_the_warning():
    facts = {"shape": (4000, 4000), "dtype": "float32", "bytes": 64_000_000, "is_key": False}
    facts |= {"captured_at": "train.py:10", "used_at": "train.py:12"}
    capture = Capture(name="params['w']", refused="it is stuck", **facts)

    head = (
        "JXD401: 'step' captures an array: params['w']: float32[4000,4000], 64.0 MB, captured at "
        "train.py:10, used at train.py:12, not lifted: it is stuck. They "
    )
    lifted = "are arguments of the program now; to avoid this warning, pass them yourself."
    kept = "stay in the program, because captures='warn': it compiles slowly, and again for other "
    remedy = "values. Pass them as arguments."
    assert warning_text([capture], "step") == head + lifted
    assert warning_text([capture], "step", kept_because="captures='warn'") == head + kept + remedy


# ---- programs with operands in the place of their captured arrays


def _both(x):
    """`[3] -> [7]`, and the captured arrays are in the body that this is traced in."""
    return jnp.sin(x) @ _W @ _N


def _jitted(x):
    """`[3] -> [7]`, and the arrays are constants of the inner jit, at whatever depth it is."""
    return jax.jit(lambda x: _both(x))(x)


def _scan(x):
    step = lambda carry, y: (carry + jnp.sum(_jitted(carry * y)), carry * 2)
    return lax.scan(step, x, jnp.arange(4.0), reverse=True, unroll=2)


def _cond(x):
    return lax.cond(x[0] > 0, lambda x: jax.jit(lambda x: x @ _W)(x)[0], lambda x: jnp.sum(x), x)


def _while(x):
    bound = lambda total: jax.jit(lambda t: t < jnp.sum(_W * _W))(total - x[2])
    return lax.while_loop(bound, lambda total: total + jnp.sum(_jitted(x)) ** 2 + 1, 0.0)


def _custom_vjp(x):
    rule = jax.custom_vjp(lambda x: jax.jit(lambda x: x @ _W)(x))
    rule.defvjp(lambda x: (x @ _W, None), lambda _, grads: (3 * (_W @ grads),))
    return rule(jnp.sin(x))


def _custom_jvp(x):
    rule = jax.custom_jvp(lambda x: jax.jit(lambda x: x @ _W)(x))
    rule.defjvp(lambda primals, tangents: (primals[0] @ _W, 3 * (tangents[0] @ _W)))
    return rule(jnp.sin(x))


def _shard_map(body, *, check_vma):
    mesh = _compat.auto_mesh(np.array(jax.devices()[:3]), ["i"])
    inside = lambda x: lax.psum(body(jnp.broadcast_to(x, 3))[:, None], "i") * x
    specs = {"in_specs": P("i"), "out_specs": P(None, "i"), "check_vma": check_vma}
    return jax.shard_map(inside, mesh=mesh, **specs)


PROGRAMS = {
    "plain": _both,
    "jit": _jitted,
    "scan": _scan,
    "cond": _cond,
    "while": _while,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "remat": jax.checkpoint(_jitted),
    "shard_map": _shard_map(_jitted, check_vma=True),
    "shard_map, unchecked": _shard_map(_jitted, check_vma=False),
    "pmap": lambda x: jax.pmap(_jitted)(jnp.stack([x, 2 * x])),
    "scan of cond of jit": lambda x: lax.scan(lambda c, _: (c + _cond(c), None), x, length=3)[0],
    "returned": lambda x: (jax.jit(lambda: (_N, x))(), _W),
}
DIFFERENTIATED = ("plain", "jit", "scan", "cond", "custom_vjp", "custom_jvp", "remat", "shard_map")
_CONSTANT = re.compile(r"stablehlo\.constant .*tensor<(3x5|5x7)xf32>")


def _lifted(fun, *args):
    """Return a jit of `fun` that takes its captured arrays first, and these arrays."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    captures = find_captures(jaxpr, fun)
    names = [capture.name for capture in captures]
    assert names
    assert len(names) == len({*names} & {"_W", "_N"})  # once each
    values = [capture.value for capture in captures]
    lifted, values = lift_arrays(jaxpr, values)
    assert len(lifted.in_avals) == len(values) + len(args)
    return jax.jit(lambda values, *args: evaluate(lifted, [*values, *args])), values


def _agree(fun, *args):
    jitted, values = _lifted(fun, *args)
    wanted = jax.tree.leaves(jax.jit(fun)(*args))
    chex.assert_trees_all_close(jitted(values, *args), wanted, rtol=2e-6)
    assert _CONSTANT.search(jax.jit(fun).lower(*args).as_text())
    assert not _CONSTANT.search(jitted.lower(values, *args).as_text())
    changed = jitted([jnp.zeros_like(value) for value in values], *args)
    assert not all(map(np.array_equal, changed, wanted))


def _loss(name):
    return lambda x: sum(jnp.sum(out) for out in jax.tree.leaves(PROGRAMS[name](x)))


_AGREEING = PROGRAMS | {f"gradient of {name}": jax.grad(_loss(name)) for name in DIFFERENTIATED}


@pytest.mark.parametrize("name", _AGREEING)
def test_lifted_programs_compute_the_same(name):
    _agree(_AGREEING[name], _X)


@pytest.fixture
def literals():
    """Have JAX write arrays as literals, and forget its traces of the usual form."""
    usual = getattr(jax.config, _LITERALS)
    jax.clear_caches()
    jax.config.update(_LITERALS, not usual)
    yield
    jax.config.update(_LITERALS, usual)
    jax.clear_caches()


@pytest.mark.usefixtures("literals")
@pytest.mark.parametrize("name", ["plain", "jit", "scan", "cond", "gradient of plain", "returned"])
def test_arrays_that_are_literals_are_lifted_too(name):
    _agree(_AGREEING[name], _X)


def test_an_inner_jit_keeps_its_options():
    mesh = _compat.auto_mesh(np.array(jax.devices()[:2]), ["i"])
    inner = jax.jit(
        lambda x, y: (y * 2, x @ _N),
        in_shardings=(NamedSharding(mesh, P("i")), None),
        out_shardings=(None, NamedSharding(mesh, P(None))),
        donate_argnums=1,
        keep_unused=True,
    )
    args = jnp.ones((2, 5)), jnp.ones(6)
    fun = lambda x, y: inner(x, y)
    jitted, values = _lifted(fun, *args)

    before, after = (
        next(eqn.params for eqn in equations(jaxpr) if eqn.params.get("keep_unused"))
        for jaxpr in (jax.make_jaxpr(fun)(*args), jitted.trace(values, *args).jaxpr)
    )
    assert after["donated_invars"] == (False, *before["donated_invars"])
    assert after["in_shardings"][1:] == before["in_shardings"]
    assert (after["name"], after["out_shardings"]) == (before["name"], before["out_shardings"])


def test_a_body_without_a_rule_keeps_its_array_and_says_so():
    apply, solve = jax.jit(lambda x: x @ jnp.asarray(_N)[:, :5]), lambda f, b: f(b)
    fun = lambda b: lax.custom_linear_solve(lambda x: apply(x), b, solve, symmetric=True)

    (capture,) = _find(fun, jnp.ones(5))
    why = "it is in the body of 'custom_linear_solve', which takes no more operands"
    assert capture.refused == why


@pytest.mark.filterwarnings("ignore::jax_dist.CapturedArrayWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "float16", "bool"])
@pytest.mark.parametrize("size", [4, 2000])
def test_numpy_arrays_of_every_type_may_be_captured(dtype, size):
    table = np.arange(size).astype(bool).astype(jnp.dtype(dtype))
    fun = lambda x: x * jnp.asarray(table).astype(jnp.float32).sum()
    x = np.ones(8, np.float32)

    for changed in (jax_dist.rewrite(fun), jax_dist.pmap(fun)):
        np.testing.assert_array_equal(changed(x), x * (size - 1))
