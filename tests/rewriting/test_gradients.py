"""Gradients that JAX sums over devices under `check_vma=True`: which of them `explain` notes.

The loss is `mean(w * x)`, with `x` such that the right slope is 5.5; four devices make 22 of it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from observing import line_of, mesh_of

from jax_dist import explain
from jax_dist._rewrite.report import find_gradient_sums

_MESH = mesh_of(i=4)
_X = jnp.arange(12.0).reshape(4, 3)
_W = jnp.float32(2.0)
_SUMMED = "the gradient by a replicated value is summed over 'i'"


def _loss(w, x):
    return jnp.mean(w * x)


_grad = jax.grad(_loss)


def _sharded(body, **options):
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    return jax.shard_map(body, mesh=_MESH, **{**specs, **options})


def _notes(fun):
    return {finding.what for finding in find_gradient_sums(jax.make_jaxpr(fun)(_W, _X))}


def _varying(w):
    return lax.pcast(w, "i", to="varying")


def _through_scan(w, x):
    def loss(w):
        turn = lambda c, row: (c + jnp.mean(w * row), None)
        return lax.scan(turn, _varying(0.0), x)[0] / len(x)

    return jax.grad(loss)(w)


_WRONG = {
    "replicated argument": _grad,
    "vmap": lambda w, x: jax.vmap(_grad, (None, 0))(w, x).mean(),
    "jit": lambda w, x: jax.jit(jax.grad(lambda w: jax.jit(_loss)(w, x)))(w),
    "through a checkpoint": lambda w, x: jax.grad(jax.checkpoint(_loss))(w, x),
    "updated in a scan": lambda w, x: lax.scan(
        lambda c, _: (c - 0.0 * _grad(c, x), _grad(c, x)), w, None, length=2
    )[1][1],
    "through a scan": _through_scan,
    "summed again": lambda w, x: lax.psum(_grad(w, x), "i") / 4,
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_gradient_that_is_too_large_is_found_and_is_right_without_vma_types(name):
    wrong = _sharded(_WRONG[name])
    averaged = _sharded(lambda w, x: lax.pmean(_WRONG[name](w, x), "i"))
    right = _sharded(lambda w, x: lax.pmean(_WRONG[name](w, x), "i"), check_vma=False)
    in_a_branch = lambda w, x: lax.cond(w > 0, jax.jit(wrong), lambda w, x: w, w, x)

    for fun in (wrong, averaged, in_a_branch):
        assert float(jax.jit(fun)(_W, _X)) == pytest.approx(22.0)  # four times too large
        assert _notes(fun) == {_SUMMED}
    assert float(jax.jit(right)(_W, _X)) == pytest.approx(5.5)
    assert _notes(right) == set()


def _statistics_of_a_checkpoint(w, x):
    """As in batch norm: a mean over devices that is computed once more going backward."""
    loss = lambda w: w * jnp.mean(x) * lax.pmean(jnp.mean(x), "i") / 5.5
    return lax.pmean(jax.grad(jax.checkpoint(loss))(_varying(w)), "i")


def _global_loss_in(body):
    """Return the gradient of a mean over devices that is taken in a body."""

    def gradient(w, x):
        loss = body(lambda w: lax.pmean(_loss(w, x), "i"), x)
        return lax.pmean(jax.grad(lambda w: loss(_varying(w)))(w), "i")

    return gradient


def _branch(loss, x):
    return lambda w: lax.cond(jnp.sum(x) < -1, lambda w: jnp.float32(0), loss, w)


_RIGHT = {
    "pcast first": lambda w, x: lax.pmean(_grad(_varying(w), x), "i"),
    "mean of the loss": jax.grad(lambda w, x: lax.pmean(_loss(w, x), "i")),
    "sum of the loss": jax.grad(lambda w, x: lax.psum(_loss(w, x), "i") / 4),
    "mean of the loss, and of its gradient": lambda w, x: lax.pmean(
        jax.grad(lambda w: lax.pmean(w * jnp.mean(x), "i"))(w), "i"
    ),
    "by the batch": lambda w, x: (
        lax.pmean(jnp.mean(jax.grad(_loss, argnums=1)(w, x)), "i") * 0 + 5.5
    ),
    "forward mode": lambda w, x: lax.pmean(jax.jvp(lambda w: _loss(w, x), (w,), (1.0,))[1], "i"),
    "statistics of a checkpoint": _statistics_of_a_checkpoint,
    "a global loss in a jit": _global_loss_in(lambda loss, _: jax.jit(loss)),
    "a global loss in a branch": _global_loss_in(_branch),
}


@pytest.mark.parametrize("name", _RIGHT)
def test_a_right_gradient_is_no_finding(name):
    fun = _sharded(_RIGHT[name])

    assert float(jax.jit(fun)(_W, _X)) == pytest.approx(5.5)
    assert _notes(fun) == set()


def test_the_line_and_the_remedy_are_told():
    def body(w, x):
        return jax.grad(lambda w: jnp.mean(w * x))(w)

    (finding,) = [f for f in explain(_sharded(body), _W, _X).findings if f.code == "JXD303"]

    assert finding.where.endswith(f"test_gradients.py:{line_of(body, 1)}")
    assert "check_vma=False, take lax.pmean of the loss" in finding.why
