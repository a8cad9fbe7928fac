"""One rule at a time: each of these leaves a gathered value gathered, or reduces it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_cases import Count
from gather_checks import assert_close, blocks, count, lines, mesh_of, planned, rewritten_leaves
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._rewrite import gathers
from jax_dist._rewrite.interpreter import equations

pytestmark = pytest.mark.rewriting

X = jnp.asarray(blocks(8, 3))
SAME = jnp.linspace(0.5, 1.5, 24).reshape(4, 2, 3)


def on_four(body, *, check_vma=True):
    """Blocks of `[2, 3]`."""
    return jax.shard_map(
        body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
    )


# From `[4, 2, 3]`, gathered along dimension 0, to a sum over it. Weights tell the devices apart.
STAYS = {
    "stack before": lambda g: jnp.stack([g, SAME * g]).sum(1)[0],
    "stack after": lambda g: jnp.stack([g, 2 * g], 1).sum(0)[0],
    "split": lambda g: jnp.split(g, [1], 2)[1].sum(0),
    "concatenate with what is the same": lambda g: jnp.concatenate([g, SAME], 1).sum(0),
    "cumsum along rows": lambda g: (jnp.cumsum(g, 1) * SAME).sum(0),
    "cumprod along rows": lambda g: jnp.cumprod(g, 2).sum(0),
    "sort along rows": lambda g: (jnp.sort(g, 2) * SAME).sum(0),
    "argmax along rows": lambda g: g.argmax(2).sum(0),
    "flip of rows": lambda g: (jnp.flip(g, 1) * SAME).sum(0),
    "pad of rows": lambda g: jnp.pad(g, [(0, 0), (1, 0), (0, 0)], constant_values=2.0).sum(0),
    "product of rows": lambda g: (g.prod(1, keepdims=True) * SAME).sum(0),
    "all of a row": lambda g: (g > -1).all(2).sum(0),
    "max of a row": lambda g: g.max(2, keepdims=True).sum(0),
    "slice of rows": lambda g: g[:, 1:, ::2].sum(0),
    "dynamic slice of rows": lambda g: lax.dynamic_slice_in_dim(
        g, lax.psum(1, "i") - 3, 1, axis=1
    ).sum(0),
    "squeeze before": lambda g: lax.squeeze(g[None] * SAME, [0]).sum(0),
    "squeeze after": lambda g: (lax.squeeze(g[..., None], [3]) * SAME).sum(0),
    "moved and back": lambda g: (g.transpose(1, 2, 0).transpose(2, 0, 1) * SAME).sum(0),
    "reshape that splits rows": lambda g: (g.reshape(4, 3, 2) * SAME.reshape(4, 3, 2)).sum(0),
    "reshape that merges rows": lambda g: (g.reshape(4, 6) * SAME.reshape(4, 6)).sum(0)[None],
    "reshape that merges devices": lambda g: (g.reshape(8, 3) * SAME.reshape(8, 3)).sum(0)[None],
    "reshape to a vector": lambda g: (g.reshape(24) * SAME.reshape(24)).sum(0)[None],
    "broadcast": lambda g: (jnp.broadcast_to(g, (5, 4, 2, 3)) * SAME).sum((0, 1)),
    "size 1 among the others": lambda g: (g * SAME[:, :1] * SAME[:1]).sum(0),
    "size 1 in what is gathered": lambda g: (g[:, :1] * SAME).sum(0),
    "clip": lambda g: jnp.clip(g, -0.5, 0.5).sum(0),
    "where": lambda g: jnp.where(SAME > 1, g, 0).sum(0),
    "batched product": lambda g: (jnp.einsum("kab,kcb->kac", g, SAME) * SAME[:, :, :2]).sum(0),
    "batched product from the right": lambda g: jnp.einsum("kab,kcb->kac", SAME, g).sum(0),
    "free dimension of the right operand": lambda g: (
        jnp.einsum("xab,kab->xk", SAME[:2], g) * SAME[:2, :, 0].T[0].T[:, None]
    ).sum(1)[:, None],
    "contracted together with rows": lambda g: jnp.einsum("kab,kac->bc", g, SAME),
    "contracted with itself": lambda g: jnp.einsum("kab,kac->bc", g, jnp.sin(g)),
    "complex numbers": lambda g: (g * 1j * SAME).sum(0).imag,
}  # fmt: skip


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_what_stays_gathered(check_vma):
    """All in one program, since compiling takes most of the time; counted one by one."""

    def mapped(body):
        return on_four(lambda x: body(lax.all_gather(x, "i")), check_vma=check_vma)

    functions = {name: mapped(body) for name, body in STAYS.items()}
    counts = {name: count(rewritten_leaves(each), X) for name, each in functions.items()}
    assert counts == dict.fromkeys(STAYS, Count(reductions=1))

    wanted = jax.jit(lambda x: {name: each(x) for name, each in functions.items()})(X)
    found = jax.jit(lambda x: {n: rewritten_leaves(each)(x)[0] for n, each in functions.items()})(X)
    for name in STAYS:
        assert_close(found[name], wanted[name], 1e-6, name)


def test_products_of_low_precision_are_rounded_after_the_sum():
    def body(x):
        whole = lax.all_gather(x.astype(jnp.bfloat16), "i")
        return jnp.einsum("kab,k->ab", whole, jnp.ones(4, jnp.bfloat16))

    changed = jax.make_jaxpr(rewritten_leaves(on_four(body)))(X)
    (psum,) = [eqn for eqn in equations(changed) if eqn.primitive.name.startswith("psum")]
    assert psum.invars[0].aval.dtype == jnp.float32
    assert changed.out_avals[0].dtype == jnp.bfloat16


def test_a_gather_of_what_was_gathered_over_the_same_axis():
    """The first one is made, and the second deferred."""
    function = on_four(lambda x: lax.all_gather(lax.all_gather(x, "i"), "i").sum((0, 1)))
    plan = planned(function, X)

    assert count(plan.evaluate, X) == Count(gathers=1, reductions=1)
    assert lines(plan)[0].endswith("all_gather over 'i' of what was gathered over it")
    assert lines(plan)[1] == "rewritten: all_gather over 'i', reduce_sum: one psum"
    assert_close(jax.jit(plan.evaluate)(X)[0], jax.jit(function)(X), 1e-6)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            lambda x: lax.reshape(lax.all_gather(x, "i"), (8, 3), dimensions=(1, 0, 2)).sum(0),
            "reshape moves the gathered dimension",
        ),
        (
            lambda x: jnp.einsum(
                "kl,kl->", lax.all_gather(x[0, 0], "i")[:, None] * SAME[:, 0, 0],
                (lax.all_gather(x[0, 0], "i", tiled=False)[:, None] * SAME[:, 0, 0]).T,
            )[None],
            "dot_general pairs a gathered dimension with one that is not",
        ),
        (
            lambda x: lax.dynamic_slice_in_dim(
                lax.all_gather(x, "i"), lax.axis_index("i") % 2, 1, axis=1
            ).sum(0),
            "dynamic_slice mixes the gathered value with one that may differ between the devices "
            "of 'i'",
        ),
        (
            lambda x: jnp.pad(
                lax.all_gather(x, "i"), [(0, 0), (1, 0), (0, 0)], constant_values=x[0, 0]
            ).sum(0),
            "pad mixes the gathered value with one that may differ between the devices of 'i'",
        ),
        (
            lambda x: lax.dynamic_slice_in_dim(
                SAME, lax.all_gather(x[0, 0] > 0, "i")[0].astype(int), 1
            )[0],
            "slice of the gathered dimension",
        ),
    ],
    ids=["reshape", "pairs", "dynamic slice", "pad", "index"],
)  # fmt: skip
def test_what_does_not(body, why):
    plan = planned(on_four(body), X)
    assert plan.evaluate is None
    assert {finding.why for finding in plan.findings} == {why}


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_reduction_over_groups_is_refused_where_jax_has_none(check_vma):
    def body(x):
        return lax.all_gather(x, "i", axis_index_groups=[[0, 1], [2, 3]]).sum(0)

    function = jax.shard_map(
        body, mesh=mesh_of(i=4), in_specs=P("i"), out_specs=P("i"), check_vma=check_vma
    )

    np.testing.assert_allclose(jax_dist.rewrite(function)(X), function(X), rtol=1e-6)
    why = "JAX has no reduction over groups of devices under check_vma=True"
    assert any(why in line for line in lines(planned(function, X))) == check_vma


@pytest.mark.parametrize("collective", [lax.psum, lax.pmax])
@pytest.mark.parametrize("dimension", [0, 1])
def test_a_reduction_over_a_dimension_of_a_vmap_needs_the_whole_value(collective, dimension):
    """It takes a dimension away, which may be the gathered one; that is no part of its name."""

    def body(x):
        over_both = lambda y: collective(y, ("each", "j"))
        mapped = jax.vmap(over_both, in_axes=0, out_axes=None, axis_name="each")
        return mapped(lax.all_gather(x, "i", axis=dimension)).sum(0)[None]

    function = jax.shard_map(
        body, mesh=mesh_of(i=4, j=2), in_specs=P("i"), out_specs=P("i"), check_vma=False
    )
    plan = planned(function, X)

    assert plan.evaluate is None
    assert {finding.why for finding in plan.findings} == {
        f"{collective.__name__} over a dimension of a vmap, too"
    }
    np.testing.assert_allclose(jax_dist.rewrite(function)(X), function(X), rtol=1e-6)


def test_windows_of_two_arrays_need_both_whole():
    def body(x):
        whole = lax.all_gather(x, "i")
        pair = (whole, jnp.ones(whole.shape)), (0.0, 0.0)
        add = lambda a, b: (a[0] + b[0], a[1] + b[1])
        one, other = lax.reduce_window(*pair, add, (1, 1, 2), (1, 1, 1), "VALID")
        return (one * other).sum(0)

    function = on_four(body, check_vma=False)

    np.testing.assert_allclose(jax_dist.rewrite(function)(X), function(X), rtol=1e-6)
    assert [each.why for each in planned(function, X).findings] == [
        "reduce_window of the gathered dimension has no matching collective"
    ]


def test_windows_with_a_function_of_the_user_stay_gathered():
    def body(x):
        function = lambda a, b: a * b + 1
        whole = lax.all_gather(x, "i")
        return lax.reduce_window(whole, 1.0, function, (1, 1, 2), (1, 1, 1), "VALID").sum(0)

    assert lines(planned(on_four(body, check_vma=False), X)) == [
        "rewritten: all_gather over 'i', reduce_sum: one psum"
    ]


def test_what_the_pass_has_something_to_do_with():
    assert planned(on_four(lambda x: x * 2), X).findings == ()
    assert {"all_gather", "all_gather_invariant", "reduce_scatter"} == gathers.GATHERS
