"""Along which axes a value is the same on all devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import OF_A_DEVICE, Maker
from gather_cases import CASES
from gather_checks import blocks, mesh_of
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import equations, record_of
from jax_dist._passes.uniformity import NOWHERE, Invariance, cut_along

X, SCALAR = jnp.asarray(blocks(12, 5)), jax.ShapeDtypeStruct((), "float32")
BOTH, ONLY_I, ONLY_J, NONE = {"i", "j"}, {"i"}, {"j"}, set()


def same(body, *, cut_along="i"):
    """Return the axes along which a body's result is the same, on a mesh of 2 and 3 devices."""
    specs = {"in_specs": P(cut_along), "out_specs": P(("i", "j")), "check_vma": False}
    function = jax.shard_map(body, mesh=mesh_of(i=2, j=3), **specs)
    (eqn,) = shard_maps(function)
    (inputs,) = Invariance().body_inputs(eqn, [NOWHERE], NOWHERE)
    scope = frozenset(eqn.params["newly_manual_axes"])
    (output,) = Invariance().outputs(eqn.params["jaxpr"], inputs, scope)
    return set(output)


def shard_maps(function):
    """Return their equations, the outer one first."""
    return [e for e in equations(jax.make_jaxpr(function)(X)) if e.primitive.name == "shard_map"]


def total(x):
    return lax.psum(x, "i")


def looped(until, turn, start):
    return lax.while_loop(lambda c: c[0] < until, lambda c: (c[0] + 1, turn(c[1])), (0, start))[1]


def drawn(number):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (2,))


def _swapped(x):
    ones = jnp.ones(x.shape)
    return lax.scan(lambda c, _: ((c[1], c[0] + x), None), (ones, ones), None, length=3)[0][1]


_STEPS = {
    "an input": (lambda x: x, ONLY_J),
    "a constant": (lambda x: jnp.ones((2, 3)), BOTH),
    "psum": (total, BOTH),
    "all_gather": (lambda x: lax.all_gather(x, "i"), BOTH),
    "axis_index": (lambda x: lax.axis_index("j") * jnp.ones(2), ONLY_I),
    "product": (lambda x: x * lax.axis_index("j"), NONE),
    "ppermute": (lambda x: lax.ppermute(total(x), "i", [(0, 1)]), ONLY_J),
    "psum_scatter": (lambda x: lax.psum_scatter(jnp.ones((2, 3)), "i"), ONLY_J),
    "all_to_all": (lambda x: lax.all_to_all(jnp.ones((3, 3)), "j", 0, 0), ONLY_I),
    "groups": (lambda x: lax.psum(jnp.ones(2), "j", axis_index_groups=[[0], [1], [2]]), ONLY_I),
    "random": (lambda x: drawn(0), BOTH),
    "random by device": (lambda x: drawn(lax.axis_index("j")), ONLY_I),
    "pure_callback": (lambda x: jax.pure_callback(lambda: 1.0, SCALAR)[None], NONE),
    "jit": (lambda x: jax.jit(total)(x), BOTH),
    "custom_jvp": (lambda x: jax.nn.relu(total(x)), BOTH),
    # ---- loops and branches
    "every iteration counts": (_swapped, ONLY_J),
    "a carry that is summed": (
        lambda x: lax.scan(lambda c, _: (c + total(x), None), jnp.zeros_like(x), None, 3)[0],
        BOTH,
    ),
    "no iteration": (
        lambda x: lax.scan(lambda c, n: (jnp.ones_like(c), None), x, jnp.arange(0))[0],
        ONLY_J,
    ),
    "what a scan collects": (lambda x: lax.scan(lambda c, y: (c, total(y)), 0.0, x)[1], BOTH),
    "a while loop's carry": (lambda x: looped(3, lambda c: c + x, jnp.ones((6, 5))), ONLY_J),
    "a loop left together": (lambda x: looped(total(x).sum(), lambda c: c + 1, 0.0)[None], BOTH),
    "a loop left apart": (lambda x: looped(x.sum(), lambda c: c + 1, 0.0)[None], ONLY_J),
    "other branches": (
        lambda x: lax.cond(x.sum() > 0, lambda: jnp.ones(2), lambda: jnp.zeros(2)),
        ONLY_J,
    ),
    "the same branch": (
        lambda x: lax.cond(total(x).sum() > 0, lambda: total(x), lambda: -total(x)),
        BOTH,
    ),
    # ---- bodies that may be called on anything
    "composite": (lambda x: lax.composite(jnp.sin, "a.b")(total(x)), BOTH),
    "composite by device": (
        lambda x: lax.composite(lambda x: x * lax.axis_index("i"), "a.b")(total(x)),
        NONE,
    ),
    "solve": (lambda x: jnp.linalg.solve(jnp.eye(3), total(x)[:1].repeat(3, 0)), BOTH),
    "search": (lambda x: jnp.searchsorted(jnp.arange(5.0), total(x)), BOTH),
    "window": (
        lambda x: lax.reduce_window(total(x), 1.0, lambda a, b: a * b + 1, (1, 2), (1, 1), "VALID"),
        BOTH,
    ),
    "scatter by device": (
        lambda x: jnp.ones((2, 3)).at[0].apply(lambda v: v * lax.axis_index("i")),
        NONE,
    ),
}


@pytest.mark.parametrize("name", _STEPS)
def test_one_step(name):
    body, axes = _STEPS[name]
    assert same(body) == axes


def test_inputs_differ_along_what_cuts_them():
    assert same(lambda x: x, cut_along=None) == BOTH
    assert same(lambda x: x, cut_along="j") == ONLY_I
    assert same(lambda x: x, cut_along=("i", "j")) == NONE
    assert cut_along(P(None, ("i", "j"), "rows")) == {"i", "j", "rows"}


# ---- what is the same by its type, or by its name only

# Numbers of each device that JAX types as the same everywhere, under check_vma=True.
_TYPED_AS_SAME = ("cond", "while", "rng_bit_generator", "pure_callback")


def _rewrites_right(body, *, check_vma=False):
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    function, x = jax.shard_map(body, mesh=mesh_of(i=4), **specs), blocks(8, 3)
    np.testing.assert_allclose(jax_dist.rewrite(function)(x), function(x), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("made_by", _TYPED_AS_SAME)
def test_a_factor_of_each_device_stays_in_the_gather(made_by):
    make = lambda: OF_A_DEVICE[made_by](lax.axis_index("i"))
    factor = lambda: lax.scan(lambda c, _: (c + make(), None), jax.jit(make)(), None, length=2)[0]
    _rewrites_right(lambda x: (lax.all_gather(x, "i") * factor()).sum(0), check_vma=True)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sin", "all_gather", "while", "cond", "scan", "jit", "psum"])
def test_of_a_primitive_of_a_user_nothing_is_known_whatever_its_name(name):
    doubled = Primitive(name)
    doubled.def_abstract_eval(lambda x: x)
    mlir.register_lowering(doubled, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

    assert same(lambda x: doubled.bind(jnp.ones((2, 3)))) == NONE
    _rewrites_right(lambda x: doubled.bind(x) + lax.all_gather(x, "i").mean(0))


# ---- what the analysis says, beside what is when the program runs


def wrong_facts(function: Callable[[Any], Any], x: np.ndarray, sizes: dict[str, int]) -> list[str]:
    """Return the values of a program that differ along an axis where the analysis finds them equal.

    The arguments are the rows of `x`, one a device. Jits are written out, so that all values stand
    at the top, where each is computed on each device.
    """
    names = tuple(sizes)
    closed = jax.make_jaxpr(function, axis_env=[*sizes.items()])(x[0])
    closed = interpreter.inline_calls(closed, lambda eqn: record_of(eqn).call == "inline")
    jaxpr, facts = closed.jaxpr, Invariance().facts(closed, [NOWHERE], frozenset(names))

    def on_device(rows: Any) -> list[Any]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *rows], strict=True))
        for eqn in jaxpr.eqns:
            values = interpreter.replay(eqn, interpreter.read_all(eqn.invars, env))
            env.update(zip(eqn.outvars, values, strict=True))
        return [as_numbers(env[var])[(None,) * len(names)] for var in facts]

    specs = {"in_specs": P(names), "out_specs": P(*names), "check_vma": False}
    run = jax.jit(jax.shard_map(on_device, mesh=mesh_of(**sizes), **specs))
    return [
        f"{var.aval} along {name}"
        for (var, same_along), value in zip(facts.items(), map(np.asarray, run(x)), strict=True)
        for dim, name in enumerate(names)
        if name in same_along
        and value.tobytes() != np.take(value, [0] * value.shape[dim], dim).tobytes()
    ]


def as_numbers(value: Any) -> jax.Array:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else jnp.asarray(value)


@pytest.mark.parametrize("seed", range(6))
def test_drawn_programs_are_as_the_analysis_says_when_they_run(seed):
    x = np.random.default_rng(seed).normal(size=(6, 2, 3, 2)).astype(np.float32)
    drawn = lambda x: Maker(seed, ("i", "j")).values_from(x)
    assert wrong_facts(drawn, x, {"i": 2, "j": 3}) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gather_cases_are_as_the_analysis_says_when_they_run(name):
    x = np.random.default_rng(1).normal(size=(8, 2, 3)).astype(np.float32)
    assert wrong_facts(CASES[name].body, x, {"i": 8}) == []


@pytest.mark.parametrize(("inside", "axes"), [(lambda x: x, set()), (total, ONLY_I)])
def test_a_region_in_a_region_gives_what_goes_in(inside, axes):
    over = lambda axis: {"in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}}
    inner = jax.shard_map(lambda x: 2 * x, **over("j"), check_vma=False)
    outer = lambda x: inner(inside(x))
    function = jax.shard_map(outer, mesh=mesh_of(i=2, j=3), **over("i"), check_vma=False)

    body = shard_maps(function)[0].params["jaxpr"]
    (result,) = Invariance().outputs(body, [NOWHERE], frozenset("i"))
    assert result == axes
