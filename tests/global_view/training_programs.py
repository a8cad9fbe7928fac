"""Thirty training steps as they are written for pmap, each with a state and a batch.

A program is `(step, state, batch)`: the step of one device, which takes the state and its part of
the batch, the state that all devices start with, and a batch for 8 devices, `[8, ...]`.

The hidden layers are 384 wide, so that parts of two matrices never have one shape where the whole
ones have two: XLA for CPU turns a division by a scalar into a product with its inverse where one
shape only is divided, and rounds twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

Tree = Any
Made = tuple[Callable, Tree, tuple[np.ndarray, ...]]

_WIDE, _HIDDEN, _ROWS, _WORDS = 64, 384, 4, 256


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def _weights() -> Tree:
    scale = np.float32(0.125)
    return {"in": _normal(_WIDE, _HIDDEN) * scale, "out": _normal(_HIDDEN, _WIDE) * scale / 2}


def _features() -> tuple[np.ndarray, ...]:
    return _normal(8, _ROWS, _WIDE), _normal(8, _ROWS, _WIDE)[::-1]


def _words() -> tuple[np.ndarray, ...]:
    return (np.random.default_rng(1).integers(0, _WORDS, (8, _ROWS, 8)),)


def _key() -> np.ndarray:
    return np.asarray(jax.random.PRNGKey(0))


# ---- losses


def _layers(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2)


def _dropped(p, x, y, key):
    hidden = jnp.tanh(x @ p["in"])
    kept = jax.random.bernoulli(key, 0.75, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden, 0) @ p["out"] - y) ** 2)


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


def _convolved(p, x, y):
    image = x.reshape(_ROWS, 8, 8, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    hidden = lax.conv_general_dilated(image, p["stem"], (1, 1), "SAME", dimension_numbers=numbers)
    hidden = jax.nn.relu(hidden)
    hidden = lax.conv_general_dilated(hidden, p["conv"], (2, 2), "SAME", dimension_numbers=numbers)
    pooled = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean((pooled.mean((1, 2)) @ p["head"] - y) ** 2)


def _recurrent(p, x, y):
    def turn(carry, row):
        hidden, cell = carry
        gates = jnp.concatenate([row, hidden], -1) @ p["gates"]
        i, f, g, o = jnp.split(gates, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    start = (jnp.zeros((1, _WIDE), x.dtype),) * 2
    _, hidden = lax.scan(turn, start, x[:, None])
    return jnp.mean((hidden[:, 0] @ p["out"] - y) ** 2)


def _contrasted(p, x, y):
    """Each row against those of all devices."""
    ours, theirs = x @ p["one"], y @ p["two"]
    everyone = lax.all_gather(theirs, "i").reshape(-1, theirs.shape[-1])
    own = lax.axis_index("i") * _ROWS + jnp.arange(_ROWS)
    return optax.softmax_cross_entropy_with_integer_labels(ours @ everyone.T / 64, own).mean()


def _encoded(p, x, y, key):
    """A variational autoencoder."""
    mean, spread = jnp.split(jnp.tanh(x @ p["encoder"]), 2, -1)
    hidden = mean + jnp.exp(spread / 2) * jax.random.normal(key, mean.shape, x.dtype)
    rate = jnp.mean(jnp.exp(spread) + mean**2 - 1 - spread) / 2
    return jnp.mean((hidden @ p["decoder"] - y) ** 2) + rate / 16


def _denoised(p, x, y, key):
    """A diffusion model guesses the noise that was added."""
    times, noises = jax.random.split(key)
    time = jax.random.uniform(times, (_ROWS, 1), x.dtype)
    noise = jax.random.normal(noises, x.shape, x.dtype)
    noisy = jnp.cos(time) * x + jnp.sin(time) * noise
    waves = jnp.sin(time * jnp.arange(1, _WIDE + 1, dtype=x.dtype)) + y
    return jnp.mean((jnp.tanh(noisy @ p["in"] + waves @ p["time"]) @ p["out"] - noise) ** 2)


def _halved(p, x, y):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p)
    hidden = jnp.tanh(x.astype(jnp.bfloat16) @ low["in"])
    return jnp.mean(((hidden @ low["out"]).astype(x.dtype) - y) ** 2)


# ---- steps


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


def _accumulated(state, x, y):
    """Gradients of small batches, added up in a scan."""

    def turn(total, rows):
        gradient = jax.grad(_layers)(state["params"], *(row[None] for row in rows))
        return jax.tree.map(jnp.add, total, gradient), None

    total, _ = lax.scan(turn, jax.tree.map(jnp.zeros_like, state["params"]), (x, y))
    gradient = lax.pmean(jax.tree.map(lambda g: g / _ROWS, total), "i")
    updates, rest = _ADAM.update(gradient, state["tx"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "tx": rest}, x.mean()


def _sharpened(state, *batch):
    """The gradient where the loss is worst nearby (SAM)."""
    params = state["params"]
    first = lax.pmean(jax.grad(_layers)(params, *batch), "i")
    norm = optax.tree.norm(first)
    worse = jax.tree.map(lambda p, g: p + 0.0625 * g / norm, params, first)
    gradient = lax.pmean(jax.grad(_layers)(worse, *batch), "i")
    updates, rest = _ADAM.update(gradient, state["tx"], params)
    return {"params": optax.apply_updates(params, updates), "tx": rest}, norm


def _switched(state, *batch):
    """Three optimizers in turn, in the branches of a switch, twice in a loop."""
    gradient = lax.pmean(jax.grad(_layers)(state["params"], *batch), "i")

    def with_adam(params, rest):
        updates, rest = _ADAM.update(gradient, rest, params)
        return optax.apply_updates(params, updates), rest

    plain = lambda params, rest: (jax.tree.map(lambda p, g: p - g / 8, params, gradient), rest)
    signs = lambda p, g: p - jnp.sign(g) / 1024
    by_sign = lambda params, rest: (jax.tree.map(signs, params, gradient), rest)

    def turn(number, held):
        which = (state["turn"] + number) % 3
        return lax.switch(which, [with_adam, plain, by_sign], *held)

    params, rest = lax.fori_loop(0, 2, turn, (state["params"], state["tx"]))
    return {"params": params, "tx": rest, "turn": state["turn"] + 1}, optax.tree.norm(gradient)


def _rivals(state, x, y):
    """A generator and a critic, each with an optimizer."""
    own = jax.random.fold_in(state["key"], lax.axis_index("i"))
    noise = jax.random.normal(jax.random.fold_in(own, state["turn"]), x.shape, x.dtype)
    made = lambda p: jnp.tanh(noise @ p["in"]) @ p["out"] + y
    score = lambda p, rows: jnp.mean(jax.nn.leaky_relu(rows @ p["in"]) @ p["score"])
    believed = lambda p: score(p, lax.stop_gradient(made(state["maker"]))) - score(p, x)
    seen, of_critic = jax.value_and_grad(believed)(state["critic"])
    updates, of_first = _ADAM.update(lax.pmean(of_critic, "i"), state["first"], state["critic"])
    critic = optax.apply_updates(state["critic"], updates)
    of_maker = jax.grad(lambda p: -score(critic, made(p)))(state["maker"])
    updates, of_second = _ADAM.update(lax.pmean(of_maker, "i"), state["second"], state["maker"])
    maker = optax.apply_updates(state["maker"], updates)
    new = {"maker": maker, "critic": critic, "first": of_first, "second": of_second}
    return {**state, **new, "turn": state["turn"] + 1}, lax.pmean(seen, "i")


def _evolved(state, x, y):
    """Ranks over all devices, noise made again."""
    own = jax.random.fold_in(state["key"], lax.axis_index("i"))
    keys = jax.random.split(jax.random.fold_in(own, state["turn"]), 4)

    def noise_of(key):
        parts = jax.random.split(key, 2)
        draw = lambda key, leaf: jax.random.normal(key, leaf.shape, leaf.dtype)
        return {"in": draw(parts[0], params["in"]), "out": draw(parts[1], params["out"])}

    params = state["params"]
    moved = lambda key: jax.tree.map(lambda p, e: p + 0.0625 * e, params, noise_of(key))
    mine = lax.map(lambda key: -_layers(moved(key), x, y), keys)
    everyone = lax.all_gather(mine, "i").reshape(-1)
    ranks = jnp.sum(everyone[None] < mine[:, None], 1).astype(x.dtype) / everyone.size - 0.5
    gradient = jax.tree.map(jnp.zeros_like, params)
    for number in range(4):
        noise = noise_of(keys[number])
        gradient = jax.tree.map(lambda g, e, r=ranks[number]: g - r * e, gradient, noise)
    updates, rest = _ADAM.update(lax.pmean(gradient, "i"), state["tx"], params)
    params = optax.apply_updates(params, updates)
    return {**state, "params": params, "tx": rest, "turn": state["turn"] + 1}, everyone.mean()


def _played(state, x, y):
    """PPO: a game in a scan, and epochs of small batches in two more."""
    own = jax.random.fold_in(state["key"], lax.axis_index("i"))
    key = jax.random.fold_in(own, state["turn"])

    def chances(params, seen):
        hidden = jnp.tanh(seen @ params["in"]) @ params["out"]
        return jax.nn.log_softmax(hidden[:, :4]), hidden[:, 4]

    def turn(seen, key):
        logits, value = chances(state["params"], seen)
        action = jax.random.categorical(key, logits)
        chance = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
        new = jnp.tanh(seen + y * action[:, None].astype(seen.dtype) / 4)
        return new, (seen, action, chance, value, -jnp.mean(new**2, -1))

    _, (seen, action, chance, value, reward) = lax.scan(turn, x, jax.random.split(key, 8))
    rows = jax.tree.map(
        lambda leaf: leaf.reshape(4, 8, *leaf.shape[2:]),
        (seen, action, chance, reward, reward - value),
    )

    def loss(params, rows):
        seen, action, before, gain, better = rows
        logits, value = chances(params, seen)
        now = jnp.take_along_axis(logits, action[:, None], 1)[:, 0]
        mean, spread = lax.pmean((better.mean(), better.var()), "i")
        better = (better - mean) * lax.rsqrt(spread + 1e-6)
        ratio = jnp.exp(now - before)
        gained = jnp.minimum(ratio * better, jnp.clip(ratio, 0.8, 1.2) * better)
        return jnp.mean((value - gain) ** 2) / 2 - jnp.mean(gained)

    def update(held, rows):
        gradient = lax.pmean(jax.grad(loss)(held[0], rows), "i")
        updates, rest = _ADAM.update(gradient, held[1], held[0])
        return (optax.apply_updates(held[0], updates), rest), None

    epoch = lambda held, _: (lax.scan(update, held, rows)[0], None)
    (params, rest), _ = lax.scan(epoch, (state["params"], state["tx"]), length=2)
    new = {"params": params, "tx": rest, "turn": state["turn"] + 1}
    return {**state, **new}, lax.pmean(reward.mean(), "i")


def _valued(state, x, y):
    """Q learning: another network, copied now and then, says what the next state is worth."""
    value = lambda p, seen: jnp.tanh(seen @ p["in"]) @ p["out"]
    next_one = value(state["target"], y).max(-1)
    loss = lambda p: jnp.mean(optax.huber_loss(value(p, x)[:, 0], x.mean(-1) + next_one / 2))
    worth, gradient = jax.value_and_grad(loss)(state["params"])
    updates, rest = _ADAM.update(lax.pmean(gradient, "i"), state["tx"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    due = state["turn"] % 2 == 1
    target = lax.cond(due, lambda: params, lambda: state["target"])
    new = {"params": params, "tx": rest, "target": target, "turn": state["turn"] + 1}
    return new, lax.pmean(worth, "i")


# ---- networks of libraries


def _haiku() -> Made:
    hk = pytest.importorskip("haiku")

    def net(x):
        hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(_HIDDEN)(x))
        return hk.Linear(_WIDE)(jax.nn.gelu(hidden))

    model = hk.without_apply_rng(hk.transform(net))
    params = model.init(jax.random.PRNGKey(0), jnp.ones((1, _WIDE)))
    loss = lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2)
    return _with(loss, jax.tree.map(np.asarray, params), _features(), _ADAM)


def _flax() -> Made:
    nn = pytest.importorskip("flax.linen")
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            dense = nn.Dense(_HIDDEN, use_bias=False)  # whose gradient would be but roundings
            x = nn.BatchNorm(use_running_average=not train, momentum=0.75)(dense(x))
            x = nn.Dropout(0.25, deterministic=not train)(nn.relu(x))
            return nn.Dense(_WIDE)(x)

    class State(train_state.TrainState):
        batch_stats: Any
        key: Any

    model = Net()
    variables = model.init(jax.random.PRNGKey(0), jnp.ones((1, _WIDE)), train=False)
    names = {"params": variables["params"], "batch_stats": variables["batch_stats"]}
    state = State.create(apply_fn=model.apply, tx=_ADAM, key=_key(), **names)

    def step(state, x, y):
        own = jax.random.fold_in(jax.random.fold_in(state.key, lax.axis_index("i")), state.step)

        def loss_of(params):
            given = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(
                given, x, train=True, mutable=["batch_stats"], rngs={"dropout": own}
            )
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (loss, stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        gradient = lax.pmean(gradient, "i")
        return state.apply_gradients(grads=gradient, batch_stats=stats), lax.pmean(loss, "i")

    return step, jax.tree.map(np.asarray, state), _features()


def _equinox() -> Made:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(_WIDE, _WIDE, _HIDDEN, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda p, x, y: jnp.mean((jax.vmap(eqx.combine(p, static))(x) - y) ** 2)
    return _with(loss, jax.tree.map(np.asarray, params), _features(), _ADAM)


def _nnx() -> Made:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(_WIDE, _HIDDEN, rngs=rngs)
            self.norm = nnx.LayerNorm(_HIDDEN, rngs=rngs)
            self.second = nnx.Linear(_HIDDEN, _WIDE, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))

    def loss(params, x, y):
        full = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return jnp.mean((nnx.merge(graph, full)(x) - y) ** 2)

    return _with(loss, params, _features(), _ADAM)


# ---- all of them


def _with(loss: Callable, params: Tree, batch: tuple, tx: Any, **more: Any) -> Made:
    state = {"params": params, "tx": tx.init(params), "mean": params, "turn": np.int32(0), **more}
    return _trained(loss, tx), state, batch


def _moe() -> Tree:
    shapes = {"gate": (_WIDE, 4), "in": (4, _WIDE, 128), "out": (4, 128, _WIDE)}
    return {name: _normal(*shape) / 8 for name, shape in shapes.items()}


def _table() -> Tree:
    return {"table": _normal(_WORDS, _WIDE) / 8}


def _decoder() -> Tree:
    shapes = {
        "qkv": (_WIDE, 3 * _WIDE), "o": (_WIDE, _WIDE), "in": (_WIDE, 128), "out": (128, _WIDE)
    }  # fmt: skip
    return {**_table(), "layers": {name: _normal(2, *s) / 16 for name, s in shapes.items()}}


def _normals(**shapes: tuple[int, ...]) -> Tree:
    return {name: _normal(*shape) / 8 for name, shape in shapes.items()}


def _held(*, target: bool = False, key: bool = True) -> Tree:
    """Two layers with Adam."""
    params = _weights()
    state = {"params": params, "tx": _ADAM.init(params), "turn": np.int32(0)}
    return state | ({"target": params} if target else {}) | ({"key": _key()} if key else {})


def _two_nets() -> Tree:
    maker = _weights()
    critic = _normals(**{"in": (_WIDE, _HIDDEN), "score": (_HIDDEN, 8)})
    rest = {"first": _ADAM.init(critic), "second": _ADAM.init(maker)}
    return {"maker": maker, "critic": critic, **rest, "turn": np.int32(0), "key": _key()}


_ADAM = optax.adamw(1e-2)
_CLIPPED = optax.chain(optax.clip_by_global_norm(0.125), _ADAM)
_FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=32)
_IN_TURNS = optax.MultiSteps(_CLIPPED, 2).gradient_transformation()
PROGRAMS: dict[str, Callable[[], Made]] = {
    # optimizers
    "layers": lambda: _with(_layers, _weights(), _features(), _ADAM),
    "momentum": lambda: _with(_layers, _weights(), _features(), optax.sgd(0.125, momentum=0.5)),
    "lamb": lambda: _with(_layers, _weights(), _features(), optax.lamb(1e-2)),
    "adafactor": lambda: _with(_layers, _weights(), _features(), _FACTORED),
    "clip": lambda: _with(_layers, _weights(), _features(), _CLIPPED),
    "MultiSteps": lambda: _with(_layers, _weights(), _features(), _IN_TURNS),
    "finite": lambda: _with(_layers, _weights(), _features(), optax.apply_if_finite(_ADAM, 2)),
    "loss scale": lambda: (
        _scaled, {"params": _weights(), "scale": np.float32(2.0**126)}, _features()
    ),
    "switch": lambda: (_switched, _held(key=False), _features()),
    "sharpness": lambda: (_sharpened, {n: _held()[n] for n in ("params", "tx")}, _features()),
    "small batches": lambda: (_accumulated, {n: _held()[n] for n in ("params", "tx")}, _features()),
    "half precision": lambda: _with(_halved, _weights(), _features(), _ADAM),
    # networks
    "dropout": lambda: _with(_dropped, _weights(), _features(), _ADAM, key=_key()),
    "batch norm": lambda: (
        _normalized, {"params": _weights(), "own": np.zeros(_HIDDEN, np.float32)}, _features()
    ),
    "experts": lambda: _with(_experts, _moe(), _features(), _ADAM),
    "embedding": lambda: _with(_embedded, _table(), _words(), _ADAM),
    "transformer": lambda: _with(_transformer, _decoder(), _words(), _CLIPPED),
    "convolutions": lambda: _with(
        _convolved, _normals(stem=(3, 3, 1, 64), conv=(3, 3, 64, 64), head=(64, 64)),
        _features(), _ADAM,
    ),
    "LSTM": lambda: _with(
        _recurrent, _normals(gates=(2 * _WIDE, 4 * _WIDE), out=(_WIDE, _WIDE)), _features(), _ADAM
    ),
    "haiku": _haiku,
    "flax": _flax,
    "equinox": _equinox,
    "nnx": _nnx,
    # ways to learn
    "contrast": lambda: _with(
        _contrasted, _normals(one=(_WIDE, _HIDDEN), two=(_WIDE, _HIDDEN)), _features(), _ADAM
    ),
    "autoencoder": lambda: _with(
        _encoded, _normals(encoder=(_WIDE, 2 * _HIDDEN), decoder=(_HIDDEN, _WIDE)), _features(),
        _ADAM, key=_key(),
    ),
    "diffusion": lambda: _with(
        _denoised, {**_weights(), "time": _normal(_WIDE, _HIDDEN) / 8}, _features(), _ADAM,
        key=_key(),
    ),
    "GAN": lambda: (_rivals, _two_nets(), _features()),
    "ES": lambda: (_evolved, _held(), _features()),
    "PPO": lambda: (_played, _held(), _features()),
    "Q learning": lambda: (_valued, _held(target=True, key=False), _features()),
}  # fmt: skip
