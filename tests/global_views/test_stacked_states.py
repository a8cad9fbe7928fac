"""A state as pmap has it, `[N, *s]`, is taken where it can be shown what it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import global_view
from jax_dist.errors import PlacementError

pytestmark = pytest.mark.rewriting

_X = np.random.default_rng(1).normal(size=(8, 4, 64)).astype(np.float32)


def _step(state, x):
    grads = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"]), "i")
    return {"w": state["w"] - 0.125 * grads, "own": state["own"] + x.mean()}, jnp.sum(x)


def _state():
    return {"w": np.ones((64, 32), np.float32), "own": np.float32(0)}


def _stacked():
    return jax_dist.device_put_replicated(_state(), jax.local_devices())


def _view():
    return global_view(_step, "i", shardings="fsdp")


def _same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("placed", [False, True])
def test_a_stacked_state_gives_what_a_placed_one_gives(*, placed: bool):
    view, other = _view(), _view()
    expected, _ = other(other.place(_state(), stacked=False), _X)
    if placed:
        view.place(_state(), stacked=False)
    given = _stacked()
    state, _ = view(given, _X)

    assert state["w"].sharding.spec == P("i")
    assert given["w"].shape == (8, 64, 32)  # the caller's is as it was
    _same(state, expected)
    _same(view.first(given), _state())
    _same(view(view.stacked(state), _X)[0], view(state, _X)[0])


def test_copies_that_drifted_apart_are_refused():
    view = _view()
    given = _stacked()
    given["w"] = given["w"].at[5, 3, 3].add(2**-20)

    with pytest.raises(PlacementError, match=r"state\['w'\]: other devices have other bits"):
        view(given, _X)


def test_what_may_be_stacked_or_not_is_asked_for():
    view = global_view(lambda w, x: (w - lax.pmean(jnp.mean(x), "i"), x), "i")
    batch = np.ones((8, 2), np.float32)

    with pytest.raises(PlacementError, match="may be one for each device, or may not"):
        view(np.ones((8, 4), np.float32), batch)
    assert view(view.place(np.ones((8, 4), np.float32), stacked=False), batch)[0].shape == (8, 4)


def test_on_one_device_a_row_is_not_taken_for_a_slice():
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
    view = global_view(lambda w, x: (w - lax.pmean(jnp.mean(x), "i"), x), "i", mesh=mesh)
    row, batch = jnp.ones((1, 4)), np.ones((1, 2), np.float32)

    with pytest.raises(PlacementError, match="may be one for each device, or may not"):
        view(row, batch)
    state = jax.device_put(row, jax.NamedSharding(mesh, P("i")))
    assert view(state, batch)[0].shape == (4,)


def test_within_a_trace_the_slices_cannot_be_compared():
    view = _view()
    view.place(_state(), stacked=False)

    with pytest.raises(PlacementError, match="given inside a traced function"):
        jax.jit(view)(_stacked(), _X)


def test_reads_before_anything_is_placed():
    given = _stacked()

    _same(_view().first(given), _state())
    _same(_view().stacked(given), given)
    assert _view().stacked(_state())["w"].shape == (8, 64, 32)


def test_parts_of_the_same_shape_are_told_apart_by_where_they_lie():
    def step(state, x):
        mean = lax.pmean(x.mean((0, 1)), "i")
        return {"row": state["row"] + mean, "own": state["own"] + x.mean()}, x

    view = global_view(step, "i", shardings="fsdp")
    state = view.place({"row": np.zeros(8, np.float32), "own": np.float32(0)})
    state, _ = view(state, _X.reshape(8, 4, 8, 8))

    assert view.first(state["row"]).shape == view.stacked(state["own"]).shape == (8,)
    assert view.first(state["own"]).shape == ()
    np.testing.assert_array_equal(view.stacked(state["row"])[3], state["row"])


@pytest.mark.parametrize("shardings", ["replicated", "fsdp"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_placed_state_shares_no_memory_with_what_was_given(
    shardings, stacked, on_device, shared_ones
):
    lead = (8,) if stacked else ()
    view = global_view(_step, "i", shardings=shardings)
    own = {"w": shared_ones((*lead, 64, 32)), "own": shared_ones((*lead, 1))}
    if on_device:
        own = jax.tree.map(jnp.asarray, own)

    state = view.place(own, _X, stacked=stacked)
    if not on_device:
        own["w"][:], own["own"][:] = 7, 7
        assert max(np.asarray(leaf).max() for leaf in jax.tree.leaves(state)) == 1
    jax.tree.map(lambda leaf: leaf.delete(), state)

    assert np.asarray(own["w"]).min() == np.asarray(own["own"]).min() == (1 if on_device else 7)
