"""What the pass says, what it leaves alone, and how it composes."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_cases import Count
from gather_checks import (
    assert_close,
    blocks,
    count,
    lines,
    mesh_of,
    planned,
    rewritten_leaves,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._rewrite import interpreter
from jax_dist._rewrite.pipeline import PassFinding, PassPlan

pytestmark = pytest.mark.rewriting


def on_four(body, *, check_vma=True):
    return jax.shard_map(
        body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
    )


def line_of(function, text):
    """Where the source of a function holds a text, as a finding names it."""
    source, first = inspect.getsourcelines(function)
    (place,) = [k for k, line in enumerate(source) if text in line]
    return f"tests/passes/test_gathers.py:{first + place}"


X = jnp.asarray(blocks(8, 3))


# ---- findings


def test_exact_leaves_what_may_round():
    """The largest is one of the numbers; whole numbers have one sum; a turned sign is exact."""
    why = "gathers='exact', and other sums may differ in the last bits"

    def said(body, *, exact):
        plan = planned(on_four(lambda x: body(lax.all_gather(x, "i"))), X, exact=exact)
        return [(each.outcome, each.why) for each in plan.findings]

    for body in (lambda g: g.sum(0), lambda g: g.mean(0), lambda g: jnp.sin(g).max(0)):
        assert said(body, exact=True) == [("refused", why)]
        assert said(body, exact=False) == [("rewritten", "")]
    for body in (lambda g: g.max(0), lambda g: (-g).min(0), lambda g: (g > 0).sum(0)):
        assert said(body, exact=True) == [("rewritten", "")]


def test_a_program_without_gathers_has_nothing_to_say():
    assert planned(on_four(lambda x: lax.psum(x, "i")), X) == PassPlan(None, ())


@pytest.mark.parametrize(
    "around", [jax.jit, lambda f: lambda x: jnp.sin(f(jnp.cos(x)) * 2)], ids=["jit", "others"]
)
def test_a_shard_map_among_other_equations(around):
    function = around(on_four(lambda x: lax.all_gather(x, "i").sum(0)))
    found = lines(planned(function, X))

    assert found == ["rewritten: all_gather over 'i', reduce_sum: one psum"]


def test_a_gather_over_one_device_is_none():
    function = jax.shard_map(
        lambda x: lax.all_gather(x, "i").sum(0),
        mesh=mesh_of(i=1),
        in_specs=P("i"),
        out_specs=P("i"),
    )
    assert planned(function, X) == PassPlan(None, ())


def test_a_gather_whose_result_is_not_used_is_none():
    def body(x):
        jnp.sin(lax.all_gather(x, "i"))
        return x

    assert planned(on_four(body), X) == PassPlan(None, ())


def test_a_rewrite_is_told_at_the_line_of_the_gather():
    def body(x):
        whole = lax.all_gather(x, "i", tiled=True)
        return jnp.sin(whole).sum(0) * whole.max(0)

    assert planned(on_four(body), X).findings == (
        PassFinding(
            code="JXD301",
            outcome="rewritten",
            what="all_gather over 'i', reduce_sum and reduce_max: one psum and one pmax",
            why="",
            where=line_of(body, "all_gather"),
        ),
    )


def test_a_refusal_is_told_at_the_line_that_forces_the_gather():
    def body(x):
        whole = lax.all_gather(x, "i")
        doubled = 2 * whole
        return jnp.sort(doubled, axis=0)[0]

    (finding,) = planned(on_four(body), X).findings

    assert finding == PassFinding(
        code="JXD301",
        outcome="refused",
        what=f"all_gather over 'i' ({line_of(body, 'all_gather')}) is kept",
        why="sort needs the whole gathered value",
        where=line_of(body, "jnp.sort"),
    )


def test_a_refusal_in_a_function_of_the_user_is_told_there():
    def in_order(whole):
        return lax.sort(whole, dimension=0)

    function = on_four(lambda x: jax.jit(in_order)(lax.all_gather(x, "i")).sum(0))
    (found,) = planned(function, X).findings

    assert found.where == line_of(in_order, "lax.sort")


def test_a_helper_of_jax_that_was_traced_elsewhere_before_does_not_lead_astray():
    """JAX traces jnp.median once: its equations bear the line of the first caller."""

    def first(x):
        return jnp.median(lax.all_gather(x, "i"), 0)

    def second(x):
        return jnp.median(lax.all_gather(x, "i"), 0)

    planned(on_four(first), X)
    (finding,) = planned(on_four(second), X).findings

    assert finding.where == line_of(second, "median")


def test_a_line_that_runs_many_times_is_told_once():
    def body(x):
        for _ in range(5):
            x = x + lax.all_gather(x, "i").mean(0)
        return x

    plan = planned(on_four(body), X)

    assert lines(plan) == ["rewritten: all_gather over 'i', reduce_sum: one psum"]
    assert count(plan.evaluate, X) == Count(reductions=5)


def test_a_primitive_without_a_rule():
    def body(x):
        return jnp.fft.fft(lax.all_gather(x, "i"), axis=1).real.sum(0)

    (finding,) = planned(on_four(body), X).findings
    assert finding.why == "fft needs the whole gathered value"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            lambda g: g[jnp.array([0, 2])].sum(0),
            "gather needs the whole gathered value",
        ),
        (lambda g: jnp.concatenate([g, g]).sum(0), "concatenate of the gathered dimension has no "
         "matching collective"),
        (lambda g: jnp.flip(g, 0)[0], "rev needs the whole gathered value"),
        (lambda g: jnp.pad(g, [(1, 0), (0, 0), (0, 0)]).sum(0),
         "pad needs the whole gathered value"),
        (lambda g: (g + g.transpose(1, 0, 2)).sum(0), "add mixes values that are gathered in "
         "different ways"),
        (lambda g: lax.reduce_precision(g, 5, 2).astype(jnp.float16) @ jnp.ones((3, 2), "float16"),
         "the gathered value leaves the shard_map whole"),
        (lambda g: lax.reduce_xor(g.astype(jnp.int32), [0]), "reduce_xor of the gathered dimension "
         "has no matching collective"),
        (lambda g: jnp.max(g.astype(jnp.float8_e4m3fn), 0).astype(jnp.float32),
         "reduce_max over devices has no order for float8_e4m3fn"),
    ],
)  # fmt: skip
def test_other_refusals(body, why):
    """Of blocks `[4, 3]`, so that the gathered dimension could be taken for another one."""
    x = jnp.asarray(blocks(16, 3))
    plan = planned(on_four(lambda x: body(lax.all_gather(x, "i"))), x)
    assert plan.evaluate is None
    assert [finding.why for finding in plan.findings] == [why]


def test_a_custom_rule_of_the_user_is_named():
    @jax.custom_vjp
    def straight_through(x):
        return jnp.round(x)

    straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    function = on_four(lambda x: straight_through(lax.all_gather(x, "i")).mean(0))
    (finding,) = planned(function, X).findings
    assert finding.why == (
        "straight_through has its own rule of differentiation, which is for the whole value: "
        "apply it to the block, before the gather"
    )


# ---- values that are none


def test_a_nan_on_one_device_reaches_all():
    x = X.at[2, 1].set(jnp.nan)  # on the second device
    function = on_four(lambda x: lax.all_gather(x, "i").max(0) - lax.all_gather(-x, "i").min(0))
    plan = planned(function, x)
    assert count(plan.evaluate, x) == Count(reductions=2)

    found = np.isnan(np.asarray(jax.jit(plan.evaluate)(x)[0]))

    assert found.tolist() == [[False, True, False], [False] * 3] * 4


# ---- composition


def test_a_train_step_keeps_its_donation():
    def step(weights, x):
        def loss(weights):
            return jnp.mean((x @ weights) ** 2)

        gradient = jax.grad(loss)(weights)
        return weights - 0.1 * lax.all_gather(gradient, "i").mean(0)

    mapped = jax.shard_map(
        step, mesh=mesh_of(i=4), in_specs=(P(), P("i")), out_specs=P(), check_vma=False
    )
    jitted = jax.jit(mapped, donate_argnums=0)
    weights = jnp.asarray(blocks(3, 2))
    wanted = mapped(weights, X)
    plan = planned(jitted, weights, X)

    changed = jax.jit(plan.evaluate, donate_argnums=0)

    text = changed.lower(weights, X).as_text()
    assert (text.count("all_gather"), text.count("all_reduce")) == (0, 1)
    assert "jax.buffer_donor" in text or "tf.aliasing_output" in text
    assert_close(changed(weights, X)[0], wanted, 1e-6)


def _in_a_loop_and_a_branch(x):
    average = on_four(lambda x: lax.all_gather(x, "i").mean(0))
    looped = lax.fori_loop(0, 3, lambda _, x: average(x) + 1, x)
    return lax.cond(looped.sum() > 0, average, lambda x: x, looped)


def test_one_of_several_bodies_holds_a_shard_map():
    assert count(rewritten_leaves(_in_a_loop_and_a_branch), X) == Count(reductions=2)


def test_loops_and_branches_around_a_shard_map():
    found = jax.jit(rewritten_leaves(_in_a_loop_and_a_branch))(X)[0]
    assert_close(found, jax.jit(_in_a_loop_and_a_branch)(X), 1e-6)


def test_a_jitted_layer_that_is_called_twice():
    """The two calls share one jaxpr: its gathers are two all the same."""

    @jax.jit
    def layer(x):
        doubled = 2 * x
        return lax.all_gather(doubled, "i").mean(0)

    plan = planned(on_four(lambda x: layer(layer(x) + x)), X)

    assert count(plan.evaluate, X) == Count(reductions=2)
    assert len(plan.findings) == 1


@pytest.mark.parametrize(
    "call", [lambda whole, _: whole, lambda _, number: number + 1], ids=["handed on", "not used"]
)
def test_a_jit_that_does_nothing_with_a_gathered_value(call):
    def body(x):
        whole = lax.all_gather(x, "i")
        return (jax.jit(call)(whole, jnp.float32(2)) * whole).sum(0)

    function = on_four(body, check_vma=False)

    assert [each.outcome for each in planned(function, X).findings] == ["rewritten"]
    assert_close(jax.jit(rewritten_leaves(function))(X)[0], jax.jit(function)(X), 1e-6)


def _total(x):
    return lax.all_gather(x, "i").sum(0)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: lax.scan(lambda c, row: (c + _total(row), None), x[0], x)[0],
        lambda x: lax.cond(lax.pmax(x[0, 0], "i") > 0, _total, lambda x: x, x),
        lambda x: lax.cond(lax.pmax(x[0, 0], "i") > 0, lambda x: x, _total, x),
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, _total(c[1])), (0, x))[1],
        lambda x: jax.checkpoint(_total)(x),
    ],
    ids=["scan", "first branch", "second branch", "while", "remat"],
)
def test_a_gather_in_a_body_is_reduced_there(body):
    function = on_four(body, check_vma=False)

    assert lines(planned(function, X)) == ["rewritten: all_gather over 'i', reduce_sum: one psum"]
    assert count(rewritten_leaves(function), X).gathers == 0


def test_what_is_whole_from_a_refusal_on_forces_no_other_gather():
    def body(x):
        rows, columns = lax.all_gather(x, "i"), lax.all_gather(2 * x, "i", axis=1)
        return lax.sort(rows, dimension=0)[0] + (rows + columns).sum(1)

    found = planned(on_four(body, check_vma=False), jnp.asarray(blocks(16, 3))).findings

    assert [each.outcome for each in found] == ["refused", "rewritten"]


_IN_A_LOOP = (
    "the gather is outside the {} and its use inside: a reduction over devices would run in every "
    "iteration"
)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            lambda g: lax.scan(lambda c, _: (c + g.sum(0), None), jnp.ones((2, 3)), None, 2)[0],
            _IN_A_LOOP.format("scan"),
        ),
        (
            lambda g: lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + g.sum(0)), (0, jnp.ones((2, 3)))
            )[1],
            _IN_A_LOOP.format("while loop"),
        ),
        (
            lambda g: lax.cond(lax.psum(1, "i") > 3, lambda g: g.sum(0), lambda g: g.max(0), g),
            "the gather is outside the cond and its use inside: a reduction over devices would "
            "stand in a branch that some of them may not take",
        ),
        (
            lambda g: jax.nn.relu(g).sum(0),
            "relu has its own rule of differentiation, which is for the whole value: apply it to "
            "the block, before the gather",
        ),
        (
            lambda g: jax.checkpoint(lambda g: g.sum(0))(g),
            "checkpoint takes the gathered value whole: gather inside it",
        ),
    ],
    ids=["scan", "while", "cond", "relu", "checkpoint"],
)
def test_why_a_body_takes_no_gathered_value(body, why):
    function = on_four(lambda x: body(lax.all_gather(x, "i")), check_vma=False)

    assert [(e.outcome, e.why) for e in planned(function, X).findings] == [("refused", why)]


@pytest.mark.parametrize(
    ("dtype", "barriers"),
    [("bfloat16", 1), ("float16", 1), ("float32", 0), ("int8", 0), ("int32", 0)],
)
def test_what_stands_for_a_gather_of_a_small_type_is_rounded(dtype, barriers):
    """As what is sent would be: XLA computes in float32 between operations that it fuses."""
    function = on_four(lambda x: lax.all_gather(x.astype(dtype), "i").max(0), check_vma=False)
    rewritten = jax.make_jaxpr(rewritten_leaves(function))(X)
    names = [eqn.primitive.name for eqn in interpreter.equations(rewritten)]

    assert (names.count("all_gather"), names.count("optimization_barrier")) == (0, barriers)


def test_a_gather_in_a_shard_map_in_another():
    def outer(x):
        weighted = lambda x: (lax.all_gather(x, "i") * jnp.arange(4.0)[:, None, None]).sum(0)
        specs = {"in_specs": P("i"), "out_specs": P("i")}
        return jax.shard_map(weighted, **specs, axis_names={"i"}, check_vma=False)(x)

    function = jax.shard_map(
        outer, mesh=mesh_of(i=4, j=2), in_specs=P("j"), out_specs=P("j"), axis_names={"j"},
        check_vma=False,
    )  # fmt: skip

    assert lines(planned(function, X)) == ["rewritten: all_gather over 'i', reduce_sum: one psum"]
    assert count(rewritten_leaves(function), X) == Count(reductions=1)


def _two_totals(x):
    total = jax.jit(lambda each: lax.all_gather(each, "i").sum(0))
    return on_four(lambda x: x * total(2.0) + total(3.0), check_vma=False)(x)


def test_a_jit_of_a_constant():
    """A constant has no variable of its own: its gather equals no other."""
    assert count(rewritten_leaves(_two_totals), X) == Count(reductions=2)


def test_the_values_of_a_jit_of_a_constant():
    function = _two_totals
    assert_close(jax.jit(rewritten_leaves(function))(X)[0], 8 * X + 12, 1e-6)


def test_equal_gathers_in_two_functions_are_one():
    def largest(x):
        return lax.all_gather(x, "i").max(0)

    def first(x):
        return lax.all_gather(x, "i")[0]

    function = on_four(lambda x: jax.jit(largest)(x) + jax.jit(first)(x))
    assert planned(function, X).evaluate is None


def test_a_pmap_inside_jit():
    mapped = jax.pmap(lambda x: lax.all_gather(x, "i").mean(0), "i", devices=jax.devices()[:4])
    x = jnp.asarray(blocks(4, 5))
    function = jax.jit(mapped)

    assert count(function, x) == Count(gathers=1)
    assert count(rewritten_leaves(function), x) == Count(reductions=1)
    assert_close(jax.jit(rewritten_leaves(function))(x)[0], function(x), 1e-6)


def test_effects_stay():
    seen = []

    def body(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x[0, 0])
        return lax.all_gather(x, "i").mean(0)

    jax.jit(rewritten_leaves(on_four(body)))(X)[0].block_until_ready()
    jax.effects_barrier()
    assert sorted(seen) == sorted(np.asarray(X)[::2, 0].tolist())


def test_the_name_and_the_line_of_a_reduction_are_those_of_the_user():
    def body(x):
        whole = lax.all_gather(x, "i")
        with jax.named_scope("averaging"):
            return whole.sum(0)

    text = jax.jit(rewritten_leaves(on_four(body))).lower(X).as_text(debug_info=True)

    file, _, line = line_of(body, "whole.sum").rpartition(":")
    assert "averaging/psum" in text
    assert re.search(rf'{re.escape(file)}":{line}:', text)
    assert "jax_dist" not in text


def test_the_same_plan_every_time():
    def body(x):
        return lax.all_gather(x, "i").mean(0) + lax.all_gather(2 * x, "i").max(0)

    plans = [planned(on_four(body), X) for _ in range(2)]
    assert plans[0].findings == plans[1].findings
    texts = [jax.jit(plan.evaluate).lower(X).as_text() for plan in plans]
    assert texts[0] == texts[1]


def test_a_sum_of_a_weak_type_is_kept():
    """A psum has no weak type, and the results of a loop would not fit any more."""

    def body(x):
        whole = lax.all_gather(jnp.asarray(2.0), "i")
        return x + lax.reduce_max(whole, [0])

    plan = planned(on_four(body), X)
    assert plan.evaluate is None
    assert [finding.why for finding in plan.findings] == [
        "the result has a weak type, and a reduction over devices gives none"
    ]


def test_a_product_larger_than_the_gather_keeps_it():
    """Scores times noise as long as the parameters: the scores are the cheaper to send."""

    def update(noise, scores):  # [8, 1000] replicated, [] of each device
        return jax.lax.all_gather(scores, "i") @ noise

    mapped = jax_dist.pmap(update, "i", in_axes=(None, 0), out_axes=None)
    report = jax_dist.explain(mapped, jnp.ones((8, 1000)), jnp.arange(8.0))

    assert [collective.kind for collective in report.after.collectives] == ["all-gather"]
