"""Along which axes a value is the same on all devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import OF_A_DEVICE, Maker
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from observing import mesh_of, numbers

import jax_dist
from jax_dist._passes import interpreter
from jax_dist._passes.interpreter import equations, record_of
from jax_dist._passes.uniformity import NO_AXES, ReplicationAnalysis, find_sharded_axes

X, SCALAR = numbers(12, 5), jax.ShapeDtypeStruct((), "float32")
BOTH, ONLY_I, ONLY_J, NONE = {"i", "j"}, {"i"}, {"j"}, set()


def same(body, *, cut_along="i"):
    """Return the axes along which a body's result is the same, on a mesh of 2 and 3 devices."""
    specs = {"in_specs": P(cut_along), "out_specs": P(("i", "j")), "check_vma": False}
    function = jax.shard_map(body, mesh=mesh_of(i=2, j=3), **specs)
    (eqn,) = shard_maps(function)
    (inputs,) = ReplicationAnalysis().analyze_body_inputs(eqn, [NO_AXES], NO_AXES)
    scope = frozenset(eqn.params["newly_manual_axes"])
    (output,) = ReplicationAnalysis().analyze_results(eqn.params["jaxpr"], inputs, scope)
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


def scanned(turn, start):
    return lax.scan(lambda c, _: (turn(c), None), start, None, length=3)[0]


def swapped(x):
    """Return what only the second iteration makes differ."""
    return scanned(lambda c: (c[1], c[0] + x), (jnp.ones(x.shape), jnp.ones(x.shape)))[1]


_SAME_ALONG = [  # axes, and the bodies whose results are the same along these
    (BOTH, {
        "a constant": lambda x: jnp.ones((2, 3)),
        "psum": total,
        "all_gather": lambda x: lax.all_gather(x, "i"),
        "random": lambda x: drawn(0),
        "jit": lambda x: jax.jit(total)(x),
        "custom_jvp": lambda x: jax.nn.relu(total(x)),
        "composite": lambda x: lax.composite(jnp.sin, "a.b")(total(x)),
        "solve": lambda x: jnp.linalg.solve(jnp.eye(3), total(x)[:1].repeat(3, 0)),
        "a carry that is summed": lambda x: scanned(lambda c: c + total(x), jnp.zeros_like(x)),
        "what a scan collects": lambda x: lax.scan(lambda c, y: (c, total(y)), 0.0, x)[1],
        "a loop left together": lambda x: looped(total(x).sum(), lambda c: c + 1, 0.0)[None],
        "the same branch": lambda x: lax.cond(total(x).sum() > 0, jnp.sin, jnp.cos, total(x)),
    }),
    (ONLY_I, {
        "axis_index": lambda x: lax.axis_index("j") * jnp.ones(2),
        "all_to_all": lambda x: lax.all_to_all(jnp.ones((3, 3)), "j", 0, 0),
        "groups": lambda x: lax.psum(jnp.ones(2), "j", axis_index_groups=[[0], [1], [2]]),
        "random by device": lambda x: drawn(lax.axis_index("j")),
    }),
    (ONLY_J, {
        "an input": lambda x: x,
        "ppermute": lambda x: lax.ppermute(total(x), "i", [(0, 1)]),
        "psum_scatter": lambda x: lax.psum_scatter(jnp.ones((2, 3)), "i"),
        "every iteration counts": swapped,
        "no iteration": lambda x: lax.scan(lambda c, n: (jnp.ones_like(c), n), x, jnp.arange(0))[0],
        "a while loop's carry": lambda x: looped(3, lambda c: c + x, jnp.ones((6, 5))),
        "a loop left apart": lambda x: looped(x.sum(), lambda c: c + 1, 0.0)[None],
        "other branches": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, jnp.ones(2)),
    }),
    (NONE, {
        "product": lambda x: x * lax.axis_index("j"),
        "pure_callback": lambda x: jax.pure_callback(lambda: 1.0, SCALAR)[None],
        "scatter by device": lambda x: total(x).at[0].apply(lambda v: v * lax.axis_index("i")),
    }),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "axes"),
    [
        pytest.param(body, axes, id=name)
        for axes, bodies in _SAME_ALONG
        for name, body in bodies.items()
    ],
)
def test_one_step(body, axes):
    assert same(body) == axes


def test_inputs_differ_along_what_cuts_them():
    assert same(lambda x: x, cut_along=None) == BOTH
    assert same(lambda x: x, cut_along="j") == ONLY_I
    assert same(lambda x: x, cut_along=("i", "j")) == NONE
    assert find_sharded_axes(P(None, ("i", "j"), "rows")) == {"i", "j", "rows"}


@pytest.mark.parametrize("made_by", OF_A_DEVICE)
def test_what_is_made_from_the_number_of_a_device_differs(made_by):
    """Also where JAX types it as the same everywhere."""
    make = lambda: OF_A_DEVICE[made_by](lax.axis_index("i"))[None]
    looped = lambda: lax.scan(lambda c, _: (c + make(), None), jax.jit(make)(), None, length=2)[0]

    assert same(lambda x: looped()) == (NONE if made_by == "pure_callback" else ONLY_J)


@pytest.mark.parametrize("name", ["sin", "all_gather", "while", "cond", "scan", "jit", "psum"])
def test_of_a_primitive_of_a_user_nothing_is_known_whatever_its_name(name):
    doubled = Primitive(name)
    doubled.def_abstract_eval(lambda x: x)
    mlir.register_lowering(doubled, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    body = lambda x: doubled.bind(x) + lax.all_gather(x, "i").mean(0)
    function, x = (
        jax.shard_map(body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=False),
        numbers(8, 3),
    )

    assert same(lambda x: doubled.bind(jnp.ones((2, 3)))) == NONE
    np.testing.assert_allclose(jax_dist.rewrite(function)(x), function(x), rtol=1e-6)


# ---- what the analysis says, beside what is when the program runs


@pytest.mark.parametrize("seed", range(6))
def test_drawn_programs_are_as_the_analysis_says_when_they_run(seed):
    """Jits are written out, so that each device can return all values of the program."""
    x, sizes = numbers(6, 2, 3, 2, seed=seed), {"i": 2, "j": 3}
    drawn = lambda x: Maker(seed, ("i", "j")).values_from(x)
    closed = jax.make_jaxpr(drawn, axis_env=[*sizes.items()])(x[0])
    closed = interpreter.inline_calls(closed, lambda eqn: record_of(eqn).call == "inline")
    facts = ReplicationAnalysis().analyze_values(closed, [NO_AXES], frozenset(sizes))

    def on_device(rows: Any) -> list[Any]:
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        env = dict(zip(inputs, [*closed.consts, *rows], strict=True))
        for eqn in closed.jaxpr.eqns:
            values = interpreter.replay(eqn, interpreter.read_all(eqn.invars, env))
            env.update(zip(eqn.outvars, values, strict=True))
        return [as_numbers(env[var])[None, None] for var in facts]

    specs = {"in_specs": P(("i", "j")), "out_specs": P("i", "j"), "check_vma": False}
    values = jax.jit(jax.shard_map(on_device, mesh=mesh_of(**sizes), **specs))(x)
    for (var, axes), value in zip(facts.items(), map(np.asarray, values), strict=True):
        for dim, name in enumerate(sizes):
            of_the_first = np.take(value, [0] * value.shape[dim], dim)
            is_same = value.tobytes() == of_the_first.tobytes()
            assert is_same or name not in axes, f"{var.aval} along {name}"


def as_numbers(value: Any) -> jax.Array:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else jnp.asarray(value)


@pytest.mark.parametrize(("inside", "axes"), [(lambda x: x, set()), (total, ONLY_I)])
def test_a_region_in_a_region_gives_what_goes_in(inside, axes):
    over = lambda axis: {"in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}}
    inner = jax.shard_map(lambda x: 2 * x, **over("j"), check_vma=False)
    outer = lambda x: inner(inside(x))
    function = jax.shard_map(outer, mesh=mesh_of(i=2, j=3), **over("i"), check_vma=False)

    body = shard_maps(function)[0].params["jaxpr"]
    (result,) = ReplicationAnalysis().analyze_results(body, [NO_AXES], frozenset("i"))
    assert result == axes
