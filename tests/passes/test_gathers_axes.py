"""Gathers over several axes, in nested and partly manual shard_maps."""

import jax
import jax.numpy as jnp
import pytest
from gather_cases import Count
from gather_checks import assert_close, blocks, count, lines, mesh_of, planned, rewritten_leaves
from jax import lax
from jax.sharding import PartitionSpec as P

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"]),
]


def over_two(body, check_vma):
    """On a mesh of 2 and 3 devices; every device has a block `[2, 5]` of `[12, 5]`."""
    return jax.shard_map(
        body,
        mesh=mesh_of(i=2, j=3),
        in_specs=P(("i", "j")),
        out_specs=P(("i", "j")),
        check_vma=check_vma,
    )


def agree(function, after, before, tolerance=1e-6):
    x = jnp.asarray(blocks(12, 5))
    plan = planned(function, x)
    assert count(function, x) == before
    assert plan.evaluate is not None, plan.findings
    assert count(plan.evaluate, x) == after
    wanted = jax.tree.leaves(jax.jit(function)(x))
    for one, other in zip(jax.jit(rewritten_leaves(function))(x), wanted, strict=True):
        assert_close(one, other, tolerance)
    return plan


def test_two_axes_at_once(check_vma):
    function = over_two(lambda x: lax.all_gather(x, ("i", "j")).mean(0), check_vma)
    plan = agree(function, Count(reductions=1), Count(gathers=1))
    assert lines(plan) == ["rewritten: all_gather over ('i', 'j'), reduce_sum: one psum"]


def test_one_of_two_axes(check_vma):
    function = over_two(lambda x: lax.all_gather(x, "j").max(0), check_vma)
    agree(function, Count(reductions=1), Count(gathers=1), tolerance=0)


def test_weights_for_two_axes_go_by_the_order_of_the_names(check_vma):
    """Weights `[3, 2]` by j, then i: a wrong order of the blocks would weigh the wrong ones."""
    weights = jnp.arange(1.0, 7.0)

    def body(x):
        return jnp.einsum("k,kab->ab", weights, lax.all_gather(x, ("j", "i")))

    agree(over_two(body, check_vma), Count(reductions=1), Count(gathers=1))


def test_one_axis_after_the_other(check_vma):
    function = over_two(
        lambda x: lax.all_gather(lax.all_gather(x, "i"), "j").mean((0, 1)), check_vma
    )
    agree(function, Count(reductions=1), Count(gathers=2))


def test_one_axis_after_the_other_tiled(check_vma):
    """Both along dimension 0, `[12]` in the order j, i, row."""
    weights = jnp.arange(12.0)

    def body(x):
        inner = lax.all_gather(x, "i", tiled=True)
        whole = lax.all_gather(inner, "j", tiled=True)
        return jnp.einsum("k,ka->a", weights, whole)

    agree(over_two(body, check_vma), Count(reductions=1), Count(gathers=2))


def test_means_one_after_the_other(check_vma):
    def body(x):
        return lax.all_gather(lax.all_gather(x, "i"), "j").mean(0).mean(0)

    agree(over_two(body, check_vma), Count(reductions=2), Count(gathers=2))


def test_reduced_over_one_and_kept_over_the_other(check_vma):
    def body(x):
        return lax.all_gather(lax.all_gather(x, "j"), "i").mean((1, 2))

    plan = agree(over_two(body, check_vma), Count(gathers=1, reductions=1), Count(gathers=2))
    assert lines(plan)[0] == "rewritten: all_gather over 'j', reduce_sum: one psum"
    assert lines(plan)[1].endswith("is kept; the gathered value leaves the shard_map whole")


def test_an_operand_that_differs_along_the_other_axis(check_vma):
    """It is the same along i, which is what counts."""

    def body(x):
        scale = 1.0 + lax.axis_index("j")
        return (lax.all_gather(x, "i") * scale).sum(0)

    agree(over_two(body, check_vma), Count(reductions=1), Count(gathers=1))


def test_gathered_along_one_times_gathered_along_the_other(check_vma):
    """Block (a, b) of the product would need x of (a, own j) and of (own i, b)."""

    def body(x):
        left = lax.all_gather(x, "i", axis=0, tiled=True)
        right = lax.all_gather(x, "j", axis=0, tiled=True)
        return jnp.einsum("ka,la->kl", left, right).sum((0, 1))[None]

    x = jnp.asarray(blocks(12, 5))
    plan = planned(over_two(body, check_vma), x)
    assert plan.evaluate is None
    assert [finding.why for finding in plan.findings] == [
        "dot_general is an outer product of two gathered operands"
    ] * 2


def test_psum_over_the_other_axis_in_between(check_vma):
    def body(x):
        return lax.psum(lax.all_gather(x, "i"), "j").max(0)

    agree(over_two(body, check_vma), Count(reductions=2), Count(gathers=1, reductions=1), 1e-6)


def test_psum_over_the_same_axis_in_between_is_refused(check_vma):
    def body(x):
        return lax.psum(lax.all_gather(x, "i"), "i").max(0)

    plan = planned(over_two(body, check_vma), jnp.asarray(blocks(12, 5)))
    assert plan.evaluate is None
    assert [f.why for f in plan.findings] == ["psum over 'i' of what was gathered over it"]


def test_a_shard_map_inside_another(check_vma):
    def inner(x):
        return lax.all_gather(x, "j").mean(0)

    def outer(x):
        nested = jax.shard_map(
            inner, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=check_vma
        )
        return nested(lax.all_gather(x, "i").sum(0))

    function = jax.shard_map(
        outer,
        mesh=mesh_of(i=2, j=3),
        in_specs=P("i"),
        out_specs=P("i"),
        axis_names={"i"},
        check_vma=check_vma,
    )
    agree(function, Count(reductions=2), Count(gathers=2))


def test_a_partly_manual_shard_map(check_vma):
    function = jax.shard_map(
        lambda x: jnp.average(lax.all_gather(x, "i"), 0, weights=jnp.array([3.0, 1.0])),
        mesh=mesh_of(i=2, j=3),
        in_specs=P("i"),
        out_specs=P("i"),
        axis_names={"i"},
        check_vma=check_vma,
    )
    agree(function, Count(reductions=1), Count(gathers=1))
