"""State of a view: leaves that vary, what place takes, and its errors."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare, stacked
from jax import lax
from jax.sharding import PartitionSpec as P
from steps import UNSYNCHRONIZED_STATE, unsynchronized

from jax_dist import global_view
from jax_dist.errors import ArgumentError
from tests.array_classes import Counter

_X = np.random.default_rng(0).normal(size=(8, 4, 64)).astype(np.float32)
_W = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)


def _line(function, text: str) -> str:
    """Where a line with this text stands in a function: "12 (", as messages have it."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return f"{first + place} ("


def _step(state, x):
    grads = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"]), "i")
    return {"w": state["w"] - 0.125 * grads, "own": state["own"] + x.mean()}, jnp.sum(x)


_STATE = {"w": np.ones((64, 32), np.float32), "own": np.float32(0)}
_MIXED = {"w": np.ones((64, 32), np.float32), "own": np.arange(8, dtype=np.float32)}


def _view():
    return global_view(_step, "i", shardings="fsdp")


def _same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_state_placed_alone_is_completed_by_the_first_call():
    view = global_view(unsynchronized, "i", shardings="fsdp", donate_argnums=0)

    state = view.place(UNSYNCHRONIZED_STATE)
    assert state["mean"].shape == (64,)
    for _ in range(3):
        state = view(state, _X)

    mean, w = view.report().leaves
    assert (mean.path, mean.uniform, state["mean"].shape) == ("state['mean']", False, (8, 64))
    assert (w.path, w.uniform, state["w"].shape) == ("state['w']", True, (64, 64))
    assert _line(unsynchronized, "return") not in str(mean.origin)
    assert _line(unsynchronized, "never averaged") in str(mean.origin)
    assert view._programs.last.jitted._cache_size() == 1
    assert view.shardings["w"].spec == P("i")
    assert view.types["mean"].shape == (8, 64)


def test_two_states_of_other_structures_take_turns():
    def step(state, x):
        return {"own": state["own"] + x.mean(), **{n: state[n] for n in state if n != "own"}}

    view = global_view(step, "i")
    small, large = {"own": np.float32(0)}, {"own": np.float32(0), "w": np.ones(3, np.float32)}
    for _ in range(3):
        small, large = view(small, _X), view(large, _X)
        assert view.types.keys() == large.keys()

    total = sum([_X.mean((1, 2))] * 3)
    np.testing.assert_allclose(small["own"], total, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(small["own"], large["own"])


def test_a_state_may_have_classes_that_make_arrays_of_numbers():
    step = lambda counter, x: (Counter(counter.low + 1), x.sum())
    view = global_view(step, "i", shardings="fsdp")
    for state in (view.place(Counter(3)), view.place(Counter(jnp.full(8, 3)), stacked=True)):
        for _ in range(2):
            state, _ = view(state, _X)

        assert state.low == 5


def test_what_varies_makes_others_vary_in_the_next_round():
    """`a` varies by the batch, `b` by `a`, `c` by `b`; `d` is averaged, and stays."""

    def step(state, x):
        a, b, c, d = (state[name] for name in "abcd")
        return {"a": a + jnp.mean(x), "b": b + a, "c": c + b, "d": d + lax.pmean(c, "i")}

    view = compare(step, dict.fromkeys("abcd", np.float32(0)), _X, times=4)
    assert [leaf.uniform for leaf in view.report().leaves] == [False, False, False, True]


@pytest.mark.parametrize("turns", [[True, False, True], [False, True, False]])
def test_a_leaf_that_varies_in_one_branch_of_a_static_argument_does_in_all(turns):
    sometimes = lambda state, x, training: _step(state, x)[0] if training else state
    view = global_view(sometimes, "i", shardings="fsdp", static_broadcasted_argnums=2)
    other = _view()
    state = view.place(_STATE, _X, turns[0], stacked=False)
    expected = other.place(_STATE, _X, stacked=False)
    x = _X * np.arange(8, dtype=np.float32).reshape(8, 1, 1)

    for training in turns:
        state = view(state, x, training)
        expected = other(expected, x)[0] if training else expected
        _same(state["w"], expected["w"])
    assert state["own"].shape == (8,)
    assert np.unique(state["own"]).size == 8
    assert view(state, x, turns[1])["own"].shape == (8,)


def _skipping(w, x):
    gradient = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "i")
    return jnp.where(jnp.isfinite(x).all(), w - 0.5 * gradient, w)  # decided alone


def _unknown(w, x):
    return w - lax.pmean(x.mean(), "i") + lax.rng_uniform(0.0, 1.0, w.shape)


def _with_loss(w, x):
    loss = jnp.mean((x @ w) ** 2)
    return w - lax.pmean(jnp.mean(x), "i"), loss * 1


_LAST = {"shardings": lambda path, leaf: P(*[None] * (leaf.ndim - 1), "i")}
_VARYING = {  # what the error says; after "# ", a comment of the line that it names
    "decided alone": (_skipping, _W, {"shardings": "fsdp"},
        ["Leaves of the state of '_skipping' cannot", "# decided alone", "pmean"]),
    "never averaged": (unsynchronized, UNSYNCHRONIZED_STATE, _LAST,
        ["state['mean']", "each device has others", "# never averaged"]),
    "unknown operation": (_unknown, _W, _LAST, ["(rng_uniform)"]),
    "result": (_with_loss, _W, {"out_axes": (0, None)}, ["out_axes=None", "test_states.py:"]),
}  # fmt: skip


@pytest.mark.parametrize("name", _VARYING)
def test_what_varies_and_should_not_is_an_error_with_its_line(name):
    step, state, options, texts = _VARYING[name]
    with pytest.raises(ArgumentError) as raised:
        global_view(step, "i", **options)(state, _X)

    for text in texts:
        assert (_line(step, text) if text.startswith("# ") else text) in str(raised.value)


def test_a_leaf_that_varies_and_was_to_be_sharded_is_named_with_bytes_and_line():
    def step(state, x):
        new = state["w"] - lax.pmean(jnp.mean(x), "i")
        last = jnp.where(x[0, 0] > 0, new, state["last"])  # of one device
        return {"w": new, "last": last, "mean": state["mean"] + x.mean(0)}

    state = {"w": _W, "last": _W, "mean": np.zeros(64, np.float32)}
    view = global_view(step, "i", shardings="fsdp")
    with pytest.warns(UserWarning, match="cannot be sharded, for each device has others") as warned:
        placed = view.place(state, _X, stacked=False)
    view(placed, _X)

    (text,) = [str(warning.message) for warning in warned]
    assert "state['last'], 16.4 kB per device" in text
    assert _line(step, "of one device") in text
    assert "state['mean']" not in text  # too small to be sharded
    global_view(step, "i")(state, _X)  # nothing was to be sharded


def test_a_stacked_state_gives_what_a_placed_one_gives():
    view, other = _view(), _view()
    expected, _ = other(other.place(_STATE), _X)
    original = jax.tree.map(jnp.asarray, stacked(_STATE))
    placed = view.place(original, stacked=True)
    _same(placed, _STATE)
    state, _ = view(placed, _X)

    assert state["w"].sharding.spec == P("i")
    assert original["w"].shape == (8, 64, 32)  # the caller's is as it was
    _same(state, expected)
    for placed_before in (state, jax.tree.map(np.asarray, state)):
        _same(view.place(placed_before, _X), state)


def test_the_state_of_pmap_goes_on_from_there():
    state = jax.pmap(unsynchronized, axis_name="i")(stacked(UNSYNCHRONIZED_STATE), _X)
    assert not (state["mean"][0] == state["mean"][1]).all()

    compare(unsynchronized, state, _X, slices=True, shardings="fsdp", gradients="reduce")


def _call_after_place(call, state):
    view = _view()
    view.place(_STATE, _X)
    return call(view)(state, _X)


_STACKED = stacked(_STATE)
_DRIFTED = {**_STACKED, "w": _STACKED["w"].at[5, 3, 3].add(2**-20)}
_MISPLACED = {
    "drifted": (lambda: _view().place(_DRIFTED, _X, stacked=True), "place (its copies differ)"),
    "not stacked": (lambda: _view().place(_STATE, stacked=True), "stacked over 8 devices, but"),
    "stacked": (lambda: _call_after_place(lambda view: view, _STACKED), "state, stacked=True)"),
    "stacked, traced": (lambda: _call_after_place(jax.jit, _STACKED), "state, stacked=True)"),
    # It would become one of `[8, 8]`, each device with all values of all devices.
    "either": (lambda: _view().place(_MIXED, _X), "stacked=...)"),
    "either, alone": (lambda: _view()(_view().place(_MIXED), _X), "stacked=...)"),
    "either, called": (lambda: _view()(_MIXED, _X), "stacked=...)"),
    "either, traced": (lambda: jax.jit(_view())(_MIXED, _X), "test_states.py"),
    "elsewhere": (
        lambda: _view()(jax.device_put(_STATE, jax.devices()[5]), _X),
        "view keeps it as",
    ),
}


@pytest.mark.parametrize("name", _MISPLACED)
def test_a_state_in_another_form_is_an_error_with_its_remedy(name):
    run, text = _MISPLACED[name]
    with pytest.raises(ArgumentError) as raised:
        run()
    assert text in str(raised.value)


def test_a_tree_says_which_leaves_have_a_value_for_each_device():
    view, other = _view(), _view()
    expected = other.place(_STATE, _X, stacked=False)
    expected["own"] = expected["own"] + np.arange(8, dtype=np.float32)

    flags = {"w": False, "own": True}
    state = view.place(_MIXED, _X, stacked=flags)
    assert {name: leaf.shape for name, leaf in state.items()} == {"w": (64, 32), "own": (8,)}
    _same(view(state, _X)[0], other(expected, _X)[0])
    assert view.place(_MIXED, _X, stacked=False)["own"].shape == (8, 8)

    def pair(w, own, x):
        new, metric = _step({"w": w, "own": own}, x)
        return new["w"], new["own"], metric

    view = global_view(pair, "i", state=(0, 1))
    w, own = view.place((_MIXED["w"], _MIXED["own"]), _X, stacked=(False, True))
    assert (w.shape, own.shape) == ((64, 32), (8,))


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [(), (np.ones((8, 4, 2, 32), np.float32),)])
@pytest.mark.parametrize("typed", [False, True])
def test_each_device_may_be_given_a_key_of_its_own(batch, *, typed: bool):
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
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_placed_state_shares_no_memory_with_what_was_given(
    shardings, is_stacked, on_device, shared_ones
):
    lead = (8,) if is_stacked else ()
    view = global_view(_step, "i", shardings=shardings)
    original = {"w": shared_ones((*lead, 64, 32)), "own": shared_ones((*lead, 1))}
    if on_device:
        original = jax.tree.map(jnp.asarray, original)

    state = view.place(original, _X, stacked=is_stacked)
    if not on_device:
        original["w"][:], original["own"][:] = 7, 7
        assert max(np.asarray(leaf).max() for leaf in jax.tree.leaves(state)) == 1
    jax.tree.map(lambda leaf: leaf.delete(), state)

    smallest = np.asarray(original["w"]).min(), np.asarray(original["own"]).min()
    assert smallest == ((1, 1) if on_device else (7, 7))


@pytest.mark.parametrize("device", [0, 5])
def test_what_varies_is_moved_from_another_device(device):
    view, other = _view(), _view()
    expected = other(other.place(_STATE, stacked=False), _X)
    state = {**_STATE, "own": jax.device_put(_STATE["own"], jax.devices()[device])}
    _same(view(state, _X), expected)

    elsewhere = jax.device_put(_STATE, jax.devices()[device])
    _same(_view().place(elsewhere, _X), other.place(_STATE, _X, stacked=False))


def test_a_scan_over_a_view():
    view = _view()
    state = view.place(_STATE, _X, stacked=False)
    last, sums = jax.jit(lambda state, xs: lax.scan(view, state, xs))(state, np.stack([_X, -_X]))

    first, one = view(state, _X)
    expected, two = view(first, -_X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), last, expected)
    np.testing.assert_array_equal(sums, np.stack([one, two]))
