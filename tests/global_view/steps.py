"""Training steps, each with a state and a batch of eight devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

Array = jax.Array


class Case(NamedTuple):
    """A step of one device, its state, and a batch `[N, ...]`."""

    step: Callable
    state: Any
    batch: tuple[Any, ...]


_random = np.random.default_rng(0)
X, Y = _random.normal(size=(2, 8, 2, 64)).astype(np.float32)


# ---- optimizers in branches and loops

WEIGHTS = {
    "a": np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32) / 8,
    "b": np.random.default_rng(2).normal(size=(256, 64)).astype(np.float32) / 16,
}
STATE = {"params": WEIGHTS, "mean": WEIGHTS, "sums": WEIGHTS, "turn": np.int32(0)}


def loss_of(params: dict, x: Array, y: Array) -> Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def with_update(update: Callable[[dict, dict], dict]) -> Callable:
    def step(state: dict, x: Array, y: Array) -> dict:
        gradient = lax.pmean(jax.grad(loss_of)(state["params"], x, y), "i")
        return {**update(state, gradient), "turn": state["turn"] + 1}

    return step


def momentum(state: dict, gradient: dict) -> dict:
    mean = jax.tree.map(lambda m, g: 0.75 * m + g, state["mean"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.125 * m, state["params"], mean)
    return {**state, "params": params, "mean": mean}


def skips(state: dict, gradient: dict) -> dict:
    finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(gradient)])
    return lax.cond(jnp.all(finite), lambda: momentum(state, gradient), lambda: state)


def _each_second(state: dict, gradient: dict) -> dict:
    sums = jax.tree.map(jnp.add, state["sums"], gradient)
    apply = lambda: {**momentum(state, sums), "sums": jax.tree.map(jnp.zeros_like, sums)}
    return lax.cond(state["turn"] % 2 == 1, apply, lambda: {**state, "sums": sums})


def _either(state: dict, gradient: dict) -> dict:
    signs = lambda: momentum(state, jax.tree.map(jnp.sign, gradient))
    return lax.cond(state["turn"] % 2 == 0, signs, lambda: momentum(state, gradient))


def _while_small(state: dict, gradient: dict) -> dict:
    turn = lambda carry: (carry[0] + 1, momentum(carry[1], gradient))
    return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, state))[1]


def _by_rows(state: dict, gradient: dict) -> dict:
    """Return a scan that goes over leaves and makes some."""
    pairs = state["params"]["a"], gradient["a"]
    _, rows = lax.scan(lambda _, pair: (None, pair[0] - 0.125 * pair[1]), None, pairs)
    return {**state, "sums": {**state["sums"], "a": rows}}


def _sorted_in_a_branch(state: dict, gradient: dict) -> dict:
    middle = lambda g: jnp.sort(g.ravel())[g.size // 2]
    centered = lambda: jax.tree.map(lambda g: g - middle(g), gradient)
    return lax.cond(state["turn"] < 1, lambda: momentum(state, centered()), lambda: state)


UPDATES = {
    "skips": skips,
    "each second": _each_second,
    "either": _either,
    "while": _while_small,
    "scan": lambda s, g: lax.scan(lambda s, _: (momentum(s, g), None), s, None, length=3)[0],
    "rows": _by_rows,
    "calls": lambda s, g: jax.jit(lambda s, g: jax.jit(skips)(s, g))(s, g),
    "branch in a loop": lambda s, g: lax.fori_loop(0, 2, lambda _, s: skips(s, g), s),
}
_ADAMW = optax.adamw(1e-2)
_CLIPPING = optax.chain(optax.clip_by_global_norm(0.125), _ADAMW)
WRAPPERS = {
    "MultiSteps": optax.MultiSteps(_ADAMW, 2, should_skip_update_fn=optax.skip_not_finite),
    "clip": optax.MultiSteps(_CLIPPING, 2),
    "apply_if_finite": optax.apply_if_finite(_ADAMW, 3),
}


def _with_optax(optimizer: Any) -> Case:
    def step(state, x, y):
        params, rest = state
        gradient = lax.pmean(jax.grad(loss_of)(params, x, y), "i")
        updates, rest = optimizer.update(gradient, rest, params)
        return (optax.apply_updates(params, updates), rest), None

    return Case(step, (WEIGHTS, optimizer.init(WEIGHTS)), (X, Y))


# ---- a loss over layers

LAYERED = _random.normal(size=(3, 64, 64)).astype(np.float32) / 8
ROWS = _random.normal(size=(8, 4, 64)).astype(np.float32)


def with_loss(loss: Callable) -> Callable:
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.25 * lax.pmean(gradient, "i"), lax.pmean(value, "i")

    return step


def one_by_one(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return jnp.sum(x * x)


def in_a_scan(w, x):
    return jnp.sum(lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0] ** 2)


def in_half_precision(w, x):
    half, rows = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jnp.sum(jnp.tanh(jnp.tanh(rows @ half[0]) @ half[1]).astype(np.float32))


def scan_in_half_precision(w, x):
    half, rows = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    turn = lambda x, layer: (jnp.tanh(x @ layer), None)
    return jnp.sum(lax.scan(turn, rows, half)[0].astype(jnp.float32) ** 2)


def read_in_each_turn(w, x):
    return jnp.sum(lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w[0]), x) ** 2)


def _over_sharded_rows(w, x):
    return jnp.sum(lax.scan(lambda x, row: (jnp.tanh(x + row), None), x, w[0])[0] ** 2)


def _given_back_by_a_body(w, x):
    x, rows = lax.scan(lambda x, layer: (jnp.tanh(x @ layer), layer), x, w)
    return jnp.sum(x * x) + jnp.sum(rows * rows)


def _with_collectives(w, x):
    turn = lambda _, h: jnp.tanh(h @ w[0]) * (1 + lax.axis_index("i") / 8)
    return jnp.sum((lax.fori_loop(0, 2, turn, x) @ lax.all_gather(w[1], "i").mean(0)) ** 2)


LOSSES = {
    "layers": one_by_one,
    "layer scan": in_a_scan,
    "checkpoints": jax.checkpoint(one_by_one),
    "call": lambda w, x: jax.jit(lambda w, x: jnp.tanh(x @ w[0]) @ w[1])(w, x).sum(),
    "half precision": in_half_precision,
    "half precision scan": scan_in_half_precision,
    "each turn": read_in_each_turn,
    "sharded rows": _over_sharded_rows,
    "given back": _given_back_by_a_body,
    "collectives": _with_collectives,
}


# ---- trainers


def adam(state: dict, x: Array, y: Array) -> tuple[dict, dict]:
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], x, y)
    gradient = lax.pmean(gradient, "i")
    turn = state["turn"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["sums"], gradient)
    size = lambda m, s: (m / (1 - 0.9**turn)) / (jnp.sqrt(s / (1 - 0.99**turn)) + 1e-8)
    move = lambda p, m, s: p - 0.01 * size(m, s)
    params = jax.tree.map(move, state["params"], mean, square)
    new = {"params": params, "mean": mean, "sums": square, "turn": turn}
    return new, {"loss": lax.pmean(loss, "i"), "own": loss}


_ZEROS = jax.tree.map(np.zeros_like, WEIGHTS)
ADAM_STATE = {"params": WEIGHTS, "mean": _ZEROS, "sums": _ZEROS, "turn": np.int32(0)}


def unsynchronized(state, x):
    """Return a step with statistics that stay those of each device."""
    gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w - state["mean"]) ** 2))(state["w"])
    mean = 0.5 * state["mean"] + 0.5 * jnp.mean(x @ state["w"], 0)  # never averaged
    return {"w": state["w"] - 0.5 * lax.pmean(gradient, "i"), "mean": mean}


UNSYNCHRONIZED_STATE = {"w": LAYERED[0], "mean": np.zeros(64, np.float32)}


def _keys() -> Case:
    def step(state, x):
        own = jax.random.fold_in(state["own"], lax.axis_index("i"))
        noise = jax.random.key_data(own)[0] % 7 + jax.random.key_data(state["all"])[1] % 5
        w = state["w"] + lax.pmean(jnp.mean(x) * noise, "i")
        return {"own": own, "all": jax.random.split(state["all"])[0], "w": w}

    keys = {"own": jax.random.key(0), "all": jax.random.key(1, impl="rbg")}
    return Case(step, {**keys, "w": np.float32(0)}, (ROWS,))


def _flax_trainer() -> Case:
    """Return a trainer with dropout, and a batch norm that is not synchronized."""
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Conv(8, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
            x = nn.relu(x).reshape((x.shape[0], -1))
            x = nn.Dropout(0.25, deterministic=not train)(x)
            return nn.Dense(16)(x)

    class State(train_state.TrainState):
        batch_stats: dict

    def step(state, batch, rng):
        rngs = {"dropout": jax.random.fold_in(rng, state.step)}

        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            options = {"train": True, "mutable": ["batch_stats"], "rngs": rngs}
            logits, new = state.apply_fn(variables, batch["image"], **options)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return losses.mean(), new

        (loss, new), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        gradient = lax.pmean(gradient, "i")
        state = state.apply_gradients(grads=gradient, batch_stats=new["batch_stats"])
        return state, {"loss": lax.pmean(loss, "i")}

    model = Net()
    variables = model.init({"params": jax.random.key(0)}, jnp.ones((1, 4, 4, 3)), train=False)
    train = State.create(apply_fn=model.apply, tx=optax.adamw(1e-3), **variables)
    random = np.random.default_rng(0)
    image = random.normal(size=(8, 4, 4, 4, 3)).astype(np.float32)
    batch = {"image": image, "label": random.integers(0, 16, (8, 4)).astype(np.int32)}
    return Case(step, train, (batch, jax.random.split(jax.random.key(1), 8)))


_UPDATES = {**UPDATES, "sort in a branch": _sorted_in_a_branch}
CASES: dict[str, Callable[[], Case]] = {
    **{name: lambda of=of: Case(with_update(of), STATE, (X, Y)) for name, of in _UPDATES.items()},
    **{name: lambda of=of: _with_optax(of) for name, of in WRAPPERS.items()},
    **{name: lambda of=of: Case(with_loss(of), LAYERED, (ROWS,)) for name, of in LOSSES.items()},
    "adam": lambda: Case(adam, ADAM_STATE, (X, Y)),
    "unsynchronized": lambda: Case(unsynchronized, UNSYNCHRONIZED_STATE, (ROWS,)),
    "keys": _keys,
    "flax": _flax_trainer,
}
