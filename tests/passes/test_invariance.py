"""Along which axes a value is the same on all devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_checks import blocks, mesh_of
from jax import lax
from jax.extend import random as extended_random
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._rewrite.interpreter import equations
from jax_dist._rewrite.uniformity import NOWHERE, Invariance

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
    (inputs,) = invariance.of_body_inputs(eqn, [NOWHERE], NOWHERE)
    (output,) = invariance.outputs(eqn.params["jaxpr"], inputs, invariance.inside(eqn, NOWHERE))
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


_HERE = {  # that JAX types as the same everywhere, under check_vma=True
    "cond": lambda: lax.cond(lax.axis_index("i") == 0, lambda: 1.0, lambda: 2.0),
    "switch": lambda: lax.switch(lax.axis_index("i") % 2, [lambda: 1.0, lambda: 3.0]),
    "while": lambda: lax.while_loop(
        lambda c: c[0] < lax.axis_index("i"), lambda c: (c[0] + 1, c[1] * 2.0), (0, 1.0)
    )[1],
    "rng_bit_generator": lambda: (
        lax.rng_bit_generator((lax.axis_index("i") + jnp.arange(4)).astype("uint32"), ())[1] % 7
    ).astype(jnp.float32),
    "pure_callback": lambda: jax.pure_callback(
        lambda index: np.float32(index), jax.ShapeDtypeStruct((), "float32"), lax.axis_index("i")
    ),
}
_AROUND = {
    "": lambda make: make(),
    "jit": lambda make: jax.jit(make)(),
    "scan": lambda make: lax.scan(lambda c, _: (c + make(), None), 0.0, None, length=2)[0],
    "remat": lambda make: jax.checkpoint(lambda x: x * make())(2.0),
    "custom_jvp": lambda make: _with_rule(lambda x: x * make())(2.0),
    "composite": lambda make: lax.composite(lambda x: x * make(), "a.b")(jnp.float32(2)),
}


def _with_rule(function):
    ruled = jax.custom_jvp(function)
    ruled.defjvps(lambda tangent, out, x: tangent * out / x)
    return ruled


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("around", "check_vma"),
    [("", False), *((around, True) for around in _AROUND)],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("made_by", _HERE)
def test_a_factor_of_each_device_stays_in_the_gather(made_by, around, check_vma):
    def body(x):
        return (lax.all_gather(x, "i") * _AROUND[around](_HERE[made_by])).sum(0)

    function = jax.shard_map(
        body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
    )
    x = blocks(8, 3)

    np.testing.assert_allclose(jax_dist.rewrite(function)(x), function(x), rtol=1e-6)


def test_a_pallas_call_may_give_each_device_something_else():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    def body(x):
        called = pallas.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct((2, 3), jnp.float32), interpret=True
        )
        return called(jnp.ones((2, 3)))

    assert same(body) == NONE


def test_of_a_primitive_of_a_user_nothing_is_known_whatever_its_name():
    named_as_jax_has_it = Primitive("sin")
    named_as_jax_has_it.def_abstract_eval(lambda x: x)

    assert same(lambda x: named_as_jax_has_it.bind(jnp.ones((2, 3)))) == NONE
    assert same(lambda x: jnp.sin(jnp.ones((2, 3)))) == BOTH


# ---- functions of operands and bodies


@pytest.mark.parametrize(
    ("body", "axes"),
    [
        (lambda x: lax.composite(jnp.sin, "a.b")(lax.psum(x, "i")), BOTH),
        (
            lambda x: lax.composite(lambda x: x * lax.axis_index("i"), "a.b")(lax.psum(x, "i")),
            ONLY_J,
        ),
        (lambda x: jnp.linalg.solve(jnp.eye(3), lax.psum(x, "i")[:1].repeat(3, 0)), BOTH),
        (lambda x: jnp.searchsorted(jnp.arange(5.0), lax.psum(x, "i")), BOTH),
        (lambda x: jnp.searchsorted(jnp.arange(5.0), x), ONLY_J),
        (
            lambda x: lax.reduce_window(
                lax.psum(x, "i"), 1.0, lambda a, b: a * b + 1, (1, 2), (1, 1), "VALID"
            ),
            BOTH,
        ),
        (lambda x: jnp.ones((2, 3)).at[0].apply(lambda v: v * lax.axis_index("i")), ONLY_J),
    ],
    ids=["composite", "composite by device", "solve", "search", "search of own", "window", "apply"],
)
def test_bodies_count(body, axes):
    assert same(body) == axes


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
    invariance = Invariance()
    scope = invariance.inside(outside, NOWHERE)
    (inputs,) = invariance.of_body_inputs(outside, [NOWHERE], NOWHERE)
    facts = invariance.facts(outside.params["jaxpr"], inputs, scope)
    (entering,) = invariance.of_body_inputs(second, [facts[second.invars[0]]], scope)

    assert [set(each) for each in entering] == [NONE]


def shard_maps(function):
    """Their equations, the outer one first."""
    found = equations(jax.make_jaxpr(function)(X))
    return [eqn for eqn in found if eqn.primitive.name == "shard_map"]


# ---- what only has the name of JAX's own


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["all_gather", "reduce_scatter", "while", "cond", "scan", "shard_map", "jit", "psum"]
)
def test_a_primitive_of_a_user_with_a_name_of_jax_is_left_alone(name):
    doubled = Primitive(name)
    doubled.def_abstract_eval(lambda x: x)
    mlir.register_lowering(doubled, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))

    def body(x):
        return doubled.bind(x) + lax.all_gather(x, "i").mean(0)

    function = jax.shard_map(
        body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=False
    )
    x = blocks(8, 3)

    np.testing.assert_allclose(jax_dist.rewrite(function)(x), function(x), rtol=1e-6)


def test_random_bits_of_a_users_own_keys_may_differ():
    implementation = extended_random.define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jax.random.key_data(jax.random.key(seed)),
        split=lambda key, shape: jax.random.key_data(
            jax.random.split(jax.random.wrap_key_data(key), shape)
        ),
        random_bits=lambda key, width, shape: (
            jax.random.bits(jax.random.wrap_key_data(key), shape, jnp.uint32)
            ^ lax.axis_index("i").astype(jnp.uint32)
        ),
        fold_in=lambda key, data: key,
        tag="own",
    )

    def bits(x, **kind):
        data = jax.random.key_data(jax.random.key(0))
        return jax.random.bits(jax.random.wrap_key_data(data, **kind), (2, 3))

    assert same(lambda x: bits(x, impl=implementation)) == NONE
    assert same(bits) == BOTH
