"""What of a state is shared is found; what varies stays, one for each device, and says where."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import PLAIN, assert_same, compare, stacked
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view
from jax_dist.errors import ArgumentError

pytestmark = pytest.mark.rewriting

_X = np.random.default_rng(0).normal(size=(8, 4, 16)).astype(np.float32)
_KEY = jax.random.key(1)
_W = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)


def _line(function, text: str) -> str:
    """Where a line with this text stands in a function: "12 (", as messages have it."""
    lines, first = inspect.getsourcelines(function)
    (place,) = [number for number, line in enumerate(lines) if text in line]
    return f"{first + place} ("


def _unsynchronised(state, x):
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w - state["mean"]) ** 2))(state["w"])
    mean = 0.5 * state["mean"] + 0.5 * jnp.mean(x @ state["w"], 0)  # never averaged
    return {"w": state["w"] - 0.5 * lax.pmean(gradient, "i"), "mean": mean}


def test_statistics_that_are_not_synchronised_stay_one_for_each_device():
    state = {"w": _W, "mean": np.zeros(128, np.float32)}

    view, kept = compare(_unsynchronised, state, _X, times=3, shardings="fsdp", gradients="reduce")

    mean, w = view.report().leaves
    assert (mean.path, mean.uniform, kept["mean"].shape) == ("state['mean']", False, (8, 128))
    assert (w.path, w.uniform, kept["w"].shape) == ("state['w']", True, (16, 128))
    assert _line(_unsynchronised, "never averaged") in str(mean.origin)


def test_a_state_placed_alone_is_completed_by_the_first_call():
    state = {"w": _W, "mean": np.zeros(128, np.float32)}
    view = global_view(_unsynchronised, "i", shardings="fsdp", donate_argnums=0)

    placed = view.place(state)
    assert placed["mean"].shape == (128,)
    for _ in range(3):
        placed = view(placed, _X)

    assert placed["mean"].shape == (8, 128)
    assert view._signatures.last.jitted._cache_size() == 1
    assert view.shardings["w"].spec == P(None, "i")
    assert view.types["mean"].shape == (8, 128)


def test_what_varies_makes_others_vary_in_the_next_round():
    """`a` varies by the batch, `b` by `a`, `c` by `b`; `d` is averaged, and stays."""

    def step(state, x):
        a, b, c, d = (state[name] for name in "abcd")
        return {"a": a + jnp.mean(x), "b": b + a, "c": c + b, "d": d + lax.pmean(c, "i")}

    view, _ = compare(step, dict.fromkeys("abcd", np.float32(0)), _X, times=4)

    assert [leaf.uniform for leaf in view.report().leaves] == [False, False, False, True]


@pytest.mark.thorough
def test_a_key_for_each_device_varies_and_a_shared_one_does_not():
    def step(state, x):
        own = jax.random.fold_in(state["own"], lax.axis_index("i"))
        noise = jax.random.key_data(own)[0] % 7 + jax.random.key_data(state["all"])[1] % 5
        w = state["w"] + lax.pmean(jnp.mean(x) * noise, "i")
        return {"own": own, "all": jax.random.split(state["all"])[0], "w": w}

    state = {"own": jax.random.key(0), "all": jax.random.key(1, impl="rbg"), "w": np.float32(0)}
    view, kept = compare(step, state, _X)

    found = {leaf.path: leaf.uniform for leaf in view.report().leaves}
    assert found == {"state['own']": False, "state['all']": True, "state['w']": True}
    assert kept["own"].shape == (8,)


def test_a_step_that_one_device_may_skip_makes_its_state_vary():
    """The finiteness is a device's own here, and so is the decision."""

    def step(w, x):
        gradient = lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "i")
        new = w - 0.5 * gradient
        return jnp.where(jnp.isfinite(x).all(), new, w)  # decided alone

    view = global_view(step, "i", shardings="fsdp")
    with pytest.raises(ArgumentError, match=r"No leaf of the state of 'step' can") as told:
        view(_W, _X)

    assert _line(step, "decided alone") in str(told.value)
    assert "pmean" in str(told.value)


def test_a_leaf_that_varies_and_was_to_be_cut_is_named_once_with_bytes_and_line():
    def step(state, x):
        new = state["w"] - lax.pmean(jnp.mean(x), "i")
        last = jnp.where(x[0, 0] > 0, new, state["last"])  # of one device
        return {"w": new, "last": last, "mean": state["mean"] + x.mean(0)}

    state = {"w": _W, "last": _W, "mean": np.zeros(16, np.float32)}
    view = global_view(step, "i", shardings="fsdp")
    with pytest.warns(UserWarning, match="not sharded, for each device has others") as told:
        placed = view.place(state, _X, stacked=False)
    view(view(placed, _X), _X[:, :2])  # once for both programs

    (text,) = [str(each.message) for each in told]
    assert "state['last'], 8.2 kB per device" in text
    assert _line(step, "of one device") in text
    assert "state['mean']" not in text  # too small to be cut
    global_view(step, "i")(state, _X)  # nothing was to be cut


def test_a_leaf_that_varies_and_is_to_be_cut_is_refused_with_path_and_line():
    state = {"w": _W, "mean": np.zeros(128, np.float32)}
    view = global_view(
        _unsynchronised, "i", shardings=lambda path, leaf: P(*[None] * (leaf.ndim - 1), "i")
    )

    with pytest.raises(ArgumentError, match="each device has another one") as told:
        view(state, _X)

    assert "state['mean']" in str(told.value)
    assert _line(_unsynchronised, "never averaged") in str(told.value)


def test_a_result_said_to_be_shared_that_varies_is_refused():
    view = global_view(_unsynchronised_with_loss, "i", out_axes=(0, None))

    with pytest.raises(ArgumentError, match=r"out_axes=None") as told:
        view(_W, _X)

    assert _line(_unsynchronised_with_loss, "own loss") in str(told.value)


def _unsynchronised_with_loss(w, x):
    loss = jnp.mean((x @ w) ** 2)  # own loss
    return w - lax.pmean(jnp.mean(x), "i"), loss


def test_the_state_of_pmap_comes_in_if_its_copies_are_equal():
    state = {"w": _W, "mean": np.zeros(128, np.float32)}
    pmapped = jax.jit(jax.pmap(_unsynchronised, axis_name="i")).lower(stacked(state), _X)
    program = pmapped.compile(compiler_options=PLAIN)
    reference = program(stacked(state), _X)

    view = global_view(_unsynchronised, "i", shardings="fsdp", gradients="reduce")
    kept = view.place(reference, _X, stacked=True)  # its means differ, and it goes on from there
    seen = view.lower(kept, _X).compile(compiler_options=PLAIN)
    x = jax.device_put(_X, view._signatures.last.in_shardings[-1])

    assert_same(seen(kept, x), program(reference, _X))


@pytest.mark.parametrize("shardings", ["fsdp", "replicated"])
def test_what_was_placed_stays_valid_when_the_step_takes_its_memory(shardings):
    """One device would share the memory of an array that lies whole on each."""

    def step(state, x):
        return jax.tree.map(lambda leaf: leaf + lax.pmean(x.sum(), "i"), state)

    view = global_view(step, "i", shardings=shardings, donate_argnums=0)
    given = {"count": jnp.float32(1), "small": jnp.ones(16), "large": jnp.ones((64, 64))}
    state = view.place(given)
    for _ in range(2):
        state = view(state, jnp.ones((8, 2)))

    assert not any(leaf.is_deleted() for leaf in given.values())
    assert float(given["count"]) == 1


@pytest.mark.parametrize("shardings", ["fsdp", "replicated"])
def test_a_state_is_read_as_pmap_has_it(shardings):
    """The first of all devices, and a slice for each of them, to the bit."""
    state = {"w": _W, "mean": np.zeros(128, np.float32)}
    options = {"axis_name": "i", "donate_argnums": 0}
    mapped = jax.pmap(_unsynchronised, **options)
    view = global_view(_unsynchronised, shardings=shardings, gradients="reduce", **options)
    kept, placed = mapped(stacked(state), _X), view(view.place(state), _X)

    for _ in range(2):
        assert_same(view.stacked(placed), kept)
        assert jax.tree.map(jnp.shape, view.stacked(placed)) == jax.tree.map(jnp.shape, kept)
        assert_same(view.first(placed), jax.tree.map(lambda leaf: leaf[0], kept))
        first = view.first(placed)
        kept, placed = mapped(kept, _X), view(placed, _X)
        assert not any(leaf.is_deleted() for leaf in first.values())


def test_what_is_no_leaf_of_the_state_cannot_be_read():
    view = global_view(_unsynchronised, "i")
    placed = view.place({"w": _W, "mean": np.zeros(128, np.float32)})

    with pytest.raises(ArgumentError, match=r"'first' takes the state"):
        view.first(placed["w"][:3])
    with pytest.raises(ArgumentError, match=r"'stacked' takes the state"):
        view.stacked({**placed, "other": jnp.ones(5)})


# ---- what is known of functions


_FUNCTIONS = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "log2": lambda w: jnp.log2(1 + w * w),
    "randint": lambda w: w + jax.random.randint(_KEY, w.shape, 0, 9),
    "categorical": lambda w: w + jax.random.categorical(_KEY, w)[:, None],
    "poisson": lambda w: w + jax.random.poisson(_KEY, 3.0, w.shape),
    "pooling": lambda w: lax.reduce_window(w, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME"),
    "scatter-sub": lambda w: w.at[0].subtract(1.0),
    "solve": lambda w: jnp.linalg.solve(jnp.eye(16) * 4 + w @ w.T, w),
    "expm": lambda w: jax.scipy.linalg.expm(0.01 * w @ w.T) @ w,
    "unstack": lambda w: jnp.stack(jnp.unstack(w)),
    "interp": lambda w: jnp.interp(w, jnp.linspace(-2, 2, 5), jnp.arange(5.0)),
    "composite": lambda w: lax.composite(jnp.sin, "a.b")(w),
    "custom_root": lambda w: lax.custom_root(
        lambda y: y**3 - w, jnp.ones_like(w), lambda f, y: y - f(y) / 9, lambda g, y: y / 3
    ),
}


@pytest.mark.thorough
def test_states_behind_functions_are_shared():
    def step(state, x):
        loss = lambda w: jnp.tanh(jax.nn.gelu(x @ w)).sum()
        new = lambda w, f: 0.9 * w + 0.01 * f(w) - 0.01 * lax.pmean(jax.grad(loss)(w), "i")
        return {name: new(w, _FUNCTIONS[name]) for name, w in state.items()}

    state = dict.fromkeys(_FUNCTIONS, _W)
    view, _ = compare(step, state, _X, times=2, shardings="fsdp", gradients="reduce")

    assert [leaf.path for leaf in view.report().leaves if not leaf.uniform] == []


def test_what_nothing_is_known_of_is_named_with_its_line():
    def step(w, x):
        noise = lax.rng_uniform(0.0, 1.0, w.shape)
        return w - lax.pmean(x.mean(), "i") + noise

    view = global_view(step, "i", shardings=lambda path, leaf: P("i"))

    with pytest.raises(ArgumentError) as raised:
        view(_W, _X)

    message = str(raised.value)
    assert _line(step, "rng_uniform") + "rng_uniform, of which nothing is known)" in message
