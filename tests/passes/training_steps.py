"""Fifty training steps of one device: ten models, five ways to update. The mapped axis is `i`.

A step takes a state that all devices share, and a batch of its own: `[4, 6]` of f32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

State = dict[str, Any]
DEVICES = 8
_RNG = np.random.default_rng(5)
BATCH = _RNG.normal(size=(DEVICES, 4, 6)).astype(np.float32)


def _weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {
        name: 0.3 * _RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
    }


# --- losses, `(weights, x, key) -> number`


def _linear(w, x, key):
    return jnp.mean((x @ w["a"]) ** 2)


def _mlp(w, x, key):
    return jnp.mean(jnp.tanh(jax.nn.gelu(x @ w["a"]) @ w["b"]) ** 2)


def _dropout(w, x, key):
    kept = jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("i")), 0.8, x.shape)
    return jnp.mean(jax.nn.softplus(jnp.where(kept, x, 0) @ w["a"]))


def _batch_norm(w, x, key):
    y = x @ w["a"]
    mean, square = lax.pmean((y.mean(0), (y**2).mean(0)), "i")
    return jnp.mean(jax.nn.relu((y - mean) * lax.rsqrt(square - mean**2 + 1e-3) * w["b"]))


def _attention(w, x, key):
    q, k, v = (x @ w[name] for name in "abc")
    return jnp.sum(jax.nn.softmax(q @ k.T / 2) @ v)


def _convolution(w, x, key):
    y = lax.conv(x[:, None], w["a"][:, None], (1,), "SAME")
    return jnp.mean(lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID"))


def _recurrent(w, x, key):
    step = lambda h, row: (jnp.tanh(row @ w["a"] + h @ w["b"]), h.sum())
    last, sums = lax.scan(step, jnp.zeros((4, 3)), jnp.stack([x, -x]))
    return last.sum() + sums.mean()


def _embedding(w, x, key):
    return jnp.log2(1 + w["a"][(jnp.abs(x) * 3).astype(jnp.int32) % 6] ** 2).sum()


def _evolution(w, x, key):
    noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("i")), w["a"].shape)
    scores = lax.all_gather(jnp.mean((x @ (w["a"] + noise)) ** 2), "i")
    return jnp.sum(w["a"] * lax.pmean(noise, "i")) * lax.stop_gradient(scores.std())


def _checkpointed(w, x, key):
    layer = jax.checkpoint(lambda x, w: jax.nn.silu(x @ w))
    return jnp.mean(layer(layer(x, w["a"]), w["b"]) ** 2)


_MODELS: dict[str, tuple[Callable, dict[str, np.ndarray]]] = {
    "linear": (_linear, _weights(a=(6, 3))),
    "mlp": (_mlp, _weights(a=(6, 5), b=(5, 2))),
    "dropout": (_dropout, _weights(a=(6, 3))),
    "batch norm": (_batch_norm, _weights(a=(6, 3), b=(3,))),
    "attention": (_attention, _weights(a=(6, 4), b=(6, 4), c=(6, 3))),
    "convolution": (_convolution, _weights(a=(2, 3))),
    "recurrent": (_recurrent, _weights(a=(6, 3), b=(3, 3))),
    "embedding": (_embedding, _weights(a=(6, 3))),
    "evolution": (_evolution, _weights(a=(6, 3))),
    "checkpointed": (_checkpointed, _weights(a=(6, 5), b=(5, 2))),
}
_OPTIMIZERS = {
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.lamb(1e-2), 3),
}


def _step_of(loss: Callable, optimizer: optax.GradientTransformation) -> Callable:
    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        key, own = jax.random.split(jax.random.wrap_key_data(state["key"]))
        value, gradient = jax.value_and_grad(loss)(state["weights"], batch, own)
        gradient = lax.pmean(gradient, "i")
        updates, kept = optimizer.update(gradient, state["optimizer"], state["weights"])
        weights = optax.apply_updates(state["weights"], updates)
        mean = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["mean"], weights)
        key = jax.random.key_data(key)
        new = {"weights": weights, "optimizer": kept, "mean": mean, "key": key}
        return new, lax.pmean(value, "i")

    return step


def _state_of(weights: Any, optimizer: optax.GradientTransformation) -> State:
    key = np.asarray(jax.random.key_data(jax.random.key(0)))
    return {"weights": weights, "optimizer": optimizer.init(weights), "mean": weights, "key": key}


STEPS = {
    f"{model}, {name}": (_step_of(loss, optimizer), _state_of(weights, optimizer))
    for model, (loss, weights) in _MODELS.items()
    for name, optimizer in _OPTIMIZERS.items()
}
