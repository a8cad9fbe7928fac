"""Captured arrays where JAX writes them as literals (`jax_use_simplified_jaxpr_constants`)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_dist._passes.captures import find_captures
from jax_dist._passes.constants import lift_arrays
from jax_dist._passes.interpreter import evaluate

_OPTION = "jax_use_simplified_jaxpr_constants"
_X = jnp.asarray([0.5, -1.0, 2.0])
TABLE = jnp.arange(9.0).reshape(3, 3) + 1
ROW = np.linspace(1.0, 2.0, 3, dtype=np.float32)


@pytest.fixture(params=[False, True], ids=["constants", "literals"])
def form(request):
    """Have JAX keep arrays in a jaxpr in one of its two forms."""
    usual = getattr(jax.config, _OPTION)
    jax.clear_caches()  # so that no trace of the other form is used again
    jax.config.update(_OPTION, request.param)
    yield
    jax.config.update(_OPTION, usual)
    jax.clear_caches()


_PROGRAMS = {
    "plain": lambda x: x @ TABLE + ROW,
    "jit": lambda x: jax.jit(lambda x: x @ TABLE)(x) + ROW,
    "scan": lambda x: lax.scan(lambda c, _: (c @ TABLE * 0.1, c * ROW), x, length=2),
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: x @ TABLE, lambda x: x * ROW, x),
    "gradient": jax.grad(lambda x: jnp.sum(jnp.sin(x @ TABLE) * ROW)),
    "returned": lambda x: (x + ROW, TABLE),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_arrays_of_either_form_become_inputs(form, name):
    fun = _PROGRAMS[name]
    jaxpr = jax.make_jaxpr(fun)(_X)
    captures = find_captures(jaxpr, fun)
    lifted = lift_arrays(jaxpr, [capture.value for capture in captures])
    values = [capture.value for capture in captures]

    assert {capture.name for capture in captures} == {"TABLE", "ROW"}
    assert len(lifted.in_avals) == 3
    wanted = jax.tree.leaves(fun(_X))
    chex.assert_trees_all_close(evaluate(lifted, [*values, _X]), wanted, rtol=1e-6)
    others = evaluate(lifted, [*[value * 0 for value in values], _X])
    assert not all(map(np.array_equal, others, wanted))
