"""A state as pmap has it, `[N, *s]`, is taken where it can be shown what it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import global_view
from jax_dist.errors import ArgumentError

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


def test_a_stacked_state_gives_what_a_placed_one_gives():
    view, other = _view(), _view()
    expected, _ = other(other.place(_state()), _X)
    given = _stacked()
    placed = view.place(given, stacked=True)
    _same(view.first(placed), _state())
    state, _ = view(placed, _X)

    assert state["w"].sharding.spec == P("i")
    assert given["w"].shape == (8, 64, 32)  # the caller's is as it was
    _same(state, expected)
    again = view.place(view.stacked(state), stacked=True)
    _same(view(again, _X)[0], view(state, _X)[0])


def test_copies_that_drifted_apart_are_refused():
    given = _stacked()
    given["w"] = given["w"].at[5, 3, 3].add(2**-20)

    with pytest.raises(
        ArgumentError,
        match=r"state\['w'\] is replicated by the step, but other devices have other bits",
    ):
        _view().place(given, _X, stacked=True)


@pytest.mark.parametrize("jit", [lambda view: view, jax.jit], ids=["called", "in a jit"])
def test_a_stacked_state_is_to_be_placed_first(jit):
    view = _view()
    view.place(_state(), _X)

    with pytest.raises(ArgumentError, match=r"view.place\(state, stacked=True\)"):
        jit(view)(_stacked(), _X)


def test_a_state_that_is_not_stacked_as_said():
    with pytest.raises(ArgumentError, match=r"stacked over 8 devices, but state"):
        _view().place(_state(), stacked=True)


@pytest.mark.thorough
@pytest.mark.parametrize("placed", ["alone", "with its batch"])
@pytest.mark.parametrize("typed", [False, True])
def test_each_device_may_be_given_a_key_of_its_own(placed, *, typed: bool):
    """As `state.replicate()` does it in the examples of Transformers, for dropout."""

    def step(state, x):
        key, new = jax.random.split(state["key"])
        kept = x * jax.random.bernoulli(key, 0.5, x.shape)
        w = state["w"] - 0.25 * lax.pmean(jnp.mean(kept, (0, 1)), "i")
        return {"w": w, "key": new}, lax.pmean(kept.sum(), "i")

    keys = jax.random.split(jax.random.key(0), 8)
    wanted = {"w": jnp.zeros((8, 32)), "key": keys if typed else jax.random.key_data(keys)}
    wanted = jax.device_put(wanted, jax.NamedSharding(jax.make_mesh((8,), ("i",)), P("i")))
    view = global_view(step, "i", shardings=lambda path, leaf: P("i") if path == "w" else P())
    x = np.ones((8, 4, 2, 32), np.float32)
    batch = {"alone": (), "with its batch": (x,)}[placed]
    state = view.place(wanted, *batch, stacked=True)
    pmapped = jax.pmap(step, "i")
    for _ in range(2):
        wanted, sum_there = pmapped(wanted, x)
        state, sum_here = view(state, x)

    assert state["w"].sharding.spec == P("i")
    np.testing.assert_array_equal(state["w"], wanted["w"][0])
    data = [jax.random.key_data(each["key"]) if typed else each["key"] for each in (state, wanted)]
    np.testing.assert_array_equal(*data)
    np.testing.assert_array_equal(sum_here, sum_there)


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


# ---- states of which some leaves have a dimension for devices, and others have none


def _mixed():
    return {"w": np.ones((64, 32), np.float32), "own": np.arange(8, dtype=np.float32)}


@pytest.mark.parametrize("how", ["with the batch", "alone", "called", "traced"])
def test_a_leaf_that_may_have_a_value_for_each_device_is_asked_for(how):
    """It would become one of `[8, 8]`, each device with all values of all devices."""
    view = _view()

    def run():
        match how:
            case "with the batch":
                view.place(_mixed(), _X)
            case "alone":
                view(view.place(_mixed()), _X)
            case "called":
                view(_mixed(), _X)
            case "traced":
                jax.jit(view)(_mixed(), _X)

    with pytest.raises(ArgumentError) as told:
        run()
    assert "state['own']" in str(told.value)
    assert how == "traced" or "stacked=...)" in str(told.value)
    assert "test_stacked_states.py" in str(told.value)  # where it begins to vary


def test_a_tree_says_which_leaves_have_a_value_for_each_device():
    view, other = _view(), _view()
    said = {"w": False, "own": True}
    expected = other.place({**_state(), "own": np.float32(0)}, _X, stacked=False)
    expected["own"] = expected["own"] + np.arange(8, dtype=np.float32)

    state = view.place(_mixed(), _X, stacked=said)
    assert {name: leaf.shape for name, leaf in state.items()} == {"w": (64, 32), "own": (8,)}
    _same(view(state, _X)[0], other(expected, _X)[0])
    whole = view.place(_mixed(), _X, stacked=False)
    assert whole["own"].shape == (8, 8)


def test_the_state_of_another_view_is_taken_where_it_is_said_what_is_stacked():
    one, other = _view(), _view()
    state, _ = one(one.place(_state(), _X, stacked=False), _X)

    with pytest.raises(ArgumentError, match=r"stacked=\.\.\."):
        other(state, _X)
    placed = other.place(state, _X, stacked={"w": False, "own": True})
    _same(other(placed, _X)[0], one(state, _X)[0])


def test_trees_for_several_states():
    view = global_view(lambda w, own, x: _pair(*_step({"w": w, "own": own}, x)), "i", state=(0, 1))
    w, own = view.place((_mixed()["w"], _mixed()["own"]), _X, stacked=(False, True))
    assert (w.shape, own.shape) == ((64, 32), (8,))


def _pair(state, metric):
    return state["w"], state["own"], metric


def test_a_placed_state_can_be_placed_again():
    view = _view()
    state, _ = view(view.place(_state(), stacked=False), _X)

    for again in (state, jax.tree.map(np.asarray, state)):
        placed = view.place(again, _X)
        assert placed["own"].shape == (8,)
        _same(placed, state)


# ---- states from elsewhere


@pytest.mark.parametrize("device", [0, 5])
def test_what_varies_is_moved_from_another_device(device):
    view, other = _view(), _view()
    state = _state()
    expected = other(other.place(_state(), stacked=False), _X)
    state["own"] = jax.device_put(state["own"], jax.devices()[device])
    _same(view(state, _X), expected)

    elsewhere = jax.device_put(_state(), jax.devices()[device])
    _same(_view().place(elsewhere, _X), other.place(_state(), _X, stacked=False))
    with pytest.raises(ArgumentError, match="the global view keeps it as"):
        _view()(elsewhere, _X)


# ---- one state in several programs


def _sometimes(state, x, training):
    return _step(state, x)[0] if training else state


@pytest.mark.parametrize("turns", [[True, False, True], [False, True, False]])
def test_a_leaf_that_varies_in_one_branch_of_a_static_argument_does_in_all(turns):
    view = global_view(_sometimes, "i", shardings="fsdp", static_broadcasted_argnums=2)
    other = _view()
    state = view.place(_state(), _X, turns[0], stacked=False)
    expected = other.place(_state(), _X, stacked=False)
    x = _X * np.arange(8, dtype=np.float32).reshape(8, 1, 1)

    for training in turns:
        state = view(state, x, training)
        expected = other(expected, x)[0] if training else expected
        _same(view.first(state), other.first(expected))
    assert state["own"].shape == (8,)
    assert np.unique(state["own"]).size == 8
    assert view(state, x, turns[1])["own"].shape == (8,)


def test_a_scan_over_a_view():
    view = _view()
    state = view.place(_state(), _X, stacked=False)
    run = jax.jit(lambda state, xs: lax.scan(view, state, xs))
    last, sums = run(state, np.stack([_X, -_X]))

    first, one = view(state, _X)
    expected, two = view(first, -_X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), last, expected)
    np.testing.assert_array_equal(sums, np.stack([one, two]))
