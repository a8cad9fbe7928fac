"""Along which axes a value is the same on all devices."""

import jax
import jax.numpy as jnp
import pytest
from gather_checks import blocks, mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist.passes.interpreter import equations
from jax_dist.passes.uniformity import (
    NOWHERE,
    OUTSIDE,
    Invariance,
)

pytestmark = pytest.mark.rewriting

X = jnp.asarray(blocks(12, 5))
BOTH, ONLY_I, ONLY_J, NONE = {"i", "j"}, {"i"}, {"j"}, set()


def same(body, *, check_vma=False, cut_along="i"):
    """Of what a body gives on a mesh of 2 and 3 devices."""
    function = jax.shard_map(
        body,
        mesh=mesh_of(i=2, j=3),
        in_specs=P(cut_along),
        out_specs=P(("i", "j")),
        check_vma=check_vma,
    )
    (eqn,) = shard_maps(function)
    invariance = Invariance()
    (inputs,) = invariance.of_body_inputs(eqn, [NOWHERE], OUTSIDE)
    (output,) = invariance.outputs(eqn.params["jaxpr"], inputs, OUTSIDE.inside(eqn))
    return set(output)


@pytest.mark.parametrize(
    ("body", "axes"),
    [
        (lambda x: x, ONLY_J),
        (lambda x: jnp.sin(x) + 1, ONLY_J),
        (lambda x: jnp.ones((2, 3)), BOTH),
        (lambda x: lax.psum(x, "i"), BOTH),
        (lambda x: lax.pmax(x, ("i", "j")), BOTH),
        (lambda x: lax.all_gather(x, "i"), BOTH),
        (lambda x: x * lax.axis_index("j"), NONE),
        (lambda x: lax.axis_index("j") * jnp.ones(2), ONLY_I),
        (lambda x: lax.ppermute(lax.psum(x, "i"), "i", [(0, 1)]), ONLY_J),
        (lambda x: lax.psum_scatter(jnp.ones((2, 3)), "i"), ONLY_J),
        (lambda x: lax.all_to_all(jnp.ones((3, 3)), "j", 0, 0), ONLY_I),
        (lambda x: lax.psum(jnp.ones(2), "j", axis_index_groups=[[0], [1], [2]]), ONLY_I),
        (lambda x: jax.random.normal(jax.random.key(0), (2,)), BOTH),
        (
            lambda x: jax.random.normal(
                jax.random.fold_in(jax.random.key(0), lax.axis_index("j")), (2,)
            ),
            ONLY_I,
        ),
        (lambda x: jax.pure_callback(lambda: 1.0, jax.ShapeDtypeStruct((), "float32"))[None], NONE),
        (lambda x: jax.jit(lambda x: lax.psum(x, "i"))(x), BOTH),
        (lambda x: jax.checkpoint(lambda x: lax.psum(x, "i"))(x), BOTH),
        (lambda x: jax.nn.relu(lax.psum(x, "i")), BOTH),
    ],
)
def test_one_step(body, axes):
    assert same(body) == axes


def test_inputs_differ_along_what_cuts_them():
    assert same(lambda x: x, cut_along=None) == BOTH
    assert same(lambda x: x, cut_along="j") == ONLY_I
    assert same(lambda x: x, cut_along=("i", "j")) == NONE


# ---- loops and branches


def test_a_carry_is_the_same_only_if_every_iteration_leaves_it_so():
    def body(x):
        ones = jnp.ones(x.shape)
        carries, _ = lax.scan(lambda c, _: ((c[1], c[0] + x), None), (ones, ones), None, length=3)
        return carries[1]

    assert same(body) == ONLY_J


def test_a_carry_that_is_summed_stays_the_same():
    def body(x):
        return lax.scan(lambda c, _: (c + lax.psum(x, "i"), None), 0 * jnp.ones_like(x), None, 3)[0]

    assert same(body) == BOTH


def test_the_start_of_a_carry_counts_for_there_may_be_no_iteration():
    def body(x):
        return lax.scan(lambda c, n: (jnp.ones_like(c), None), x, jnp.arange(0))[0]

    assert same(body) == ONLY_J


def test_what_a_scan_collects():
    def body(x):
        return lax.scan(lambda c, row: (c, lax.psum(row, "i")), 0.0, x)[1]

    assert same(body) == BOTH


def test_devices_that_leave_a_loop_at_other_times_hold_other_values():
    def body(x):
        count = lax.while_loop(lambda c: c < jnp.abs(x).sum(), lambda c: c + 1, 0.0)
        return count[None]

    assert same(body) == ONLY_J


def test_devices_that_leave_a_loop_together():
    def body(x):
        total = lax.psum(jnp.abs(x).sum(), "i")
        return lax.while_loop(lambda c: c < total, lambda c: c + 1, 0.0)[None]

    assert same(body) == BOTH


def test_devices_that_take_other_branches_hold_other_values():
    def body(x):
        return lax.cond(x.sum() > 0, lambda: jnp.ones(2), lambda: jnp.zeros(2))

    assert same(body) == ONLY_J


def test_devices_that_take_the_same_branch():
    def body(x):
        total = lax.psum(x, "i")
        return lax.cond(total.sum() > 0, lambda: total, lambda: -total)

    assert same(body) == BOTH


# ---- types


def test_types_tell_more_where_they_are_checked():
    def body(x):
        del x
        return _unknown(jnp.ones((2, 3)))

    assert same(body, check_vma=True) == BOTH
    assert same(body, check_vma=False) == NONE


def _unknown(x):
    """A primitive that is not in the tables: nothing is known of it but its type."""
    return lax.linalg.symmetric_product(x, jnp.zeros((2, 2)))


def test_types_of_an_unchecked_shard_map_inside_a_checked_one_say_nothing():
    def inner(x):
        return x * lax.axis_index("i")

    def outer(x):
        nested = jax.shard_map(
            inner, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=False
        )
        return nested(x)

    function = jax.shard_map(
        outer, mesh=mesh_of(i=2, j=3), in_specs=P("i"), out_specs=P("i"), axis_names={"i"}
    )
    outside, inside = shard_maps(function)
    scope = OUTSIDE.inside(outside)

    assert (set(scope.axes), set(scope.typed)) == ({"i"}, {"i"})
    assert (set(scope.inside(inside).axes), set(scope.inside(inside).typed)) == (BOTH, NONE)


def test_what_leaves_a_shard_map_may_be_cut_by_the_next():
    """A sum over j is the same along j; its parts are not."""

    def outer(x):
        first = jax.shard_map(
            lambda x: lax.psum(x, "j"),
            in_specs=P(),
            out_specs=P(),
            axis_names={"j"},
            check_vma=False,
        )
        second = jax.shard_map(
            lambda x: x, in_specs=P("j"), out_specs=P("j"), axis_names={"j"}, check_vma=False
        )
        return second(first(x))

    function = jax.shard_map(
        outer,
        mesh=mesh_of(i=2, j=3),
        in_specs=P("i"),
        out_specs=P("i"),
        axis_names={"i"},
        check_vma=False,
    )
    outside, _, second = shard_maps(function)
    invariance, scope = Invariance(), OUTSIDE.inside(outside)
    (inputs,) = invariance.of_body_inputs(outside, [NOWHERE], OUTSIDE)
    facts = invariance.facts(outside.params["jaxpr"], inputs, scope)
    (entering,) = invariance.of_body_inputs(second, [facts[second.invars[0]]], scope)

    assert [set(each) for each in entering] == [NONE]


def shard_maps(function):
    """Their equations, the outer one first."""
    found = equations(jax.make_jaxpr(function)(X))
    return [eqn for eqn in found if eqn.primitive.name == "shard_map"]
