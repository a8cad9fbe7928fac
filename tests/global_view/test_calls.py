"""Calls of a view: results, several states, and transforms around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from jax import lax
from jax.sharding import PartitionSpec as P
from steps import X, Y

import jax_dist
from jax_dist import global_view

_W = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
_X = np.random.default_rng(1).normal(size=(8, 4, 16)).astype(np.float32)


def test_results_are_as_pmap_gives_them():
    view = global_view(steps.adam, "i", out_axes=(0, {"loss": None, "own": 0}))

    _, metrics = view(steps.ADAM_STATE, X, Y)

    assert metrics["loss"].shape == ()
    assert len(set(metrics["own"].tolist())) == 8
    np.testing.assert_allclose(metrics["own"].mean(), metrics["loss"], rtol=1e-6)


def test_two_carried_arguments_and_a_static_one():
    def step(params, moment, x, rate):
        gradient = lax.pmean(jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params), "i")
        moment = moment / 2 + gradient
        return params - rate * moment, moment

    view = global_view(
        step, "i", state=(0, 1), in_axes=(None, None, 0, None), static_broadcasted_argnums=3,
        shardings="fsdp", donate_argnums=(0, 1),
    )  # fmt: skip
    pmapped = jax.pmap(step, "i", in_axes=(None, None, 0), static_broadcasted_argnums=3)
    wanted = _W, np.zeros_like(_W)
    placed = view.place(wanted)
    for rate in (0.5, 0.25):  # powers of two: one rounding or two is the same
        placed = view(*placed, _X, rate)
        wanted = jax.tree.map(lambda leaf: np.asarray(leaf[0]), pmapped(*wanted, _X, rate))

    for mine, other in zip(placed, wanted, strict=True):
        assert np.array_equal(mine, other)
        assert mine.sharding.spec == P(None, "i")


def _constrained(w, x):
    return lax.with_sharding_constraint(w, jax.NamedSharding(jax.make_mesh((8,), ("i",)), P())), x


@pytest.mark.parametrize(
    "step",
    [
        _constrained,
        lambda w, x: (w, jax.pmap(jnp.sin)(x)),
        lambda w, x: (w, jax_dist.pmap(jnp.sin)(x)),
    ],
)
def test_a_step_that_constrains_or_maps_is_an_error_with_its_line(step):
    with pytest.raises(NotImplementedError, match=r"at \S*test_calls.py:\d+, "):
        global_view(step, "i")(_W, _X[:, :1])


def _loss(w, x):
    step = lambda w, x: lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "i")
    return global_view(step, "i", state=None, in_axes=(None, 0), out_axes=None)(w, x)


def _loss_by_hand(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def _descend(w, x):
    return w - 0.5 * lax.pmean(jax.grad(_loss_by_hand)(w, x), "i")


def test_an_evaluation_takes_the_state_as_it_is_kept():
    w = global_view(_descend, "i", shardings="fsdp").place(_W)

    np.testing.assert_allclose(_loss(w, _X), _loss_by_hand(_W, _X), rtol=1e-6)


_TRANSFORMS = {
    "grad": lambda loss: jax.grad(loss)(_W, _X),
    "jit of grad": lambda loss: jax.jit(jax.grad(loss))(_W, _X),
    "grad of the batch": lambda loss: jax.grad(loss, 1)(_W, _X),
    "jvp": lambda loss: jax.jvp(lambda w: loss(w, _X), (_W,), (_W,)),
    "vmap": lambda loss: jax.vmap(loss, in_axes=(0, None))(np.stack([_W, 2 * _W, -_W]), _X),
}


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_it_is_transformed_from_outside(name):
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7)
    jax.tree.map(close, _TRANSFORMS[name](_loss), _TRANSFORMS[name](_loss_by_hand))


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [steps.one_by_one, steps.in_a_scan, steps.LOSSES["checkpoints"]])
def test_derivatives_from_outside_are_the_same_with_regather(loss):
    def of_state(*, regather: bool) -> np.ndarray:
        view = global_view(steps.with_loss(loss), "i", shardings="fsdp", regather=regather)
        return np.asarray(jax.grad(lambda w: jnp.sum(view(w, steps.ROWS)[1]))(steps.LAYERED))

    once, again = of_state(regather=False), of_state(regather=True)
    assert (once == again).all()
    assert np.any(once)


def test_it_stands_in_a_jitted_loop():
    view = global_view(_descend, "i", shardings="fsdp")
    wanted = view.place(_W)
    for _ in range(3):
        wanted = view(wanted, _X)

    ours = jax.jit(lambda w: lax.fori_loop(0, 3, lambda _, w: view(w, _X), w))(_W)
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_under_a_mesh_that_is_set(kind, named):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(kind,))
    step, state = steps.unsynchronized, steps.UNSYNCHRONIZED_STATE
    wanted = global_view(step, "i", shardings="fsdp")(state, steps.ROWS)

    with jax.set_mesh(mesh):
        view = global_view(step, "i", shardings="fsdp", mesh=mesh if named else None)
        placed = view.place(state)
        ours = view(placed, view.place_batch(steps.ROWS.reshape(32, 64)))

    jax.tree.map(np.testing.assert_array_equal, ours, wanted)
