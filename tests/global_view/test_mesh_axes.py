"""A mapped axis that is several axes of a mesh, and model axes that XLA shards compute over."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from against_pmap import as_pmap, stacked
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from steps import X, Y

from jax_dist import global_view
from jax_dist.errors import ArgumentError, DeviceCountError

HSDP = ("replica", "shard")
A = steps.weights()["a"]


def _mesh(**sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))


def _state() -> dict:
    params = steps.weights()
    return {"params": params, "mean": params, "own": np.zeros(256, np.float32)}


def _step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradient = jax.value_and_grad(steps.loss_of)(state["params"], x, y)
    new = steps.momentum(state, lax.pmean(gradient, "i"))
    own = 0.5 * state["own"] + (x @ state["params"]["a"]).mean(0)  # never averaged
    return {**new, "own": own}, lax.pmean(loss, "i")


def _memory(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def _flops(compiled: Any) -> float:
    return compiled.cost_analysis()["flops"]


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


# ---- the mapped axis as several


def test_a_gradient_is_scattered_in_a_replica_and_summed_over_replicas():
    mesh = _mesh(replica=2, shard=4)
    view = global_view(_step, "i", mesh=mesh, mesh_axes=HSDP, shardings="fsdp")
    text = view.lower(_state(), X, Y).as_text()

    sums = re.findall(r"stablehlo\.(reduce_scatter|all_reduce)", text)
    assert sorted(sums) == ["all_reduce"] * 3 + ["reduce_scatter"] * 2  # one is for the loss
    parts = re.findall(r"all_reduce.*?-> (tensor<\S+>)", text, re.DOTALL)
    assert sorted(parts) == ["tensor<64x64xf32>"] * 2 + ["tensor<f32>"]


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("part", ["shard", "replica", HSDP, HSDP[::-1]])
def test_a_gradient_is_scattered_as_its_parameter_is_sharded(part, regather):
    rule = lambda path, leaf: P(None, part) if path.endswith("/a") else P()
    options: Any = {"mesh": _mesh(replica=2, shard=4), "mesh_axes": HSDP, "shardings": rule}
    view = global_view(_step, "i", regather=regather, **options)
    new, loss = view(view.place(_state(), X, Y, stacked=False), X, Y)

    _close((new, loss), _under_pmap(_step, _state(), X, Y)[0])
    assert view.report().scattered == 1
    assert new["params"]["a"].sharding.spec == P(None, part)


@pytest.mark.parametrize(
    ("names", "mesh"),
    [(("replica", "nothing"), True), (("replica", "replica"), True), ((), True), (HSDP, False)],
)
def test_axes_that_the_mesh_lacks_are_an_error(names, mesh):
    other = _mesh(replica=2, shard=4) if mesh else None
    with pytest.raises(DeviceCountError, match="needs the axes"):
        global_view(_step, "i", mesh=other, mesh_axes=names)


# ---- model axes


def _rule(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Shard two layers as Megatron does: the first by columns, the second by rows."""
    match path.rsplit("/", maxsplit=1)[-1]:
        case "a":
            return P("i", "model")
        case "b":
            return P("model", "i")
        case "own":
            return P("model")
    return P()


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("sizes", [{"i": 2, "model": 4}, {"i": 4, "model": 2}])
def test_what_is_computed_is_sharded_as_the_state(sizes, regather):
    x, y = (np.tile(each, (1, 8, 1))[: sizes["i"]] for each in (X, Y))
    wanted, pmapped = _under_pmap(_step, _state(), x, y, times=3)
    view = global_view(_step, "i", mesh=_mesh(**sizes), shardings=_rule, regather=regather)
    state = view.place(_state(), x, y, stacked=False)
    compiled = view.lower(state, x, y).compile()
    for _ in range(3):
        state, mine = view(state, x, y)

    assert state["params"]["a"].sharding.spec == P("i", "model")
    assert state["params"]["a"].addressable_shards[0].data.size == 64 * 256 // 8
    assert state["own"].sharding.spec == P("i", "model")  # of each device along "i"
    assert _flops(compiled) < 1.15 * _flops(pmapped) / sizes["model"]
    if not regather:  # XLA for CPU gathers both times at once
        assert _memory(compiled) < 0.7 * _memory(pmapped)
    _close((state, mine), wanted)


def _with_callback(h):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), h)


def _with_numbers(h):
    return h * jax.random.normal(jax.random.key(3, impl="rbg"), h.shape)


def _by_device(h):
    return lax.cond(lax.axis_index("i") == 1, lambda: lax.fori_loop(0, 3, _halved, h), lambda: h)


def _halved(_, h):
    return lax.ppermute(h, "i", [(0, 0), (1, 1), (2, 2), (3, 3)]) * 0.5 if h.ndim > 2 else 0.5 * h


@pytest.mark.thorough
@pytest.mark.parametrize(
    "inner",
    [
        _with_callback,
        _with_numbers,
        _by_device,
        lambda h: jnp.abs(jnp.fft.fft(h)),
        lambda h: jnp.sort(h, -1) + lax.top_k(h, 2)[0].sum(),
        lambda h: h + jnp.linalg.inv(jnp.cov(h)[:2, :2] + 2 * jnp.eye(2)).sum(),
        lambda h: lax.ppermute(h, "i", [(n, (n + 1) % 4) for n in range(4)]),
        lambda h: jax.checkpoint(lambda h: jnp.tanh(h) * lax.axis_index("i"))(h),
    ],
)
def test_what_xla_cannot_shard_runs_whole(inner):
    def step(state, x, y):
        hidden = lax.stop_gradient(inner(x @ state["params"]["a"]))
        loss = lambda p: jnp.mean((hidden * (x @ p["a"])) @ p["b"] * y)
        gradient = lax.pmean(jax.grad(loss)(state["params"]), "i")
        params = jax.tree.map(lambda p, g: p - 0.125 * g, state["params"], gradient)
        return {**state, "params": params}, hidden

    x, y = X[:4], Y[:4]
    view = global_view(step, "i", mesh=_mesh(i=4, model=2), shardings=_rule)
    state, hidden = view(view.place(_state(), x, y, stacked=False), x, y)
    (wanted, theirs), _ = _under_pmap(step, _state(), x, y)

    np.testing.assert_allclose(hidden, theirs, rtol=1e-4, atol=1e-5)
    _close(state, wanted, atol=1e-5)


def _sent_in_bodies(text: str) -> set[str]:
    """Return the collectives in loops and branches of a program, and in what these call."""
    named = [(re.match(r"(?:ENTRY )?%?(\S+) ", part), part) for part in text.split("\n\n")]
    parts = {name[1]: part for name, part in named if name}
    called = r"(?:body|true_computation|false_computation)=(%[\w.\-]+)"
    bodies = [*re.findall(called, text), *re.findall(r"branch_computations=\{(.*?)\}", text)]
    queue = [name for each in bodies for name in re.findall(r"%([\w.\-]+)", each)]
    assert queue
    for name in queue:  # which grows
        inner = re.findall(r"%([\w.\-]+)", parts[name])
        queue += [each for each in dict.fromkeys(inner) if each in parts and each not in queue]
    kinds = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return {kind for name in queue for kind in re.findall(kinds, parts[name])}


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

    state, x = {"w": A[:, :64]}, X[:4]
    view = global_view(
        step, "i", mesh=_mesh(i=4, model=2), shardings=lambda path, leaf: P("i", "model")
    )
    placed = view.place(state, x, stacked=False)
    text = view.lower(placed, x).compile().as_text()
    new, hidden = view(placed, x)
    assert bool(_sent_in_bodies(text)) == agree
    _close((new, hidden), _under_pmap(step, state, x)[0], atol=1e-5)


def test_each_device_scatters_what_it_has_of_a_gradient_along_further_axes():
    x, y = X[:2], Y[:2]
    view = global_view(_step, "i", mesh=_mesh(i=2, model=4), shardings=_rule)
    text = view.lower(view.place(_state(), x, y, stacked=False), x, y).compile().as_text()

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

    view = global_view(step, "i", mesh=_mesh(i=2, model=4), shardings=rule, regather=True)
    text = view.lower(w, x).as_text()

    shapes = re.findall(r"stablehlo\.all_gather.*?-> tensor<([\dx]+)xf32>", text, re.DOTALL)
    assert {"64x16", "1x64x16"} >= {*shapes} > set()


def test_a_leaf_that_varies_cannot_be_sharded_over_the_mapped_axis():
    rule = lambda path, leaf: P(("shard",)) if path == "own" else P()
    mesh = _mesh(replica=2, shard=4)
    with pytest.raises(ArgumentError, match="each device has others"):
        global_view(_step, "i", mesh=mesh, mesh_axes=HSDP, shardings=rule)(_state(), X, Y)
