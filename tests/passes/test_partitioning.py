"""custom_partitioning routed: same values, collectives and shardings, and no custom call left."""

import collections
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
from partitioned_ops import l1norm, layernorm, moments

from jax_dist import rewrite
from jax_dist._rewrite import interpreter, partition, propagation
from jax_dist.errors import ArgumentError

pytestmark = pytest.mark.rewriting

ROWS, WIDTH = 8, 6
X = np.sin(np.arange(ROWS * WIDTH, dtype="float32") ** 2).reshape(ROWS, WIDTH)
SCALE = np.linspace(1, 2, WIDTH, dtype="float32")


def mesh_4x2(kind=AxisType.Auto, names=("i", "j")):
    return Mesh(np.array(jax.devices()).reshape(4, 2), names, axis_types=(kind,) * 2)


MESH = mesh_4x2()
ONE = Mesh(np.array(jax.devices()[:1]), ("i",))


def placed(array, *spec, mesh=MESH):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def plan_of(fun, *args, mesh=MESH, specs=None):
    shardings = [
        a.sharding if isinstance(getattr(a, "sharding", None), NamedSharding) else None
        for a in args
    ]
    return partition.plan_partitioning(
        jax.make_jaxpr(fun)(*args), mesh=mesh, in_shardings=shardings, specs=specs
    )


def routed(fun, *args, **options):
    """`fun` with its ops routed, on flat results."""
    plan = plan_of(fun, *args, **options)
    assert {finding.outcome for finding in plan.findings} <= {"rewritten"}, plan.findings
    return lambda *values: plan.evaluate(*values)


def flat(fun):
    return lambda *args: jax.tree.leaves(fun(*args))


_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(compiled):
    return dict(collections.Counter(_COLLECTIVE.findall(compiled.as_text())))


def texts(plan):
    """What was found, without the code and the line."""
    return [(f.outcome, f.what.removeprefix("custom_partitioning "), f.why) for f in plan.findings]


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


@jax.custom_vjp
def doubled(x):
    return l1norm(x) * 2


doubled.defvjp(lambda x: (doubled(x), l1norm(x)), lambda kept, g: (l1norm(kept) * g,))


@jax.custom_jvp
def tripled(x):
    return l1norm(x) * 3


tripled.defjvp(lambda primals, tangents: (tripled(*primals), tangents[0] * l1norm(primals[0])))


def inside_jit_twice(x):
    inner = jax.jit(lambda y: l1norm(y) + 1)
    return inner(x), inner(x * 2)


def twice_in_a_jit_called_twice(x):
    inner = jax.jit(lambda y: layernorm(layernorm(y, SCALE), SCALE))
    return inner(x), inner(x * 2)


def in_scan(x):
    return jax.lax.scan(lambda c, _: (l1norm(c) * 2, c.sum()), x, None, length=3)


def in_while(x):
    return jax.lax.while_loop(
        lambda state: state[1] < 3, lambda state: (l1norm(state[0]) + 1, state[1] + 1), (x, 0)
    )


def in_cond(x):
    return jax.lax.cond(x[0, 0] > 0, l1norm, lambda y: y * 2, x)


def one_op_twice(x):
    return jnp.sin(layernorm(layernorm(x * 2, SCALE), SCALE))


GATHER, REDUCE = {"all-gather": 1}, {"all-reduce": 1}
CASES = {
    "rows cut": (lambda x: layernorm(x * 2, SCALE), P("i"), {}),
    "rows cut by two axes": (lambda x: layernorm(x * 2, SCALE), P(("i", "j")), {}),
    "partition puts rows together": (lambda x: jnp.sin(layernorm(x, SCALE)), P("i", "j"), GATHER),
    "partition puts its result together": (lambda x: layernorm(x, SCALE), P("i", "j"), GATHER),
    "one after another": (one_op_twice, P("i", "j"), GATHER),
    "psum": (lambda x: l1norm(x * 2), P("i", "j"), REDUCE),
    "psum over the larger axis": (lambda x: l1norm(x * 2), P("j", None), {}),
    "replicated": (lambda x: l1norm(x * 2), P(), {}),
    "static argument and two results": (lambda x: moments(x * 2, 3), P("i", "j"), GATHER),
    "constraint inside": (lambda x: l1norm(constrained(x * 2, "i", "j")), P(), REDUCE),
    "jit": (lambda x: jax.jit(lambda y: l1norm(y) + 1)(x), P("i", "j"), REDUCE),
    "jit called twice": (inside_jit_twice, P("i", "j"), REDUCE),  # the compiler joins the two
    "jit with two, called twice": (twice_in_a_jit_called_twice, P("i", "j"), {"all-gather": 2}),
    "scan": (in_scan, P("i", "j"), {"all-reduce": 2}),
    "while": (in_while, P("i", "j"), REDUCE),
    "cond": (in_cond, P("i", "j"), {"all-reduce": 2}),
    "remat": (jax.checkpoint(lambda x: l1norm(x) * 2), P("i", "j"), REDUCE),
    "custom_vjp": (doubled, P("i", "j"), REDUCE),
    "custom_jvp": (tripled, P("i", "j"), REDUCE),
    "grad of custom_vjp": (
        jax.grad(lambda x: jnp.sum(doubled(x) ** 2)),
        P("i", "j"),
        {"all-reduce": 2},
    ),
    "grad of remat": (
        jax.grad(jax.checkpoint(lambda x: jnp.sum(doubled(x) ** 2))),
        P("i", "j"),
        {"all-reduce": 2},
    ),
    "vmapped jit around": (lambda x: jax.vmap(jnp.cos)(l1norm(x)), P("i", "j"), REDUCE),
}


@pytest.mark.parametrize(("fun", "spec", "expected"), CASES.values(), ids=CASES)
def test_values_collectives_and_shardings_are_kept(fun, spec, expected):
    x = placed(X, *spec)
    before = jax.jit(flat(fun)).lower(x).compile()

    after = jax.jit(routed(fun, x)).lower(x).compile()

    chex.assert_trees_all_close(after(x), before(x), rtol=1e-5, atol=1e-6)
    assert collectives(before) == expected
    assert collectives(after) == expected
    for ours, theirs in zip(after(x), before(x), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


def test_a_result_that_is_returned_too_lies_as_before():
    def fun(x):
        first = layernorm(x, SCALE)
        return first, layernorm(first, SCALE)

    x = placed(X, "i", "j")
    results = jax.jit(routed(fun, x))(x)

    chex.assert_trees_all_close(results, jax.jit(flat(fun))(x), rtol=1e-5, atol=1e-6)
    assert [result.sharding.spec for result in results] == [P("i", "j"), P("i", "j")]


def test_a_captured_array_is_cut_anew_for_each_use_as_constants_are():
    captured = np.linspace(1, 2, 8, dtype="float32")

    def fun(x, y):
        return x * captured + 0, l1norm(y + captured)

    plan = plan_of(fun, placed(X.T, None, "i"), placed(X.T))

    # As an argument of the program it would be cut over i, and so would what it is added to.
    assert texts(plan) == [
        ("rewritten", "'l1norm': shard_map, (P(None, None)) -> (P(None, None))", "")
    ]


def test_the_program_holds_no_custom_call():
    x = placed(X, "i", "j")
    assert "CustomSPMDPartitioning" in jax.jit(in_scan).lower(x).as_text()

    lowered = jax.jit(routed(in_scan, x)).lower(x).as_text()

    assert "CustomSPMDPartitioning" not in lowered
    assert "sdy.manual_computation" in lowered


def test_what_is_done_is_said_with_the_line():
    x = placed(X, "i", "j")

    plan = plan_of(lambda x: moments(x, 3), x)

    [finding] = plan.findings
    assert (finding.code, finding.outcome, finding.why) == ("JXD402", "rewritten", "")
    assert finding.what == (
        "custom_partitioning 'moments': shard_map, (P('i', None)) -> (P('i', None), P('i'))"
    )
    assert re.fullmatch(r"tests/passes/test_partitioning.py:\d+", finding.where)


def test_partition_is_asked_as_by_the_compiler():
    asked = []

    @custom_partitioning
    def watched(x, y):
        return x + y.sum()

    def partition(mesh, arg_shapes, result_shape):
        shapes = (*arg_shapes, result_shape)
        asked.append([(s.shape, str(s.dtype), s.sharding.spec) for s in shapes])
        shardings = [s.sharding for s in arg_shapes]
        return mesh, lambda x, y: x, shardings[0], tuple(shardings)

    watched.def_partition(partition, sharding_rule="n h, k -> n h")

    def fun(x, y):
        return watched(x.T, y).T

    args = placed(X, "i", "j"), placed(np.arange(4.0, dtype="float32"), ("i"))
    jax.jit(fun).lower(*args).compile()
    plan_of(fun, *args)

    expected = [
        ((6, 8), "float32", P("j", "i")),
        ((4,), "float32", P("i")),
        ((6, 8), "float32", P("j", "i")),
    ]
    assert asked == [expected, expected]


def test_a_jit_is_cut_at_each_of_its_calls_as_the_compiler_does():
    # Its argument comes as [None, i], and what reads its result wants [j, i].
    @jax.jit
    def inner(x):
        return l1norm(x) * 2

    x = placed(X[:, :4], None, "i")
    plan = plan_of(lambda x: constrained(inner(x), "j", "i"), x)

    site = next(
        interpreter.places(jax.make_jaxpr(inner)(x), lambda eqn: "custom" in str(eqn.primitive))
    )
    assert site.path == (0, 0, 0)
    assert texts(plan) == [
        ("rewritten", "'l1norm': shard_map, (P(None, 'i')) -> (P(None, 'i'))", "")
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [P("i"), P("i", "j"), P(None, "j")], ids=str)
def test_gradients_and_vmap_work_afterwards(spec):
    x = placed(X, *spec)

    def loss(norm):
        return lambda x: jnp.sum(norm(x * 2)[0] ** 3)

    ours = routed(lambda x: l1norm(layernorm(x, SCALE)), x)
    whole = lambda x: [l1norm.fun(layernorm.fun(x, SCALE))]
    with pytest.raises(NotImplementedError):
        jax.grad(loss(lambda x: [l1norm(x)]))(x)
    chex.assert_trees_all_close(
        jax.jit(jax.grad(loss(ours)))(x), jax.grad(loss(whole))(X), rtol=1e-4, atol=1e-5
    )
    many = np.stack([X, 2 * X + 1])
    chex.assert_trees_all_close(jax.vmap(ours)(many), jax.vmap(whole)(many), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", [P("i"), P("i", "j"), P(None, "j")], ids=str)
def test_explicit_axes(spec):
    mesh = mesh_4x2(AxisType.Explicit)
    x = placed(X, *spec, mesh=mesh)

    def fun(x):
        return jax.lax.scan(lambda c, _: (layernorm(c, SCALE), ()), l1norm(x), None, length=2)[0]

    [result] = jax.jit(routed(fun, x, mesh=mesh))(x)

    expected = layernorm.fun(layernorm.fun(l1norm.fun(X), SCALE), SCALE)
    chex.assert_trees_all_close(result, expected, rtol=1e-4, atol=1e-5)
    assert result.sharding.is_equivalent_to(x.sharding, 2)


def scan_of_jit(x):
    return jax.lax.scan(lambda c, _: (jax.jit(l1norm)(c) * 2, ()), x, None, length=2)[0]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("region", [scan_of_jit, lambda x: 2 * l1norm(x)])
def test_in_a_partly_manual_shard_map_the_other_axes_are_routed(region, check_vma):
    fun = jax.shard_map(
        region, mesh=MESH, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=check_vma
    )
    x = placed(X, "i", "j")

    plan = plan_of(fun, x)

    assert texts(plan) == [
        ("rewritten", "'l1norm': shard_map, (P(None, 'j')) -> (P(None, 'j'))", "")
    ]
    [result] = jax.jit(lambda x: plan.evaluate(x))(x)
    chex.assert_trees_all_close(result, 2 * l1norm.fun(X), rtol=1e-6)


def test_the_types_of_a_partly_manual_shard_map_are_kept():
    op = odd_op(in_place(lambda x: jnp.ones(x.shape, x.dtype)))  # the same on all devices
    fun = jax.shard_map(jax.jit(op), mesh=MESH, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
    x = placed(X, "i", "j")

    [result] = jax.jit(routed(fun, x))(x)

    chex.assert_trees_all_equal(result, np.ones((8, 6), "float32"))


def test_under_set_mesh():
    with jax.set_mesh(MESH):
        fun = lambda x: l1norm(jax.lax.with_sharding_constraint(x * 2, P("i", "j")))
        after = jax.jit(routed(fun, X, mesh=None)).lower(X).compile()

        chex.assert_trees_all_close(after(X), [l1norm.fun(X)], rtol=1e-6)
    assert collectives(after) == REDUCE


def test_inside_a_trace():
    @jax.jit
    def step(x):
        return routed(lambda x: l1norm(constrained(x, "i", "j")), x)(x)[0]

    chex.assert_trees_all_close(step(X), l1norm.fun(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("fun", "mesh"),
    [
        pytest.param(lambda x: jnp.sin(x), MESH, id="no op"),
        pytest.param(lambda x: (l1norm(x), x * 2)[1], MESH, id="nobody reads it"),
        pytest.param(l1norm, ONE, id="one device"),
        pytest.param(l1norm, None, id="no mesh"),
        pytest.param(
            jax.shard_map(l1norm, mesh=MESH, in_specs=P("i"), out_specs=P("i")), MESH, id="manual"
        ),
    ],
)
def test_what_jax_inlines_itself_is_left_alone(fun, mesh):
    given = {"l1norm": ([P()], P())} if mesh is ONE else None

    plan = plan_of(fun, X, mesh=mesh, specs=given)

    assert plan.evaluate is None
    assert plan.findings == ()


def test_specs_are_the_users_if_given():
    x = placed(X, "i", "j")
    given = {"l1norm": ([P(None, ("j",))], P(None, "j"))}

    plan = plan_of(lambda x: l1norm(x * 2), x, specs=given)

    assert texts(plan) == [
        ("rewritten", "'l1norm': shard_map, (P(None, 'j')) -> (P(None, 'j'))", "")
    ]
    [result] = jax.jit(lambda x: plan.evaluate(x))(x)
    chex.assert_trees_all_close(result, l1norm.fun(X), rtol=1e-6)
    assert result.sharding.is_equivalent_to(NamedSharding(MESH, P(None, "j")), 2)


def test_specs_that_do_not_fit_are_listed():
    with pytest.raises(ArgumentError) as error:
        plan_of(lambda x: layernorm(x, SCALE), X, specs={"layernorm": ([P("k", None, "i")], P())})

    assert str(error.value) == (
        "specs= of the custom_partitioning operation 'layernorm' do not fit it: it has 2 operands, "
        "and 1 specs for them; P('k', None, 'i') is longer than the shape (8, 6); "
        "P('k', None, 'i'): the mesh {'i': 4, 'j': 2} has no axis 'k'. Give (in_specs, out_specs), "
        "without its static arguments."
    )


def test_where_nothing_is_known_each_device_computes_all_and_that_is_noted():
    plan = plan_of(lambda x: l1norm(x * 2), X)

    assert texts(plan) == [
        ("rewritten", "'l1norm': shard_map, (P(None, None)) -> (P(None, None))", ""),
        (
            "noted",
            "'l1norm': every device computes all of it",
            "nothing tells how its operands lie: give specs={'l1norm': (in_specs, out_specs)}",
        ),
    ]
    chex.assert_trees_all_close(jax.jit(lambda x: plan.evaluate(x))(X), [l1norm.fun(X)], rtol=1e-6)


def test_of_a_custom_rule_only_the_function_is_routed_and_that_is_said():
    plan = plan_of(doubled, placed(X, "i"))

    [finding] = plan.findings
    assert finding.why == "the function only: its derivative rules can be seen from around jax.grad"


def test_explicit_types_count_more_than_what_shardy_says():
    mesh = mesh_4x2(AxisType.Explicit)
    # The rule ties no dimension to another, so Shardy leaves the result whole on each device.
    op = odd_op(in_place(), rule="n h -> a b")
    x = placed(X, "i", "j", mesh=mesh)

    summed = jax.jit(routed(lambda x: jnp.sum(jax.jit(op)(x)), x, mesh=mesh)).lower(x).compile()

    chex.assert_trees_all_close(summed(x), [2 * X.sum()], rtol=1e-5)
    assert collectives(summed) == {"all-reduce": 2}  # of the sum, one an axis; no gather


# What is refused. Each op is wrong, or odd, in one way.


def odd_op(partition, *, rule="n h -> n h", fun=lambda x: x * 2, **options):
    def odd(x):
        return fun(x)

    op = custom_partitioning(odd)
    op.def_partition(partition, sharding_rule=rule, **options)
    return op


def in_place(lower=lambda x: x * 2, *, result=None, operand=None):
    """A partition() that keeps its operand as it lies, except for what is said."""

    def partition(mesh, arg_shapes, result_shape):
        del result_shape
        own = arg_shapes[0].sharding
        return mesh, lower, result or own, (operand or own,)

    return partition


def other_mesh(mesh, arg_shapes, result_shape):
    del mesh, result_shape
    other = NamedSharding(mesh_4x2(names=("a", "b")), P("a"))
    return other.mesh, lambda x: x * 2, other, (other,)


def grown(x):
    """`[8, 6] -> [10, 6]`, which 4 devices cannot share evenly."""
    return jnp.concatenate([x, x[:2]])


def captured(x):
    return x * 2 * jnp.asarray(SCALE)


def untyped(x):
    return jax.lax.all_gather(x, "j").reshape(x.shape[0], -1)


REFUSED = {
    "XLA's shardings": (
        odd_op(in_place(), decode_shardings=False),
        "its partition() asks for XLA's own shardings (decode_shardings=False)",
    ),
    "another mesh": (
        odd_op(other_mesh),
        "its partition() returns another mesh than it was given",
    ),
    "no NamedSharding": (
        odd_op(in_place(operand=jax.sharding.SingleDeviceSharding(jax.devices()[0]))),
        "its partition() returns shardings that are not NamedShardings of the mesh",
    ),
    "unconstrained": (
        odd_op(in_place(operand=NamedSharding(MESH, P(P.UNCONSTRAINED)))),
        "its partition() returns P(UNCONSTRAINED,), which shard_map has no word for",
    ),
    "uneven": (
        lambda x: odd_op(in_place())(grown(x)),
        "P('i', None) does not cut the shape (10, 6) into equal blocks",
    ),
    "other shapes": (
        odd_op(in_place(lambda x: x.sum(0))),
        "its lowering gives float32[6] where its partition() says float32[2, 6]",
    ),
    "weak type": (
        lambda x: x * odd_op(in_place(), rule="->")(2.0),
        "one of its results is weakly typed",
    ),
    "captured in remat": (
        jax.checkpoint(odd_op(in_place(captured))),
        "its lowering captures arrays, and jax.checkpoint around it cannot hold them",
    ),
    "over a manual axis": (
        jax.shard_map(
            odd_op(in_place(operand=NamedSharding(MESH, P("i")))),
            mesh=MESH,
            in_specs=P("i"),
            out_specs=P("i"),
            axis_names={"i"},
        ),
        "its partition() returns P('i',), inside a shard_map over the same axis",
    ),
}


@pytest.mark.parametrize(("fun", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_said_is_refused(fun, reason):
    plan = plan_of(fun, placed(X, "i"))

    assert texts(plan) == [("refused", "'odd': left as it is", reason)]
    assert plan.evaluate is None


def test_a_key_is_refused():
    op = odd_op(in_place(), rule="n k -> n k", fun=lambda keys: keys)
    keys = placed(jax.random.split(jax.random.key(0), 8), "i")

    plan = plan_of(op, keys)

    assert texts(plan) == [("refused", "'odd': left as it is", "one of its values is a PRNG key")]


def test_a_lowering_that_the_checked_types_reject_is_refused():
    op = odd_op(
        in_place(
            untyped, result=NamedSharding(MESH, P()), operand=NamedSharding(MESH, P(None, "j"))
        )
    )
    region = functools.partial(
        jax.shard_map, op, mesh=MESH, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}
    )

    plan = plan_of(region(), placed(X, "i"))

    [(outcome, _, why)] = texts(plan)
    assert outcome == "refused"
    assert why == (
        "check_vma=True of the shard_map around it: shard_map applied to the function 'odd' was "
        "given out_specs which require replication which can't be statically inferred given the "
        "mesh"
    )
    assert texts(plan_of(region(check_vma=False), placed(X, "i")))[0][0] == "rewritten"


def test_two_kinds_of_axes_are_refused():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("i", "j"), axis_types=kinds)

    plan = plan_of(l1norm, placed(X, "i", mesh=mesh), mesh=mesh)

    assert texts(plan)[0][2] == "the mesh has both Auto and Explicit axes"


def test_several_meshes_are_refused():
    other = mesh_4x2(names=("a", "b"))

    plan = plan_of(lambda x, y: l1norm(x), placed(X, "i"), placed(X, "a", mesh=other), mesh=None)

    assert texts(plan) == [
        (
            "refused",
            "'l1norm': left as it is",
            "the program uses several meshes: choose one by mesh=",
        )
    ]


def test_arguments_elsewhere_are_refused():
    half = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("i", "j"))

    plan = plan_of(l1norm, placed(X, "i", mesh=half))

    assert texts(plan)[0][2] == "an argument lies on other devices than the mesh has"


@pytest.fixture
def without_shardy():
    jax.config.update("jax_use_shardy_partitioner", val=False)
    yield
    jax.config.update("jax_use_shardy_partitioner", val=True)


@pytest.mark.usefixtures("without_shardy")
def test_without_shardy_only_given_specs_are_used():
    refused = plan_of(l1norm, X)
    given = plan_of(l1norm, X, specs={"l1norm": ([P("i")], P("i"))})

    assert texts(refused) == [
        (
            "refused",
            "'l1norm': left as it is",
            "jax_use_shardy_partitioner is off, so nothing tells its specs: give specs=",
        )
    ]
    assert [outcome for outcome, *_ in texts(given)] == ["rewritten"]


def test_a_call_that_is_not_found_again_is_refused(monkeypatch):
    monkeypatch.setattr(propagation, "_SCOPE", "elsewhere_{}")

    plan = plan_of(l1norm, placed(X, "i"))

    assert texts(plan)[0][2] == "it was not found again in the lowered program"


def test_one_good_op_is_routed_beside_a_refused_one():
    x = placed(X, "i")

    plan = plan_of(lambda x: l1norm(odd_op(in_place(), decode_shardings=False)(x)), x)

    assert [outcome for outcome, *_ in texts(plan)] == ["refused", "rewritten"]
    text = jax.jit(lambda x: plan.evaluate(x)).lower(x).as_text()
    assert text.count("@CustomSPMDPartitioning") == 1


def test_mesh_of_finds_the_one_mesh():
    jaxpr = lambda fun: jax.make_jaxpr(fun)(X)
    inner = jax.jit(jnp.sin, in_shardings=NamedSharding(MESH, P("i")))
    region = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("i"), out_specs=P("i"))

    assert propagation.mesh_of(jaxpr(jnp.sin), [None]) is None
    assert propagation.mesh_of(jaxpr(jnp.sin), [NamedSharding(MESH, P())]) == MESH
    assert propagation.mesh_of(jaxpr(lambda x: constrained(x, "i")), [None]) == MESH
    assert propagation.mesh_of(jaxpr(lambda x: inner(x)), [None]) == MESH
    assert propagation.mesh_of(jaxpr(region), [None]) == MESH
    assert propagation.mesh_of(jaxpr(region), [NamedSharding(mesh_4x2(names=("a", "b")), P())]) == (
        mesh_4x2(names=("a", "b"))
    )
    with jax.set_mesh(MESH):
        assert propagation.mesh_of(jaxpr(jnp.sin), [None]) == MESH


def test_specs_for_an_op_that_is_not_there():
    with pytest.raises(ArgumentError) as caught:
        partition.plan_partitioning(
            jax.make_jaxpr(l1norm)(np.ones((8, 6), np.float32)),
            mesh=MESH,
            in_shardings=[None],
            specs={"l1nrom": ([P()], P())},
        )

    assert str(caught.value).startswith(
        "specs= names 'l1nrom', but the custom_partitioning operations of the program are 'l1norm'"
    )


def test_a_jit_around_rewrite_without_a_mesh_is_warned_of_once():
    step = jax.jit(rewrite(lambda x: l1norm(x * 2)))
    x = placed(X, "i", "j")

    with pytest.warns(UserWarning, match="leaves the custom_partitioning operations of '<lambda>'"):
        values = step(x)
    assert "CustomSPMDPartitioning" in step.lower(x).as_text()
    np.testing.assert_allclose(values, l1norm.fun(X), rtol=1e-6)

    with_mesh = jax.jit(rewrite(lambda x: l1norm(x * 2), mesh=MESH))
    np.testing.assert_allclose(with_mesh(x), l1norm.fun(X), rtol=1e-6)
    assert "CustomSPMDPartitioning" not in with_mesh.lower(x).as_text()
