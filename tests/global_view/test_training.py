"""A training step in the global view: pmap's numbers, a state in parts, one program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

_WIDE, _DEEP = 32, 64


def _normal(*shape: int) -> np.ndarray:
    """The same numbers for the same shape."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def _state() -> dict:
    params = {"w1": _normal(_WIDE, _DEEP) / 8, "w2": _normal(_DEEP, _WIDE) / 8, "b": _normal(_WIDE)}
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "step": np.int32(0)}


def _batch() -> tuple[np.ndarray, np.ndarray]:
    return _normal(8, 4, _WIDE), -_normal(8, 4, _WIDE)[::-1]


def _loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] + params["b"] - y) ** 2)


def _adam(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, dict]:
    loss, gradient = jax.value_and_grad(_loss)(state["params"], x, y)
    gradient = lax.pmean(gradient, "i")
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], gradient)
    params = jax.tree.map(
        lambda p, m, s: p - 0.01 * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8),
        state["params"],
        mean,
        square,
    )
    new = {"params": params, "mean": mean, "square": square, "step": step}
    return new, {"loss": lax.pmean(loss, "i"), "own": loss}


@pytest.mark.thorough
@pytest.mark.parametrize("gradients", ["scatter", "reduce"])
def test_a_state_in_parts_has_the_numbers_of_pmap(gradients):
    view, state = compare(_adam, _state(), *_batch(), shardings="fsdp", gradients=gradients)

    assert state["params"]["w1"].sharding.spec == P(None, "i")
    assert state["params"]["w2"].sharding.spec == P("i")
    assert state["params"]["b"].sharding.spec == P()  # too small to be cut
    assert all(leaf.uniform for leaf in view.report().leaves)


@pytest.mark.slow
def test_a_whole_state_has_the_numbers_of_pmap():
    compare(_adam, _state(), *_batch())


def test_a_loop_compiles_once_and_gives_up_its_memory():
    view = global_view(_adam, "i", shardings="fsdp", donate_argnums=0)
    state, batch = view.place(_state()), _batch()

    for _ in range(3):
        before = state
        state, _ = view(state, *batch)

        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert view._signatures.last.jitted._cache_size() == 1
    memory = view.lower(state, *batch).compile().memory_analysis()
    assert memory.alias_size_in_bytes == view.report().bytes_per_device
    assert view.report().bytes_per_device < 0.15 * view.report().bytes_under_pmap


def _bytes_of(kind: str, text: str) -> int:
    """What the operations of a kind give, of float32."""
    found = re.findall(rf"= \(?(f32\[.*?)\)? {kind}\(", text)
    shapes = [shape for types in found for shape in re.findall(r"f32\[([\d,]*)\]", types)]
    return sum(4 * int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes)


@pytest.mark.parametrize("gradients", ["scatter", "reduce"])
def test_what_is_sent_is_what_fsdp_by_hand_sends(gradients):
    view = global_view(_adam, "i", shardings="fsdp", gradients=gradients)
    text = view.lower(_state(), *_batch()).compile().as_text()
    cut, small = 2 * _WIDE * _DEEP * 4, _WIDE * 4

    assert _bytes_of("all-gather", text) == cut  # each parameter once
    if gradients == "scatter":
        assert _bytes_of("reduce-scatter", text) == cut / 8
        assert _bytes_of("all-reduce", text) == small + 4  # and the loss
    else:
        assert _bytes_of("reduce-scatter", text) == 0
        assert _bytes_of("all-reduce", text) == cut + small + 4


@pytest.mark.parametrize("shardings", ["replicated", "fsdp"])
def test_a_step_is_the_same_program_each_time(shardings):
    """Else no process finds it in the cache, and several wait for each other's collectives."""

    def text() -> str:
        return global_view(_adam, "i", shardings=shardings).lower(_state(), *_batch()).as_text()

    assert len({text() for _ in range(4)}) == 1


def test_results_are_as_pmap_gives_them():
    x, y = _batch()
    view = global_view(_adam, "i", out_axes=(0, {"loss": None, "own": 0}))

    _, metrics = view(_state(), x, y)

    assert metrics["loss"].shape == ()
    assert metrics["own"].shape == (8,)
    assert len(set(metrics["own"].tolist())) == 8
    np.testing.assert_allclose(metrics["own"].mean(), metrics["loss"], rtol=1e-6)


def test_two_carried_arguments_and_a_static_one():
    def step(params, moment, x, rate):
        gradient = lax.pmean(jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params), "i")
        moment = moment / 2 + gradient
        return params - rate * moment, moment

    weights, x = _normal(_WIDE, _DEEP), _normal(8, 4, _WIDE)
    view = global_view(
        step,
        "i",
        state=(0, 1),
        in_axes=(None, None, 0, None),
        static_broadcasted_argnums=3,
        shardings="fsdp",
        donate_argnums=(0, 1),
    )
    held = view.place((weights, np.zeros_like(weights)))

    for rate in (0.5, 0.25):
        held = view(*held, x, rate)

    # Powers of two: one rounding or two is the same.
    pmapped = jax.pmap(step, "i", in_axes=(None, None, 0), static_broadcasted_argnums=3)
    wanted = (weights, np.zeros_like(weights))
    for rate in (0.5, 0.25):
        wanted = jax.tree.map(lambda leaf: np.asarray(leaf[0]), pmapped(*wanted, x, rate))
    for mine, other in zip(held, wanted, strict=True):
        assert np.array_equal(mine, other)
        assert mine.sharding.spec == P(None, "i")


def test_a_rule_cuts_over_other_axes_of_the_mesh_too():
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("i", "model"))
    x, y = _batch()

    def rule(path, leaf):
        return P("model", "i") if path == "params/w1" else P()

    view = global_view(_adam, "i", mesh=mesh, shardings=rule, gradients="reduce")
    state, _ = view(view.place(_state()), x[:4], y[:4])

    assert state["params"]["w1"].sharding.spec == P("model", "i")
    assert state["params"]["w1"].addressable_shards[0].data.shape == (_WIDE // 2, _DEEP // 4)
    wanted, _ = jax.pmap(_adam, "i", in_axes=(None, 0, 0), devices=jax.devices()[:4])(
        _state(), x[:4], y[:4]
    )
    # The first step has no moment, so that nothing is rounded twice.
    np.testing.assert_allclose(state["params"]["w1"], wanted["params"]["w1"][0], rtol=1e-6)


def test_a_mesh_of_explicit_axes_will_do():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
    view = global_view(_adam, "i", mesh=mesh, shardings="fsdp")

    with jax.set_mesh(mesh):
        state = view.place(_state())
        for _ in range(2):
            state, metrics = view(state, *_batch())

    assert np.isfinite(metrics["own"]).all()
    assert view._signatures.last.jitted._cache_size() == 1
