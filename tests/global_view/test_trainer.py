"""A flax trainer whose batch norm is not synchronised, and transforms around a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")
train_state = pytest.importorskip("flax.training.train_state")


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.relu(x).reshape((x.shape[0], -1))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(16)(x)


class _State(train_state.TrainState):
    batch_stats: dict


def _state():
    model = _Net()
    variables = model.init({"params": jax.random.key(0)}, jnp.ones((1, 4, 4, 3)), train=False)
    return _State.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adamw(1e-3),
    )


def _train_step(state, batch, rng):
    rng = jax.random.fold_in(rng, state.step)

    def loss_of(params):
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": rng},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new

    (loss, new), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    gradient = lax.pmean(gradient, "batch")
    state = state.apply_gradients(grads=gradient, batch_stats=new["batch_stats"])
    return state, {"loss": lax.pmean(loss, "batch")}


def _batch():
    random = np.random.default_rng(0)
    image = random.normal(size=(8, 4, 4, 4, 3)).astype(np.float32)
    rngs = jax.random.split(jax.random.key(1), 8)
    return {"image": image, "label": random.integers(0, 16, (8, 4)).astype(np.int32)}, rngs


@pytest.mark.thorough
@pytest.mark.parametrize("gradients", ["scatter", pytest.param("reduce", marks=pytest.mark.slow)])
def test_a_flax_trainer_has_the_numbers_of_pmap(gradients):
    view, state = compare(
        _train_step,
        _state(),
        *_batch(),
        times=2,
        axis_name="batch",
        shardings="fsdp",
        gradients=gradients,
    )

    varying = [leaf.path for leaf in view.report().leaves if not leaf.uniform]
    assert varying == [f"state.batch_stats['BatchNorm_0']['{name}']" for name in ("mean", "var")]
    assert state.batch_stats["BatchNorm_0"]["mean"].shape == (8, 8)
    assert state.params["Dense_0"]["kernel"].sharding.spec == P("batch")
    assert view.report().bytes_per_device < 0.25 * view.report().bytes_under_pmap


def _loss_step(w, x):
    return lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "i")


_W = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
_X = np.random.default_rng(1).normal(size=(8, 4, 16)).astype(np.float32)


def _loss(w, x):
    return global_view(_loss_step, "i", state=None, in_axes=(None, 0), out_axes=None)(w, x)


def _loss_by_hand(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_it_is_differentiated_from_outside():
    for ours, wanted in (
        (jax.grad(_loss)(_W, _X), jax.grad(_loss_by_hand)(_W, _X)),
        (jax.jit(jax.grad(_loss))(_W, _X), jax.grad(_loss_by_hand)(_W, _X)),
        (
            jax.jvp(lambda w: _loss(w, _X), (_W,), (_W,)),
            jax.jvp(lambda w: _loss_by_hand(w, _X), (_W,), (_W,)),
        ),
        (jax.grad(_loss, 1)(_W, _X), jax.grad(_loss_by_hand, 1)(_W, _X)),
    ):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7), ours, wanted
        )


def test_it_is_mapped_from_outside():
    many = np.stack([_W, 2 * _W, -_W])

    ours = jax.vmap(_loss, in_axes=(0, None))(many, _X)

    np.testing.assert_allclose(ours, [_loss_by_hand(w, _X) for w in many], rtol=1e-5)


def test_it_stands_in_a_jitted_loop():
    view = global_view(
        lambda w, x: w - 0.5 * lax.pmean(jax.grad(_loss_by_hand)(w, x), "i"), "i", shardings="fsdp"
    )
    wanted = view.place(_W)
    for _ in range(3):
        wanted = view(wanted, _X)

    ours = jax.jit(lambda w: lax.fori_loop(0, 3, lambda _, w: view(w, _X), w))(_W)

    np.testing.assert_allclose(ours, wanted, rtol=1e-5)


def test_a_value_of_a_trace_outside_is_not_kept():
    @jax.jit
    def outer(scale, w):
        return global_view(lambda w, x: w - scale * lax.pmean(x.sum(), "i"), "i")(w, _X)

    first, second = outer(1.0, _W), outer(2.0, _W)

    np.testing.assert_allclose(first - _W, (second - _W) / 2, rtol=1e-3, atol=1e-4)


def test_one_view_takes_values_of_two_traces():
    factor = [1.0]
    view = global_view(lambda w, x: w * factor[0] + lax.pmean(x.sum(), "i"), "i")

    def outer(scale, w):
        factor[0] = scale
        return view(w, _X)

    first, second = jax.jit(outer)(1.0, _W), jax.jit(outer)(3.0, _W)

    np.testing.assert_allclose(second - first, 2 * _W, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_under_a_mesh_that_is_set(kind):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(kind,))
    step = lambda w, x: w - 0.5 * lax.pmean(jax.grad(_loss_by_hand)(w, x), "i")
    wanted = global_view(step, "i", shardings="fsdp")(_W, _X)

    with jax.set_mesh(mesh):
        view = global_view(step, "i", shardings="fsdp", mesh=mesh)
        ours = view(view.place(_W), view.place_batch(_X.reshape(32, 16)))

    assert np.array_equal(ours, wanted)
