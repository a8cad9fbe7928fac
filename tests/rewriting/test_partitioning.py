"""custom_partitioning routed: same values and collectives, and no custom call left."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from observing import compiled_collectives

from jax_dist import rewrite
from jax_dist._passes import interpreter, partition, propagation
from jax_dist.errors import ArgumentError

ROWS, WIDTH = 8, 6
X = np.sin(np.arange(ROWS * WIDTH, dtype="float32") ** 2).reshape(ROWS, WIDTH)
SCALE = np.linspace(1, 2, WIDTH, dtype="float32")


# ---- ops in the forms that libraries write them


@custom_partitioning
def layernorm(x, scale):
    """`[n, h], [h] -> [n, h]`; computed on whole rows, however they lie."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def _rows_only(mesh, arg_shapes, result_shape):
    del result_shape
    by_row = NamedSharding(mesh, P(arg_shapes[0].sharding.spec[0], None))
    return mesh, layernorm.fun, by_row, (by_row, NamedSharding(mesh, P(None)))


layernorm.def_partition(_rows_only, sharding_rule="n h, h -> n h")


@custom_partitioning
def l1norm(x):
    """`[n, h] -> [n, h]`, with a sum over devices where rows are cut."""
    return x / jnp.sum(jnp.abs(x), -1, keepdims=True)


def _with_psum(mesh, arg_shapes, result_shape):
    del result_shape
    sharding = arg_shapes[0].sharding

    def on_block(x):
        total = jnp.sum(jnp.abs(x), -1, keepdims=True)
        return x / (jax.lax.psum(total, sharding.spec[1]) if sharding.spec[1] else total)

    return mesh, on_block, sharding, (sharding,)


l1norm.def_partition(_with_psum, sharding_rule="n h -> n h")


@functools.partial(custom_partitioning, static_argnums=(1,))
def moments(x, power):
    """`[n, h] -> [n, h], [n]`: rows without their mean, and their mean power."""
    centered = x - x.mean(-1, keepdims=True)
    return {"centered": centered, "moment": jnp.mean(centered**power, -1)}


def _two_results(power, mesh, arg_shapes, result_shape):
    del result_shape
    rows = arg_shapes[0].sharding.spec[0]
    by_row = NamedSharding(mesh, P(rows, None))
    results = {"centered": by_row, "moment": NamedSharding(mesh, P(rows))}
    return mesh, lambda x: moments.fun(x, power), results, (by_row,)


moments.def_partition(_two_results, sharding_rule=lambda *_: "n h -> n h, n")


# ---- what the tests share


def mesh_4x2(names=("i", "j")):
    return Mesh(np.array(jax.devices()).reshape(4, 2), names, axis_types=(AxisType.Auto,) * 2)


MESH = mesh_4x2()
ONE = Mesh(np.array(jax.devices()[:1]), ("i",))


def placed(array, *spec, mesh=MESH):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def plan_of(fun, *args, mesh=MESH, specs=None):
    shardings = [getattr(arg, "sharding", None) for arg in args]
    jaxpr = jax.make_jaxpr(fun)(*args)
    named = propagation.find_meshes(interpreter.equations(jaxpr))
    meshes = [mesh] if mesh else propagation.meshes_of(named, shardings)
    return partition.plan_partitioning(jaxpr, meshes=meshes, in_shardings=shardings, specs=specs)


def routed(fun, *args, **options):
    """`fun` with its ops routed, on flat results."""
    plan = plan_of(fun, *args, **options)
    assert {finding.outcome for finding in plan.findings} <= {"rewritten"}, plan.findings
    return lambda *values: interpreter.evaluate(plan.jaxpr, values)


def flat(fun):
    return lambda *args: jax.tree.leaves(fun(*args))


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def odd_op(lower=lambda x: x * 2, *, operand=None, other=None, **options):
    """Return an op whose partition() keeps its operand as it is sharded, but for what is given."""

    def odd(x):
        return x * 2

    def partition(mesh, arg_shapes, result_shape):
        del result_shape
        sharding = other or arg_shapes[0].sharding
        return other.mesh if other else mesh, lower, sharding, (operand or sharding,)

    op = custom_partitioning(odd)
    op.def_partition(partition, **{"sharding_rule": "n h -> n h", **options})
    return op


SCALED = odd_op(lambda x: x * 2 * jnp.asarray(np.ones(WIDTH, "float32")))


@jax.custom_vjp
def doubled(x):
    return l1norm(x) * 2


doubled.defvjp(lambda x: (doubled(x), l1norm(x)), lambda kept, g: (l1norm(kept) * g,))


def twice_in_a_jit_called_twice(x):
    inner = jax.jit(lambda y: layernorm(layernorm(y, SCALE), SCALE))
    return inner(x), inner(x * 2)


GATHER, REDUCE, TWO = {"all-gather": 1}, {"all-reduce": 1}, {"all-reduce": 2}
CASES = {
    "rows sharded": (lambda x: layernorm(x * 2, SCALE), P("i"), {}),
    "partition puts rows together": (lambda x: jnp.sin(layernorm(x, SCALE)), P("i", "j"), GATHER),
    "psum": (lambda x: l1norm(x * 2), P("i", "j"), REDUCE),
    "replicated": (lambda x: l1norm(x * 2), P(), {}),
    "static argument and two results": (lambda x: moments(x * 2, 3), P("i", "j"), GATHER),
    "constraint inside": (lambda x: l1norm(constrained(x * 2, "i", "j")), P(), REDUCE),
    "jit with two, called twice": (twice_in_a_jit_called_twice, P("i", "j"), GATHER),
    "scan": (
        lambda x: jax.lax.scan(lambda c, _: (l1norm(c) * 2, c.sum()), x, None, length=3),
        P("i", "j"),
        TWO,
    ),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, l1norm, jnp.sin, x), P("i", "j"), TWO),
    "remat": (jax.checkpoint(lambda x: l1norm(x) * 2), P("i", "j"), REDUCE),
    "remat that captures an array": (jax.checkpoint(lambda x: SCALED(x)), P("i"), {}),
    "custom_vjp": (doubled, P("i", "j"), REDUCE),
    "grad of custom_vjp": (jax.grad(lambda x: jnp.sum(doubled(x) ** 2)), P("i", "j"), TWO),
}


@pytest.mark.parametrize(("fun", "spec", "expected"), CASES.values(), ids=CASES)
def test_values_are_kept_and_collectives_do_not_grow(fun, spec, expected):
    x = placed(X, *spec)
    before = jax.jit(flat(fun)).lower(x).compile()

    after = jax.jit(routed(fun, x)).lower(x).compile()

    chex.assert_trees_all_close(after(x), before(x), rtol=1e-5, atol=1e-6)
    moved = compiled_collectives(after)
    assert moved == expected
    assert moved.items() <= compiled_collectives(before).items() or "twice" in fun.__name__


def between_shardings(x):
    """Call it on an `x` that comes as [None, i]; what reads the result wants [j, i]."""
    return constrained(jax.jit(lambda x: l1norm(x) * 2)(x), "j", "i")


SCALED_NORM = lambda x: l1norm(x * 2)
GIVEN = {"l1norm": ([P(None, ("j",))], P(None, "j"))}
SPREAD, COLUMNS = placed(X, "i", "j"), placed(X[:, :4], None, "i")
# By what is done: the function, its argument, and specs=.
REPORTED = {
    "'moments': shard_map, (P('i', None)) -> (P('i', None), P('i'))": (
        lambda x: moments(x, 3),
        SPREAD,
        None,
    ),
    "'l1norm': shard_map, (P('j', 'i')) -> (P('j', 'i'))": (between_shardings, COLUMNS, None),
    "'l1norm': shard_map, (P(None, 'j')) -> (P(None, 'j'))": (SCALED_NORM, SPREAD, GIVEN),
    "'l1norm': shard_map, (P(None, None)) -> (P(None, None))": (SCALED_NORM, X, None),
}


@pytest.mark.parametrize("what", REPORTED)
def test_what_is_done_is_reported_with_the_line(what):
    fun, x, specs = REPORTED[what]
    plan = plan_of(fun, x, specs=specs)

    [finding] = plan.findings
    assert (finding.code, finding.outcome, finding.why) == ("JXD402", "rewritten", "")
    assert finding.what == f"custom_partitioning {what}"
    assert re.fullmatch(r"tests/rewriting/test_partitioning.py:\d+", finding.where)
    results = jax.jit(lambda x: interpreter.evaluate(plan.jaxpr, [x]))(x)
    chex.assert_trees_all_close(results, jax.jit(flat(fun))(x), rtol=1e-5, atol=1e-6)
    assert specs is None or results[0].sharding.is_equivalent_to(placed(X, None, "j").sharding, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [P("i"), P("i", "j"), P(None, "j")], ids=str)
def test_gradients_and_vmap_work_afterwards(spec):
    x, many = placed(X, *spec), np.stack([X, 2 * X + 1])
    ours = routed(lambda x: l1norm(layernorm(x, SCALE)), x)
    whole = lambda x: [l1norm.fun(layernorm.fun(x, SCALE))]
    slope = lambda norm: jax.jit(jax.grad(lambda x: jnp.sum(norm(x * 2)[0] ** 3)))

    chex.assert_trees_all_close(slope(ours)(x), slope(whole)(X), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(jax.vmap(ours)(many), jax.vmap(whole)(many), rtol=1e-5, atol=1e-6)


def test_under_set_mesh():
    with jax.set_mesh(MESH):
        fun = lambda x: l1norm(jax.lax.with_sharding_constraint(x * 2, P("i", "j")))
        after = jax.jit(routed(fun, X, mesh=None)).lower(X).compile()

        chex.assert_trees_all_close(after(X), [l1norm.fun(X)], rtol=1e-6)
    assert compiled_collectives(after) == REDUCE


_LEFT_ALONE = {
    "no op": (lambda x: jnp.sin(x), MESH),
    "nobody reads it": (lambda x: (l1norm(x), x * 2)[1], MESH),
    "one device": (l1norm, ONE),
    "no mesh": (l1norm, None),
    "manual": (jax.shard_map(l1norm, mesh=MESH, in_specs=P("i"), out_specs=P("i")), MESH),
}


@pytest.mark.parametrize("name", _LEFT_ALONE)
def test_what_jax_inlines_itself_is_left_alone(name):
    fun, mesh = _LEFT_ALONE[name]
    plan = plan_of(fun, X, mesh=mesh)

    assert (plan.jaxpr, plan.findings) == (None, ())


BAD_SPECS = {  # by words of the error
    "do not fit 'l1norm': it has 1 operands": {"l1norm": ([], P())},
    "do not fit 'l1norm': ": {"l1norm": ([P("i", None, "j")], P())},
    "do not fit 'l1norm': .*k": {"l1norm": ([P("k")], P())},
    "names 'l1nrom', but the .* program are 'l1norm'": {"l1nrom": ([P()], P())},
}


@pytest.mark.parametrize("message", BAD_SPECS)
def test_specs_that_do_not_fit(message):
    with pytest.raises(ArgumentError, match=message):
        plan_of(l1norm, X, specs=BAD_SPECS[message])


# What is refused. Each op is wrong, or odd, in one way.


OTHER = mesh_4x2(names=("a", "b"))
TYPED = Mesh(MESH.devices, ("i", "j"), axis_types=(AxisType.Auto, AxisType.Explicit))
NO_SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])
ONE_AXIS = {"mesh": MESH, "in_specs": P("i"), "out_specs": P("i"), "axis_names": {"i"}}
# By the reason: the function.
REFUSED = {
    "its partition() asks for XLA's own": odd_op(decode_shardings=False),
    "partition() returns NamedSharding(mesh=Mesh('a'": odd_op(other=NamedSharding(OTHER, P("a"))),
    "partition() returns SingleDeviceSharding(": odd_op(operand=NO_SHARDING),
    "UNCONSTRAINED": odd_op(operand=NamedSharding(MESH, P(P.UNCONSTRAINED))),
    "not evenly divisible": lambda x: odd_op()(jnp.concatenate([x, x[:2]])),  # 10 rows over 4
    "out_specs": odd_op(lambda x: x.sum(0)),
    "its lowering gives bfloat16[8, 6]": odd_op(lambda x: x.astype("bfloat16")),
    "it stands in a shard_map over some": jax.shard_map(l1norm, **ONE_AXIS),
    "axes that are not Auto": l1norm,
}


def why_refused(fun, *args, **options):
    plan = plan_of(fun, *args, **options)
    [finding] = plan.findings
    assert (finding.outcome, plan.jaxpr) == ("refused", None)
    return finding.why


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_shard_map_can_do_is_refused(reason):
    mesh = TYPED if "Auto" in reason else MESH
    assert reason in why_refused(REFUSED[reason], placed(X, "i", mesh=mesh), mesh=mesh)


def test_several_meshes_are_refused():
    args = placed(X, "i"), placed(X, "a", mesh=OTHER)
    why = why_refused(lambda x, y: l1norm(x), *args, mesh=None)
    assert why == "the program uses several meshes: choose one by mesh="


def test_without_shardy_only_given_specs_are_used():
    jax.config.update("jax_use_shardy_partitioner", val=False)
    try:
        assert why_refused(l1norm, X).endswith("is off, so its specs are unknown: give specs=")
        routed(l1norm, X, specs={"l1norm": ([P("i")], P("i"))})
    finally:
        jax.config.update("jax_use_shardy_partitioner", val=True)


def test_a_jit_around_rewrite_without_a_mesh_is_warned_of_once():
    step = jax.jit(rewrite(lambda x: l1norm(x * 2)))
    x = placed(X, "i", "j")

    with pytest.warns(UserWarning, match="leaves the custom_partitioning operations of '<lambda>'"):
        step.lower(x)
    with_mesh = jax.jit(rewrite(lambda x: l1norm(x * 2), mesh=MESH))
    for call, has_operation in ((step, True), (with_mesh, False)):
        np.testing.assert_allclose(call(x), l1norm.fun(X), rtol=1e-6)
        assert ("CustomSPMDPartitioning" in call.lower(x).as_text()) == has_operation
