"""Leaves of the state that lie in the memory of the host between two steps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import global_view
from jax_dist.errors import GlobalViewError, PlacementError

pytestmark = pytest.mark.rewriting

_random = np.random.default_rng(0)
_PARAMS = {"a": (256, 128), "b": (128, 256)}
X = _random.normal(size=(8, 4, 256)).astype(np.float32)


def _step(state, x):
    loss = lambda params: jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)
    value, gradient = jax.value_and_grad(loss)(state["params"])
    gradient = lax.pmean(gradient, "i")
    moment = jax.tree.map(lambda m, g: 0.5 * m + g, state["moment"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.125 * m, state["params"], moment)
    return {"params": params, "moment": moment, "own": state["own"] + x[0]}, value


def _state():
    draw = lambda shape: _random.normal(size=shape).astype(np.float32) / 8
    params = {name: draw(shape) for name, shape in _PARAMS.items()}
    return {
        "params": params,
        "moment": jax.tree.map(np.zeros_like, params),
        "own": np.zeros(256, np.float32),
    }


def _view(devices, kind="pinned_host"):
    mesh = Mesh(np.array(devices), ("i",))

    def rule(path, leaf):
        away = NamedSharding(mesh, P("i"), memory_kind=kind)
        if path == "own":
            return NamedSharding(mesh, P(), memory_kind=kind)
        return away if path.startswith("moment/") else P("i")

    return global_view(_step, "i", mesh=mesh, shardings=rule, donate_argnums=0)


def _kinds(state):
    return {jax.tree_util.keystr(p): leaf.sharding.memory_kind for p, leaf in _leaves(state)}


def _leaves(state):
    return jax.tree.leaves_with_path(state)


def test_the_numbers_are_those_of_a_state_on_the_devices():
    view, other, start = _view(jax.devices()), _view(jax.devices(), "device"), _state()
    state, wanted = (each.place(start, X, stacked=False) for each in (view, other))
    placed = _kinds(state)
    for _ in range(3):
        state, value = view(state, X)
        wanted, expected = other(wanted, X)
        np.testing.assert_array_equal(value, expected)

    jax.tree.map(np.testing.assert_array_equal, state, wanted)
    assert placed == _kinds(state)
    assert {path for path, kind in placed.items() if kind == "pinned_host"} == {
        "['moment']['a']", "['moment']['b']", "['own']"
    }  # fmt: skip
    assert state["own"].shape == (8, 256)
    assert state["moment"]["a"].addressable_shards[0].data.shape == (32, 128)
    report = view.report()
    assert report.bytes_per_device == 2 * 256 * 128 * 4 // 8
    assert re.search(r"moment'\]\['a'\].*P\('i',\) in pinned_host +0", str(report))


def test_a_state_is_brought_there_and_read_from_there():
    view, start = _view(jax.devices()), _state()
    assert _kinds(view(start, X)[0])["['moment']['b']"] == "pinned_host"  # not placed before
    state = view.place(start, X, stacked=False)
    jax.tree.map(np.testing.assert_array_equal, view.first(state), start)
    stacked = view.stacked(state)
    assert stacked["moment"]["a"].shape == (8, 256, 128)
    assert _kinds(view.place(stacked, X)) == _kinds(state)

    other = _view(jax.devices(), "device")
    with pytest.raises(PlacementError, match="memory_kind=device.*kept as.*pinned_host"):
        view(other.place(start, X, stacked=False), X)


def test_it_stays_there_in_a_scan_over_steps():
    view = _view(jax.devices())
    state = view.place(_state(), X, stacked=False)
    turns = jax.jit(lambda s: lax.scan(lambda s, _: view(s, X), s, length=2)[0])
    twice = turns(state)

    assert _kinds(twice) == _kinds(state)
    for _ in range(2):
        state, _ = view(state, X)
    for (path, leaf), other in zip(_leaves(twice), jax.tree.leaves(state), strict=True):
        message = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6, err_msg=message)


def test_a_sharding_of_another_mesh_is_refused():
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    rule = lambda path, leaf: NamedSharding(mesh, P(), memory_kind="pinned_host")
    view = global_view(_step, "i", shardings=rule)
    with pytest.raises(GlobalViewError, match=r"or a NamedSharding of this mesh"):
        view.place(_state(), X, stacked=False)


@pytest.mark.tpu_compiler
def test_the_compiler_of_tpus_keeps_it_in_the_memory_of_the_host():
    devices = jax_dist.topology("v5e:4x4").devices
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _state())
    batch = jax.ShapeDtypeStruct((16, 4, 256), "float32")
    here, away = (
        _view(devices, kind).lower(types, batch).compile().memory_analysis()
        for kind in ("device", "pinned_host")
    )

    moments = 2 * 256 * 128 * 4 // 16
    assert here.host_argument_size_in_bytes == 0
    assert away.host_argument_size_in_bytes >= moments
    assert away.host_output_size_in_bytes == away.host_alias_size_in_bytes
    assert away.host_alias_size_in_bytes == away.host_argument_size_in_bytes
    assert here.argument_size_in_bytes - away.argument_size_in_bytes >= moments
