"""Gradients that are summed over devices twice: found in hand-written code, and never made by us.

The data are such that the right slope is known: with the loss `mean(w * x)` over all 12 numbers of
`x`, it is their mean, 5.5. Four devices make 22 of it where the sum is made twice.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from observing import line_of, mesh_of

import jax_dist
from jax_dist import explain, rewrite
from jax_dist._rewrite.hazards import find_hazards

pytestmark = pytest.mark.rewriting

_MESH = mesh_of(i=4)
_X = jnp.arange(12.0).reshape(4, 3)
_W = jnp.float32(2.0)
_FOUND = ("noted", "a gradient is summed over 'i' a second time, and comes out too large")


def _loss(w, x):
    return jnp.mean(w * x)


def _sharded(body, **options):
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    return jax.shard_map(body, mesh=_MESH, **{**specs, **options})


def _told(fun):
    jaxpr = jax.make_jaxpr(fun)(_W, _X)
    return {(finding.outcome, finding.what) for finding in find_hazards(jaxpr)}


def _pmean_after(w, x):
    return lax.pmean(jax.grad(_loss)(w, x), "i")


def _psum_after(w, x):
    return lax.psum(jax.grad(_loss)(w, x), "i") / lax.axis_size("i")


def _in_a_jit(w, x):
    slope = jax.jit(jax.grad(_loss))(w, x)
    return jax.jit(lambda slope: lax.pmean(slope, "i"))(slope)


def _in_a_scan(w, x):
    def step(w, _):
        return w - 0.0 * lax.pmean(jax.grad(_loss)(w, x), "i"), None

    w, _ = lax.scan(step, w, None, length=2)
    return lax.scan(lambda c, _: (lax.pmean(jax.grad(_loss)(w, x), "i"), None), w, None, length=2)[
        0
    ]


def _through_a_remat(w, x):
    return lax.pmean(jax.grad(jax.checkpoint(lambda w: _loss(jnp.sin(w) * 0 + w, x)))(w), "i")


def _through_a_jit(w, x):
    inner = jax.jit(lambda w: jax.jit(lambda w: _loss(w, x))(w))
    return lax.pmean(jax.grad(inner)(w), "i")


def _through_a_scan(w, x):
    def loss(w):
        start = lax.pcast(0.0, "i", to="varying")
        return lax.scan(lambda c, row: (c + jnp.mean(w * row), None), start, x)[0] / len(x)

    return lax.pmean(jax.grad(loss)(w), "i")


def _through_a_cond(w, x):
    loss = lambda w: lax.cond(jnp.sum(x) > -1, lambda w: _loss(w, x), lambda w: jnp.sum(w * x), w)
    return lax.pmean(jax.grad(loss)(w), "i")


def _of_a_tree(w, x):
    slopes = jax.grad(lambda tree: _loss(tree["a"], x) + tree["b"].sum() * 0)({"a": w, "b": x})
    return jax.tree.map(lambda slope: lax.pmean(slope, "i"), slopes)["a"]


def _with_the_loss(w, x):
    loss, slope = jax.value_and_grad(_loss)(w, x)
    loss, slope = lax.pmean((loss, slope), "i")
    return slope + 0 * loss


def _clipped_and_scaled(w, x):
    slope = jax.grad(_loss)(w, x)
    return lax.pmean(jnp.clip(slope * 2, -100, 100).astype(jnp.float32) / 2, "i")


def _not_linear(w, x):
    return lax.pmean(jax.grad(lambda w: 3 / 92 * jnp.mean((w * x) ** 2))(w), "i")


def _after_a_loop(w, x):
    w = lax.while_loop(lambda v: v > w + 1, lambda v: v - 1, w)
    w, _ = lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] * 1, c[1] + 1), (w, 0))
    return lax.pmean(jax.grad(_loss)(w, x), "i")


def _out_of_a_loop(w, x):
    w = lax.stop_gradient(w)  # JAX derives no loop of this kind backward
    turn = lambda c: (jax.grad(_loss)(w, x), c[1] + 1)
    return lax.pmean(lax.while_loop(lambda c: c[1] < 2, turn, (w, 0))[0], "i")


def _chosen(w, x):
    slope = jax.grad(_loss)(w, x)
    return lax.pmean(lax.cond(w > 0, lambda slope: slope, jnp.zeros_like, slope), "i")


def _beside_another_result(w, x):
    """Of the two cotangents, the sum is of the first one."""
    both = jax.jit(lambda w, v: (_loss(w, x), v * 2))
    slope, _ = jax.grad(lambda w, v: sum(both(w, v)), (0, 1))(w, lax.pcast(1.0, "i", to="varying"))
    return lax.pmean(slope, "i")


def _through_one_branch(w, x):
    zero = lambda w: lax.pcast(0.0, "i", to="varying")
    loss = lambda w: lax.cond(jnp.sum(x) > -1, lambda w: _loss(w, x), zero, w)
    return lax.pmean(jax.grad(lambda w: loss(lax.pcast(w, "i", to="varying")))(w), "i")


_DOUBLED = {
    "pmean": _pmean_after,
    "psum": _psum_after,
    "in a jit": _in_a_jit,
    "in a scan": _in_a_scan,
    "through a remat": _through_a_remat,
    "through a jit": _through_a_jit,
    "through a scan": _through_a_scan,
    "through a cond": _through_a_cond,
    "a tree": _of_a_tree,
    "with the loss": _with_the_loss,
    "scaled on the way": _clipped_and_scaled,
    "not linear": _not_linear,
    "after a loop": _after_a_loop,
    "out of a loop": _out_of_a_loop,
    "chosen": _chosen,
    "beside another result": _beside_another_result,
    "through one branch": _through_one_branch,
}


_WAYS = {
    "neg": lambda s: -s,
    "add": lambda s: s + 1,
    "sub": lambda s: s - 1,
    "mul": lambda s: s * 2,
    "div": lambda s: s / 2,
    "reshape": lambda s: lax.reshape(lax.broadcast_in_dim(s, (2, 1), ()), (2,)),
    "squeeze": lambda s: lax.squeeze(lax.broadcast_in_dim(s, (2, 1), ()), (1,)),
    "transpose": lambda s: lax.transpose(lax.broadcast_in_dim(s, (2, 1), ()), (1, 0)),
    "select": lambda s: jnp.where(s > 0, s, 0.0),
    "copy": jnp.copy,
    "max": lambda s: lax.max(s, 0.0),
    "min": lambda s: lax.min(s, 9.0),
    "clamp": lambda s: lax.clamp(0.0, s, 9.0),
    "cast": lambda s: s.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", _WAYS)
def test_a_gradient_is_followed_through(name):
    assert _told(_sharded(lambda w, x: lax.pmean(_WAYS[name](jax.grad(_loss)(w, x)), "i"))) == {
        _FOUND
    }


def test_what_is_made_of_a_gradient_is_none():
    """Whether the mean of a root was meant, nobody knows."""
    assert _told(_sharded(lambda w, x: lax.pmean(lax.sqrt(jax.grad(_loss)(w, x)), "i"))) == set()


@pytest.mark.parametrize("name", _DOUBLED)
def test_a_doubled_gradient_is_found(name):
    fun = _sharded(_DOUBLED[name])

    assert float(jax.jit(fun)(_W, _X)) == pytest.approx(22.0)  # four times too large
    assert _told(fun) == {_FOUND}


def test_the_line_and_the_reason_are_told():
    (found,) = [f for f in explain(_sharded(_pmean_after), _W, _X).findings if f.code == "JXD303"]

    assert found.where.endswith(f"test_gradients.py:{line_of(_pmean_after, 1)}")
    assert found.why == (
        "under check_vma=True, JAX sums the gradient by a value that all devices share; say "
        "check_vma=False, or pcast the value to varying before the gradient"
    )


@pytest.mark.parametrize("around", ["jit", "scan", "cond", "grad"])
def test_it_is_found_wherever_the_shard_map_stands(around):
    fun = _sharded(_pmean_after)
    programs = {
        "jit": jax.jit(jax.jit(fun)),
        "scan": lambda w, x: lax.scan(lambda c, _: (fun(c, x), None), w, None, length=2)[0],
        "cond": lambda w, x: lax.cond(w > 0, fun, lambda w, x: w, w, x),
        "grad": jax.grad(lambda w, x: fun(w, x) * w),
    }

    assert _told(programs[around]) == {_FOUND}


def _as_advised(w, x):
    w = lax.pcast(w, "i", to="varying")
    return lax.pmean(jax.grad(_loss)(w, x), "i")


def _left_alone(w, x):
    return jax.grad(_loss)(w, x) / lax.axis_size("i")


def _of_the_global_loss(w, x):
    return jax.grad(lambda w: lax.pmean(_loss(w, x), "i"))(w)


def _loss_is_averaged(w, x):
    loss, slope = jax.value_and_grad(_loss)(w, x)
    return slope / lax.axis_size("i") + 0 * lax.pmean(loss, "i")


def _by_the_batch(w, x):
    slope = jax.grad(_loss, argnums=1)(w, x)  # varies: nothing was summed
    return lax.pmean(jnp.mean(slope), "i") * 0 + 5.5


def _mean_of_means(w, x):
    return lax.pmean(lax.pmean(jnp.mean(x), "i"), "i") + 0 * w


def _statistics_of_a_remat(w, x):
    """As in batch norm: a mean over devices that the remat computes once more, going backward."""

    def loss(w):
        mean = lax.pmean(jnp.mean(x), "i")
        return w * jnp.mean(x) * mean / 5.5

    return lax.pmean(jax.grad(jax.checkpoint(loss))(lax.pcast(w, "i", to="varying")), "i")


def _statistics_of_what_a_remat_takes(w, x):
    own = jnp.mean(x)
    loss = jax.checkpoint(lambda w, own: w * own * lax.pmean(own, "i") / 5.5)
    return lax.pmean(jax.grad(loss)(lax.pcast(w, "i", to="varying"), own), "i")


def _slope_of_a_slope(w, x):
    """JAX sums here once for each of the two derivatives."""
    mean = jnp.mean(x)  # 1, 4, 7 and 10: the sum of their squares is 166
    slope = jax.grad(lambda w: (w * mean) ** 2 / 2)  # 166 * w
    return jax.grad(lambda w: slope(w) * slope(w))(w) * 5.5 / (2 * 166 * 166 * 2.0)


def _averaged_of_the_global_loss(w, x):
    """The second mean is one too many, but changes nothing."""
    return lax.pmean(jax.grad(lambda w: lax.pmean(w * jnp.mean(x), "i"))(w), "i")


def _averaged_of_a_global_loss_in_a_jit(w, x):
    loss = jax.jit(lambda w: lax.pmean(_loss(w, x), "i"))
    return lax.pmean(jax.grad(lambda w: loss(lax.pcast(w, "i", to="varying")))(w), "i")


def _averaged_of_a_global_loss_in_a_branch(w, x):
    whole = lambda w: lax.pmean(_loss(w, x), "i")
    loss = lambda w: lax.cond(jnp.sum(x) < -1, lambda w: jnp.float32(0), whole, w)
    return lax.pmean(jax.grad(lambda w: loss(lax.pcast(w, "i", to="varying")))(w), "i")


_RIGHT = {
    "statistics of a remat": _statistics_of_a_remat,
    "statistics of what a remat takes": _statistics_of_what_a_remat_takes,
    "averaged, of a global loss in a jit": _averaged_of_a_global_loss_in_a_jit,
    "averaged, of a global loss in a branch": _averaged_of_a_global_loss_in_a_branch,
    "slope of a slope": _slope_of_a_slope,
    "averaged, of the global loss": _averaged_of_the_global_loss,
    "pcast first": _as_advised,
    "left alone": _left_alone,
    "of the global loss": _of_the_global_loss,
    "the loss is averaged": _loss_is_averaged,
    "by the batch": _by_the_batch,
    "a mean of a mean": _mean_of_means,
}


@pytest.mark.parametrize("name", _RIGHT)
def test_what_is_right_is_left_in_peace(name):
    fun = _sharded(_RIGHT[name])

    assert float(jax.jit(fun)(_W, _X)) == pytest.approx(5.5)
    assert _told(fun) == set()


@pytest.mark.parametrize("name", [*_DOUBLED, "averaged, of the global loss"])
def test_without_vma_types_all_of_them_are_right(name):
    """What pmap does: JAX sums nothing by itself."""
    fun = _sharded({**_DOUBLED, **_RIGHT}[name], check_vma=False)

    assert float(jax.jit(fun)(_W, _X)) == pytest.approx(5.5)
    assert _told(fun) == set()


# ---- what we emit


@pytest.mark.parametrize(
    ("pmap", "mesh"),
    [(jax.pmap, mesh_of(data=4, model=2)), (jax_dist.pmap, None)],
    ids=["jax.pmap, 4x2", "jax_dist.pmap"],
)
@pytest.mark.parametrize("name", _DOUBLED)
def test_the_rewriting_never_makes_one(name, pmap, mesh):
    mapped = pmap(_DOUBLED[name], "i", in_axes=(None, 0), out_axes=None)
    rewritten = rewrite(lambda w, x: mapped(w, x), mesh=mesh)

    assert float(rewritten(_W, _X)) == pytest.approx(5.5)
    slope = jax.jit(jax.grad(mapped))(_W, _X)
    assert float(jax.jit(jax.grad(rewritten))(_W, _X)) == pytest.approx(float(slope))
    assert _told(rewritten) == set()


def test_a_gather_that_is_reduced_keeps_the_gradient():
    """The reduction in the place of the gather is typed as varying; else this would be 22."""

    def body(w, x):
        slope = jax.grad(lambda w: jnp.mean(lax.all_gather(w * jnp.mean(x), "i")))
        return lax.pmean(slope(lax.pcast(w, "i", to="varying")), "i") * lax.axis_size("i") / 4

    fun = _sharded(body)
    assert float(rewrite(fun)(_W, _X)) == pytest.approx(float(jax.jit(fun)(_W, _X)))
    shared = functools.partial(_sharded, out_specs=P("i"))
    outside = shared(lambda w, x: (w - jnp.mean(lax.all_gather(w * x, "i"), 0)) ** 2)
    loss = lambda f: lambda w: jnp.sum(f(w, _X))
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss(rewrite(outside))))(_W),
        jax.jit(jax.grad(loss(outside)))(_W),
        rtol=1e-5,
    )
