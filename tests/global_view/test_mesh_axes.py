"""A mapped axis that is several axes of a mesh, and model axes that XLA shards compute over."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from against_pmap import as_pmap, memory_of, mesh_of, stacked
from jax import lax
from jax.sharding import PartitionSpec as P
from steps import X, Y

from jax_dist import global_view
from jax_dist._hlo import HloModule
from jax_dist.errors import ArgumentError, DeviceCountError

HSDP = ("replica", "shard")


_PARAMS = steps.WEIGHTS
STATE = {"params": _PARAMS, "mean": _PARAMS, "own": np.zeros(256, np.float32)}


def _step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradient = jax.value_and_grad(steps.loss_of)(state["params"], x, y)
    new = steps.momentum(state, lax.pmean(gradient, "i"))
    own = 0.5 * state["own"] + (x @ state["params"]["a"]).mean(0)  # never averaged
    return {**new, "own": own}, lax.pmean(loss, "i")


def _under_pmap(step: Any, state: dict, *batch: Any, times: int = 1) -> tuple[Any, Any]:
    """Return the last results on as many devices as the batch has slices, and the program."""
    mapped = jax.pmap(step, "i", devices=jax.devices()[: len(batch[0])])
    placed = stacked(state, len(batch[0]))
    compiled = mapped.lower(placed, *batch).compile()
    for _ in range(times):
        placed, rest = mapped(placed, *batch)
    return (placed, rest), compiled


def _close(got: Any, wanted: Any, atol: float = 3e-6) -> None:
    """Assert equality up to the order of sums of 256 products."""
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    jax.tree.map(close, as_pmap(got, wanted), wanted)


def test_a_gradient_is_scattered_in_a_replica_and_summed_over_replicas():
    mesh = mesh_of(replica=2, shard=4)
    view = global_view(_step, "i", mesh=mesh, mesh_axes=HSDP, shardings="fsdp")
    text = view.lower(STATE, X, Y).as_text()

    sums = re.findall(r"stablehlo\.(reduce_scatter|all_reduce)", text)
    assert sorted(sums) == ["all_reduce"] * 3 + ["reduce_scatter"] * 2  # one is for the loss
    parts = re.findall(r"all_reduce.*?-> (tensor<\S+>)", text, re.DOTALL)
    assert sorted(parts) == ["tensor<64x64xf32>"] * 2 + ["tensor<f32>"]


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("part", ["shard", "replica", HSDP, HSDP[::-1]])
def test_a_gradient_is_scattered_as_its_parameter_is_sharded(part, regather):
    rule = lambda path, leaf: P(None, part) if path.endswith("/a") else P()
    options: Any = {"mesh": mesh_of(replica=2, shard=4), "mesh_axes": HSDP, "shardings": rule}
    view = global_view(_step, "i", regather=regather, **options)
    new, loss = view(view.place(STATE, X, Y, stacked=False), X, Y)

    _close((new, loss), _under_pmap(_step, STATE, X, Y)[0])
    assert view.report().scattered == 1
    assert new["params"]["a"].sharding.spec == P(None, part)


@pytest.mark.parametrize(
    ("names", "mesh"),
    [(("replica", "nothing"), True), (("replica", "replica"), True), ((), True), (HSDP, False)],
)
def test_axes_that_the_mesh_lacks_are_an_error(names, mesh):
    other = mesh_of(replica=2, shard=4) if mesh else None
    with pytest.raises(DeviceCountError, match="needs the axes"):
        global_view(_step, "i", mesh=other, mesh_axes=names)


# Two layers are sharded as Megatron does it: the first by columns, the second by rows.
_RULES = {"a": P("i", "model"), "b": P("model", "i"), "own": P("model")}


def _rule(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    return _RULES.get(path.rsplit("/", maxsplit=1)[-1], P())


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("sizes", [{"i": 2, "model": 4}, {"i": 4, "model": 2}])
def test_what_is_computed_is_sharded_as_the_state(sizes, regather):
    x, y = (np.tile(each, (1, 8, 1))[: sizes["i"]] for each in (X, Y))
    wanted, pmapped = _under_pmap(_step, STATE, x, y, times=3)
    view = global_view(_step, "i", mesh=mesh_of(**sizes), shardings=_rule, regather=regather)
    state = view.place(STATE, x, y, stacked=False)
    compiled = view.lower(state, x, y).compile()
    for _ in range(3):
        state, mine = view(state, x, y)

    assert state["params"]["a"].sharding.spec == P("i", "model")
    assert state["params"]["a"].addressable_shards[0].data.size == 64 * 256 // 8
    assert state["own"].sharding.spec == P("i", "model")  # of each device along "i"
    flops, flops_there = (each.cost_analysis()["flops"] for each in (compiled, pmapped))
    assert flops < 1.15 * flops_there / sizes["model"]
    if not regather:  # XLA for CPU gathers both times at once
        assert memory_of(compiled) < 0.7 * memory_of(pmapped)
    _close((state, mine), wanted)


_UNSHARDED = {
    "callback": lambda h: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h),
    "rbg": lambda h: h * jax.random.normal(jax.random.key(3, impl="rbg"), h.shape),
    "branch of a device": lambda h: lax.cond(
        lax.axis_index("i") == 1, lambda: lax.fori_loop(0, 3, lambda _, h: 0.5 * h, h), lambda: h
    ),
    "fft": lambda h: jnp.abs(jnp.fft.fft(h)),
    "sort": lambda h: jnp.sort(h, -1) + lax.top_k(h, 2)[0].sum(),
    "inverse": lambda h: h + jnp.linalg.inv(jnp.cov(h)[:2, :2] + 2 * jnp.eye(2)).sum(),
    "ppermute": lambda h: lax.ppermute(h, "i", [(n, (n + 1) % 4) for n in range(4)]),
    "checkpoint": lambda h: jax.checkpoint(lambda h: jnp.tanh(h) * lax.axis_index("i"))(h),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", _UNSHARDED)
def test_what_xla_cannot_shard_runs_whole(name):
    def step(state, x, y):
        hidden = lax.stop_gradient(_UNSHARDED[name](x @ state["params"]["a"]))
        loss = lambda p: jnp.mean((hidden * (x @ p["a"])) @ p["b"] * y)
        gradient = lax.pmean(jax.grad(loss)(state["params"]), "i")
        params = jax.tree.map(lambda p, g: p - 0.125 * g, state["params"], gradient)
        return {**state, "params": params}, hidden

    x, y = X[:4], Y[:4]
    view = global_view(step, "i", mesh=mesh_of(i=4, model=2), shardings=_rule)
    state, hidden = view(view.place(STATE, x, y, stacked=False), x, y)
    (wanted, theirs), _ = _under_pmap(step, STATE, x, y)

    np.testing.assert_allclose(hidden, theirs, rtol=1e-4, atol=1e-5)
    _close(state, wanted, atol=1e-5)


def _often(x, w):
    """As often as the device says."""
    return lax.fori_loop(0, lax.axis_index("i") + 1, lambda _, h: jnp.tanh(h @ w), x)


def _some(x, w):
    return lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ w), lambda: x)


def _same_often(x, w):
    going = lambda turn: lax.pmax(turn[0], "i") < 3
    return lax.while_loop(going, lambda turn: (turn[0] + 1, jnp.tanh(turn[1] @ w)), (0, x))[1]


@pytest.mark.parametrize(("inner", "agree"), [(_often, False), (_some, False), (_same_often, True)])
def test_nothing_is_sent_where_devices_may_go_other_ways(inner, agree):
    def step(state, x):
        hidden = inner(x, state["w"])
        move = lax.pmean(x.T @ hidden, "i")
        return {"w": state["w"] - 0.125 * move}, hidden

    state, x = {"w": steps.WEIGHTS["a"][:, :64]}, X[:4]
    view = global_view(
        step, "i", mesh=mesh_of(i=4, model=2), shardings=lambda path, leaf: P("i", "model")
    )
    placed = view.place(state, x, stacked=False)
    text = view.lower(placed, x).compile().as_text()
    new, hidden = view(placed, x)
    assert "while(" in text or "conditional(" in text
    collectives = HloModule.parse(text).collectives()
    assert any(collective.runs != "always" for collective in collectives) == agree
    _close((new, hidden), _under_pmap(step, state, x)[0], atol=1e-5)


def test_each_device_scatters_what_it_has_of_a_gradient_along_further_axes():
    x, y = X[:2], Y[:2]
    view = global_view(_step, "i", mesh=mesh_of(i=2, model=4), shardings=_rule)
    text = view.lower(view.place(STATE, x, y, stacked=False), x, y).compile().as_text()

    shapes = re.findall(r"f32\[([\d,]+)\]\S* reduce-scatter\(", text)
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in shapes]
    assert sizes == [64 * 256 // 8] * 2


def test_each_device_gathers_what_it_has_of_a_parameter_along_further_axes():
    w = np.stack([np.eye(64, dtype=np.float32)] * 3)
    x, rule = X[:2], lambda path, leaf: P(None, "i", "model")

    def step(w, x):
        turn = lambda h, layer: (jnp.tanh(h @ layer), None)
        gradient = jax.grad(lambda w: jnp.sum(lax.scan(turn, x, w)[0] ** 2))(w)
        return w - lax.pmean(gradient, "i")

    view = global_view(step, "i", mesh=mesh_of(i=2, model=4), shardings=rule, regather=True)
    text = view.lower(w, x).as_text()

    shapes = re.findall(r"stablehlo\.all_gather.*?-> tensor<([\dx]+)xf32>", text, re.DOTALL)
    assert {"64x16", "1x64x16"} >= {*shapes} > set()


def test_a_leaf_that_varies_cannot_be_sharded_over_the_mapped_axis():
    rule = lambda path, leaf: P(("shard",)) if path == "own" else P()
    mesh = mesh_of(replica=2, shard=4)
    with pytest.raises(ArgumentError, match="each device has others"):
        global_view(_step, "i", mesh=mesh, mesh_axes=HSDP, shardings=rule)(STATE, X, Y)
