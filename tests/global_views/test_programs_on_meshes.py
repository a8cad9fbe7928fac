"""Training programs of all kinds on meshes of several axes: pmap's bits, or its numbers.

Without a further axis all is equal to the bit, but for groups on jax 0.12. With one, sums have
another order, so float64 is compared, to 1e-9 of the largest number of a leaf. Adafactor averages
over rows and columns, which XLA for CPU adds up as they happen to lie in memory, in any two
programs; so it is compared so only. And `optax.MultiSteps` does not take float64.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare, stacked
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

optax = pytest.importorskip("optax")

pytestmark = [pytest.mark.rewriting, pytest.mark.slow]

_WIDE, _ROWS, _WORDS = 64, 4, 256


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def _weights() -> dict:
    scale = np.float32(0.125)
    return {"in": _normal(_WIDE, 256) * scale, "out": _normal(256, _WIDE) * scale / 2}


def _features() -> tuple[np.ndarray, ...]:
    return _normal(8, _ROWS, _WIDE), _normal(8, _ROWS, _WIDE)[::-1]


def _words() -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(1).integers(0, _WORDS, (8, _ROWS, 8)),)


def _layers(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2)


def _dropped(p, x, y, key):
    hidden = jnp.tanh(x @ p["in"]) * jax.random.bernoulli(key, 0.75, (x.shape[0], 256))
    return jnp.mean((hidden @ p["out"] - y) ** 2)


def _experts(p, x, y):
    chosen = jnp.argmax(x @ p["gate"], -1)
    rows = jnp.zeros((4, _ROWS, _WIDE), x.dtype).at[chosen, jnp.arange(_ROWS)].set(x)
    hidden = jax.nn.relu(jnp.einsum("erd,edf->erf", rows, p["in"]))
    out = jnp.einsum("erf,efd->erd", hidden, p["out"])[chosen, jnp.arange(_ROWS)]
    weight = jax.nn.softmax(x @ p["gate"])[jnp.arange(_ROWS), chosen]
    return jnp.mean((out * weight[:, None] - y) ** 2)


def _embedded(p, words):
    logits = jnp.tanh(p["table"][words].mean(1)) @ p["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 0]).mean()


def _transformer(p, words):
    def block(x, layer):
        q, k, v = jnp.split(x @ layer["qkv"], 3, -1)
        scores = jax.nn.softmax(q @ k.transpose(0, 2, 1) / 8)
        x = x + (scores @ v) @ layer["o"]
        return x + jax.nn.gelu(x @ layer["in"]) @ layer["out"], None

    x, _ = lax.scan(jax.checkpoint(block), p["table"][words], p["layers"])
    logits = x @ p["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:]).mean()


def _moe() -> dict:
    shapes = {"gate": (_WIDE, 4), "in": (4, _WIDE, 128), "out": (4, 128, _WIDE)}
    return {name: _normal(*shape) / 8 for name, shape in shapes.items()}


def _table() -> dict:
    return {"table": _normal(_WORDS, _WIDE) / 8}


def _decoder() -> dict:
    shapes = {
        "qkv": (_WIDE, 3 * _WIDE), "o": (_WIDE, _WIDE), "in": (_WIDE, 128), "out": (128, _WIDE)
    }  # fmt: skip
    return {**_table(), "layers": {name: _normal(2, *s) / 16 for name, s in shapes.items()}}


def _trained(loss: Callable, tx: Any) -> Callable:
    def step(state, *batch):
        more = ()
        if "key" in state:
            own = jax.random.fold_in(state["key"], lax.axis_index("i"))
            more = (jax.random.fold_in(own, state["turn"]),)
        value, gradient = jax.value_and_grad(loss)(state["params"], *batch, *more)
        updates, rest = tx.update(lax.pmean(gradient, "i"), state["tx"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        mean = jax.tree.map(lambda m, p: 0.75 * m + 0.25 * p, state["mean"], params)
        new = {"params": params, "tx": rest, "mean": mean, "turn": state["turn"] + 1}
        return {**state, **new}, lax.pmean(value, "i")

    return step


def _scaled(state, *batch):
    """A dynamic scale of the loss: where a gradient overflows, the step is left out."""
    scaled = lambda p: _layers(p, *batch) * state["scale"]
    gradient = lax.pmean(jax.grad(scaled)(state["params"]), "i")
    gradient = jax.tree.map(lambda g: g / state["scale"], gradient)
    finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)]))
    move = lambda p: jax.tree.map(lambda p, g: p - 0.125 * g, p, gradient)
    params = lax.cond(finite, move, lambda p: p, state["params"])
    scale = jnp.where(finite, state["scale"] * 2, state["scale"] / 2)
    return {**state, "params": params, "scale": scale}, scale


def _normalized(state, x, y):
    """Batch norm whose statistics are never averaged."""

    def loss(p):
        hidden = x @ p["in"]
        mean, spread = hidden.mean(0), hidden.var(0)
        hidden = jax.nn.relu((hidden - mean) * lax.rsqrt(spread + 1e-3))
        return jnp.mean((hidden @ p["out"] - y) ** 2), mean

    (value, mean), gradient = jax.value_and_grad(loss, has_aux=True)(state["params"])
    gradient = lax.pmean(gradient, "i")
    params = jax.tree.map(lambda p, g: p - 0.125 * g, state["params"], gradient)
    return {**state, "params": params, "own": state["own"] / 2 + mean}, lax.pmean(value, "i")


def _with(loss: Callable, params: dict, batch: tuple, tx: Any, **more: Any) -> tuple:
    state = {"params": params, "tx": tx.init(params), "mean": params, "turn": np.int32(0), **more}
    return _trained(loss, tx), state, batch


_ADAM = optax.adamw(1e-2)
_CLIPPED = optax.chain(optax.clip_by_global_norm(0.125), _ADAM)
PROGRAMS: dict[str, Callable[[], tuple]] = {
    "layers": lambda: _with(_layers, _weights(), _features(), _ADAM),
    "clip": lambda: _with(_layers, _weights(), _features(), _CLIPPED),
    "adafactor": lambda: _with(
        _layers, _weights(), _features(), optax.adafactor(1e-2, min_dim_size_to_factor=32)
    ),
    "accumulated": lambda: _with(
        _layers, _weights(), _features(), optax.MultiSteps(_CLIPPED, 2).gradient_transformation()
    ),
    "finite": lambda: _with(_layers, _weights(), _features(), optax.apply_if_finite(_ADAM, 2)),
    "dropout": lambda: _with(
        _dropped, _weights(), _features(), _ADAM, key=np.asarray(jax.random.PRNGKey(0))
    ),
    "experts": lambda: _with(_experts, _moe(), _features(), _ADAM),
    "embedding": lambda: _with(_embedded, _table(), _words(), _ADAM),
    "transformer": lambda: _with(_transformer, _decoder(), _words(), _CLIPPED),
    "loss scale": lambda: (
        _scaled, {"params": _weights(), "scale": np.float32(2.0**126)}, _features()
    ),
    "batch norm": lambda: (
        _normalized, {"params": _weights(), "own": np.zeros(256, np.float32)}, _features()
    ),
}  # fmt: skip
_FURTHER = {
    "qkv": (None, None, "model"), "o": (None, "model", None), "gate": (None, None),
    "table": ("model", None), "in": (None, "model"), "out": ("model", None), "own": ("model",),
}  # fmt: skip


def _rule(over: str) -> Callable:
    """Matrices over the further axis as their names say, and over `over` along another one."""

    def rule(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        name = path.rsplit("/", maxsplit=1)[-1]
        if name not in _FURTHER or leaf.ndim < 2 and name != "own":
            return P()
        parts: list[Any] = [*[None] * leaf.ndim, *_FURTHER[name]][-leaf.ndim :]
        if name != "own":
            free = [n for n, part in enumerate(parts) if part is None and leaf.shape[n] >= 32]
            parts[free[-1]] = over
        return P(*parts)

    return rule


_UNLIKE = "XLA for CPU lays the product of a gradient out otherwise, and rounds it otherwise"
_OLD = pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason=_UNLIKE)


@pytest.mark.parametrize("sizes", [None, pytest.param((2, 4), marks=_OLD), (4, 2)])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"adafactor"}))
def test_the_bits_are_those_of_pmap(name, sizes):
    step, state, batch = PROGRAMS[name]()
    options: Any = {"shardings": "fsdp", "gradients": "reduce"}
    if sizes is not None:
        axes = ("replica", "shard")
        mesh = Mesh(np.array(jax.devices()).reshape(sizes), axes)
        options |= {"mesh": mesh, "mesh_axes": axes}
    view, _ = compare(step, state, *batch, **options)

    shards = 8 if sizes is None else sizes[1]
    found = view.report()
    cut = sum(leaf.bytes_per_device for leaf in found.leaves if leaf.is_cut and leaf.shared)
    whole = sum(leaf.bytes_under_pmap for leaf in found.leaves if leaf.is_cut and leaf.shared)
    assert whole > 0
    assert cut * shards == whole


@pytest.mark.parametrize("sizes", [{"i": 2, "model": 4}, {"i": 4, "model": 2}, None])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"accumulated"}))
def test_with_a_further_axis_only_sums_have_another_order(name, sizes):
    axes = ("i",) if sizes else ("replica", "shard")
    sizes = sizes or {"replica": 2, "shard": 2, "model": 2}
    count = 8 // sizes["model"]
    with jax.enable_x64(True):  # noqa: FBT003
        step, state, batch = PROGRAMS[name]()
        wide = lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf
        state, batch = jax.tree.map(lambda leaf: wide(np.asarray(leaf)), (state, batch))
        batch = jax.tree.map(lambda leaf: leaf[:count], batch)
        mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
        view = global_view(step, "i", mesh=mesh, mesh_axes=axes, shardings=_rule(axes[-1]))
        held = view.place(state, *batch, stacked=False)
        mapped = jax.pmap(step, "i", devices=jax.devices()[:count])
        wanted = jax.tree.map(lambda leaf: leaf[:count], stacked(state))
        for _ in range(3):
            held, _ = jax.block_until_ready(view(held, *batch))
            wanted, _ = jax.block_until_ready(mapped(wanted, *batch))
        copies = view.stacked(held)

    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(copies), jax.tree.leaves(wanted), strict=True
    ):
        theirs = np.asarray(theirs)
        bound = 1e-9 * float(np.abs(theirs).max(initial=0))
        message = jax.tree_util.keystr(path)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=message)
