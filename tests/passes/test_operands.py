"""Programs with operands in the place of their captured arrays: same numbers, no constants left."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite.captures import find_captures
from jax_dist._rewrite.constants import lift_arrays
from jax_dist._rewrite.interpreter import equations, run

pytestmark = pytest.mark.rewriting

_NUMBERS = np.random.RandomState(0)
_W = jnp.asarray(_NUMBERS.randn(3, 5), jnp.float32)
_N = _NUMBERS.randn(5, 7).astype(np.float32)
_X = jnp.array([0.5, -1.0, 2.0])
_CONSTANT = re.compile(r"stablehlo\.constant .*tensor<(3x5|5x7)xf32>")


def _with_operands(jaxpr, captures, values, args):
    """The results of a program with other values in the place of its captured arrays."""
    lifted = lift_arrays(jaxpr, [capture.value for capture in captures])
    return run(lifted, [*values, *args], {})


def _both(x):
    """`[3] -> [7]`, and the captured arrays are found in the body that this is traced in."""
    return jnp.sin(x) @ _W @ _N


def _jitted(x):
    """`[3] -> [7]`, and the arrays are constants of the inner jit, at whatever depth it is."""
    return jax.jit(lambda x: _both(x))(x)


def _scan(x):
    step = lambda carry, y: (carry + jnp.sum(_jitted(carry * y)), carry * 2)
    return lax.scan(step, x, jnp.arange(4.0), reverse=True, unroll=2)


def _cond(x):
    return lax.cond(x[0] > 0, lambda x: jax.jit(lambda x: x @ _W)(x)[0], lambda x: jnp.sum(x), x)


def _switch(x):
    other = lambda x: jnp.full(7, jnp.sum(x))
    return lax.switch(x[2].astype(int), [other, other, _jitted], x)


def _while(x):
    bound = lambda total: jax.jit(lambda t: t < jnp.sum(_W * _W))(total - x[2])
    return lax.while_loop(bound, lambda total: total + jnp.sum(_jitted(x)) ** 2 + 1, 0.0)


def _while_of_each(x):
    more = jax.jit(lambda total: total < jnp.sum(_W * _W))
    return jax.vmap(lambda start: lax.while_loop(more, lambda t: t + 1 + jnp.sum(_N) ** 2, start))(
        x
    )


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
    inside = lambda x: lax.psum(body(jnp.broadcast_to(x, 3)), "i") * x
    return jax.shard_map(
        inside, mesh=mesh, in_specs=P("i"), out_specs=P(None, "i"), check_vma=check_vma
    )


def _expand(body):
    return lambda x: body(x)[:, None]


PROGRAMS = {
    "plain": _both,
    "jit": _jitted,
    "jit of jit": jax.jit(_jitted),
    "scan": _scan,
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, x: x + jnp.sum(_jitted(x)), x),
    "cond": _cond,
    "switch": _switch,
    "while": _while,
    "vmap of while": _while_of_each,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "remat": jax.checkpoint(_jitted),
    "shard_map": _shard_map(_expand(_jitted), check_vma=True),
    "shard_map, unchecked": _shard_map(_expand(_jitted), check_vma=False),
    "shard_map of scan": _shard_map(lambda x: _scan(x)[1][:, :1], check_vma=False),
    "pmap": lambda x: jax.pmap(_jitted)(jnp.stack([x, 2 * x])),
    "vmap": lambda x: jax.vmap(_jitted)(jnp.stack([x, 2 * x])),
    "scan of cond of jit": lambda x: lax.scan(lambda c, _: (c + _cond(c), None), x, length=3)[0],
    "returned": lambda x: (jax.jit(lambda: (_N, x))(), _W),
}
DIFFERENTIATED = ("plain", "jit", "scan", "cond", "custom_vjp", "custom_jvp", "remat", "shard_map")


@pytest.fixture(params=["constants", "literals"], scope="class")
def form(request):
    """How JAX keeps arrays in a jaxpr."""
    option = "jax_use_simplified_jaxpr_constants"
    usual = getattr(jax.config, option)
    jax.clear_caches()  # so that no trace of the other form is used again
    jax.config.update(option, request.param == "literals")
    yield
    jax.config.update(option, usual)
    jax.clear_caches()


def _lifted(fun, *args):
    """A jit of `fun` that takes its captured arrays first, and these arrays."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    captures = find_captures(jaxpr, fun)
    jitted = jax.jit(lambda values, *args: _with_operands(jaxpr, captures, values, args))
    return jitted, [capture.value for capture in captures]


def _agree(fun, *args):
    jitted, values = _lifted(fun, *args)
    assert values
    chex.assert_trees_all_close(
        jitted(values, *args), jax.tree.leaves(jax.jit(fun)(*args)), rtol=2e-6
    )
    assert not _CONSTANT.search(jitted.lower(values, *args).as_text())
    zeros = [jnp.zeros_like(value) for value in values]
    changed = jax.tree.leaves(jitted(zeros, *args))
    assert not all(map(np.array_equal, changed, jitted(values, *args)))


@pytest.mark.usefixtures("form")
class TestWithoutArrays:
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_lifted_programs_compute_the_same(self, name):
        _agree(PROGRAMS[name], _X)

    @pytest.mark.parametrize("name", DIFFERENTIATED)
    def test_gradients_are_the_same(self, name):
        loss = lambda x: sum(jnp.sum(out) for out in jax.tree.leaves(PROGRAMS[name](x)))

        _agree(jax.grad(loss), _X)


def test_the_check_for_constants_sees_them():
    assert _CONSTANT.search(jax.jit(_both).lower(_X).as_text())


def test_rules_hold_for_gradients_taken_of_the_lifted_program():
    for program in (_custom_vjp, _custom_jvp):
        jitted, values = _lifted(program, _X)

        gradient = jax.grad(lambda x: jitted(values, x)[0].sum())(_X)  # noqa: B023

        expected = 3 * (_W @ np.ones(5)) * jnp.cos(_X)  # the rules say 3
        chex.assert_trees_all_close(gradient, expected, rtol=1e-6)


def test_an_inner_jit_keeps_what_it_was_told():
    mesh = _compat.auto_mesh(np.array(jax.devices()[:2]), ["i"])
    inner = jax.jit(
        lambda x, y: (y * 2, x @ _N),
        in_shardings=(NamedSharding(mesh, P("i")), None),
        out_shardings=(None, NamedSharding(mesh, P(None))),
        donate_argnums=1,
        keep_unused=True,
    )
    fun = lambda x, y: inner(x, y)
    jitted, values = _lifted(fun, jnp.ones((2, 5)), jnp.ones(6))

    def told(program):
        (eqn,) = [eqn for eqn in equations(program) if eqn.primitive.name == "jit"]
        return eqn.params

    before = told(jax.make_jaxpr(fun)(jnp.ones((2, 5)), jnp.ones(6)))
    after = told(jitted.trace(values, jnp.ones((2, 5)), jnp.ones(6)).jaxpr)
    assert before["name"] == after["name"] == "<lambda>"
    assert before["donated_invars"] == (False, True)
    assert after["donated_invars"] == (False, False, True)
    assert after["in_shardings"][1:] == before["in_shardings"]
    assert after["out_shardings"] == before["out_shardings"]
    assert after["keep_unused"] is True


def test_a_function_that_is_called_often_stays_one_function():
    layer = jax.jit(lambda x: jnp.tanh(x @ _W @ _W.T), inline=False)
    fun = lambda x: layer(layer(layer(x)))
    jitted, values = _lifted(fun, _X)

    text = jitted.lower(values, _X).as_text()
    assert text.count("stablehlo.tanh") == 1


def test_only_the_named_captures_are_replaced():
    jaxpr = jax.make_jaxpr(_jitted)(_X)
    captures = [found for found in find_captures(jaxpr, _jitted) if found.name == "_N"]
    jitted = jax.jit(lambda values, x: _with_operands(jaxpr, captures, values, [x]))

    text = jitted.lower([_N], _X).as_text()
    assert re.findall(r"stablehlo\.constant .*tensor<(\dx\d)xf32>", text) == ["3x5"]


def test_a_body_without_a_rule_keeps_its_array_and_says_so():
    solve = jax.jit(lambda x: x @ jnp.asarray(_N)[:, :5])

    def fun(b):
        return lax.custom_linear_solve(
            lambda x: solve(x), b, lambda matvec, b: matvec(b), symmetric=True
        )

    jaxpr = jax.make_jaxpr(fun)(jnp.ones(5))
    (capture,) = find_captures(jaxpr, fun)
    assert capture.refused == (
        "it is in the body of 'custom_linear_solve', which takes no more operands"
    )


def test_random_keys_of_both_kinds():
    new, old = jax.random.key(3), jax.random.PRNGKey(4)

    def fun(x):
        return x + jax.random.uniform(new, (3,)) + jax.jit(lambda: jax.random.uniform(old, (3,)))()

    jitted, values = _lifted(fun, _X)

    chex.assert_trees_all_close(jitted(values, _X), [fun(_X)], rtol=1e-6)
    assert "dense<[0, 4]>" in jax.jit(fun).lower(_X).as_text()
    assert "dense<[0, 3]>" not in jitted.lower(values, _X).as_text()
    assert "dense<[0, 4]>" not in jitted.lower(values, _X).as_text()


def test_scopes_and_lines_of_the_user_stay():
    def fun(x):
        with jax.named_scope("decoder"):
            return _jitted(x)

    jitted, values = _lifted(fun, _X)

    text = jitted.lower(values, _X).as_text(debug_info=True)
    assert "decoder" in text
    assert "test_operands.py" in text
    assert "operands.py:1" not in text.replace("test_operands.py", "")
