"""Small programs in the shapes in which pmap is used: each runs to the end and returns numbers.

Each takes `pmap`, to be called as `jax.pmap`, and `compiled`, which a user would have written as
`jax.jit`; it gives what it computed, and the devices that its last arrays lie on. All have 4
devices, unlike sizes elsewhere, and start where gradients are not 0.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Program: TypeAlias = Callable[[Callable, Callable], Any]
_DEVICES = 4
PROGRAMS: dict[str, Program] = {}


def program(run: Program) -> Program:
    PROGRAMS[run.__name__] = run
    return run


def _replicated(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * _DEVICES), tree)


def _batches(steps: int, *shape: int) -> np.ndarray:
    """Return `[steps, devices, *shape]`"""
    return np.random.default_rng(0).normal(size=(steps, _DEVICES, *shape)).astype(np.float32)


def _network(params: Any, x: jax.Array) -> jax.Array:
    """`[b, 3] -> [b]`"""
    hidden = jax.nn.relu(x @ params["first"] + params["bias"])
    return hidden @ params["second"]


def _parameters() -> Any:
    first, second = jax.random.split(jax.random.key(1))
    return {
        "first": jax.random.normal(first, (3, 5)),
        "bias": jnp.full(5, 0.1),
        "second": jax.random.normal(second, (5,)),
    }


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((_network(params, batch) - jnp.sum(batch, 1)) ** 2)


@program
def train_step_with_donated_state(pmap, compiled):
    """Replicated parameters and momentum, pmean of the gradient."""

    @functools.partial(pmap, axis_name="batch", donate_argnums=(0,))
    def train_step(state, batch):
        params, momentum = state
        loss, slopes = jax.value_and_grad(_loss)(params, batch)
        slopes = lax.pmean(slopes, axis_name="batch")
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slopes)
        params = jax.tree.map(lambda p, m: p - 0.05 * m, params, momentum)
        return (params, momentum), {"loss": lax.pmean(loss, axis_name="batch")}

    step = compiled(lambda state, batch: train_step(state, batch), donate_argnums=0)
    params = _parameters()
    state = _replicated((params, jax.tree.map(jnp.zeros_like, params)))
    losses = []
    for batch in _batches(4, 6, 3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"][0])
    return state, losses


@program
def evaluation_by_counts(pmap, compiled):
    """psum of what is right and of how many there are, over batches with padding."""

    def evaluate(params, batch, mask):
        right = jnp.sum((_network(params, batch) > 0) * mask)
        return lax.psum(right, "i"), lax.psum(jnp.sum(mask), "i")

    counted = pmap(evaluate, "i", in_axes=(None, 0, 0))
    run = compiled(lambda params, batch, mask: counted(params, batch, mask))
    params, total = _parameters(), np.zeros(2)
    for number, batch in enumerate(_batches(3, 6, 3)):
        mask = np.arange(6)[None] < 6 - number * np.arange(_DEVICES)[:, None]
        right, count = run(params, batch, mask.astype(np.float32))
        total += np.array([right[0], count[0]])
    return right, total


@program
def evolution_strategy(pmap, compiled):
    """Ask on one device, evaluate on all, tell on one; the whole update in one jit."""
    fitness = pmap(jax.vmap(lambda x: jnp.sum((x - 3.0) ** 2)))

    @compiled
    def update(mean, key):
        noise = jax.random.normal(key, (_DEVICES, 6, mean.shape[0]))
        scores = fitness(mean + 0.1 * noise)
        weights = (scores - jnp.mean(scores)) / (jnp.std(scores) + 1e-6)
        return mean - 0.05 * jnp.einsum("pk,pkd->d", weights, noise), scores

    mean, scores = jnp.linspace(-1.0, 1.0, 7), None
    for key in jax.random.split(jax.random.key(2), 4):
        mean, scores = update(mean, key)
    return scores, mean


@program
def rollouts_through_jit_of_pmap(pmap, compiled):
    """jit(pmap(partial)), its key made in the body, its states merged afterwards."""

    def rollout(params, state, key, *, steps):
        def step(carry, _):
            x, key = carry
            key, now = jax.random.split(key)
            x = jnp.tanh(x * params) + 0.1 * jax.random.normal(now, x.shape)
            return (x, key), -jnp.sum(x**2)

        (state, key), rewards = lax.scan(step, (state, key), None, length=steps)
        return jnp.sum(rewards), state

    run = compiled(pmap(functools.partial(rollout, steps=5), in_axes=(None, 0, 0)))
    state = jnp.asarray(_batches(1, 3)[0])
    for number in range(3):
        keys = jax.random.split(jax.random.key(number), _DEVICES)
        scores, state = run(jnp.float32(1.5), state, keys)
    return state, scores


@program
def metrics_gathered_then_averaged(pmap, compiled):
    def measure(params, batch):
        values = {"loss": _loss(params, batch), "size": jnp.sqrt(jnp.sum(batch**2))}
        gathered = lax.all_gather(values, axis_name="i")
        return jax.tree.map(lambda value: jnp.mean(value), gathered)

    run = compiled(pmap(measure, "i", in_axes=(None, 0)))
    return [run(_parameters(), batch) for batch in _batches(2, 6, 3)]


@program
def batch_norm_over_devices(pmap, compiled):
    """Statistics over the devices inside the loss; running ones averaged afterwards."""

    def loss(params, batch):
        hidden = batch @ params["first"]
        mean = lax.pmean(jnp.mean(hidden, 0), "i")
        square = lax.pmean(jnp.mean(hidden**2, 0), "i")
        normal = (hidden - mean) * lax.rsqrt(square - mean**2 + 1e-3)
        return jnp.mean((jax.nn.relu(normal) @ params["second"]) ** 2), mean

    def step(params, running, batch):
        (_, mean), slopes = jax.value_and_grad(loss, has_aux=True)(params, batch)
        slopes = lax.pmean(slopes, "i")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes)
        return params, 0.9 * running + 0.1 * mean

    mapped = pmap(step, axis_name="i")
    synced = pmap(lambda x: lax.pmean(x, "x"), "x")
    run = compiled(lambda params, running, batch: mapped(params, running, batch))
    merge = compiled(lambda running: synced(running))
    params, running = _replicated(_parameters()), jnp.zeros((_DEVICES, 5))
    for batch in _batches(3, 6, 3):
        params, running = run(params, running, batch)
    return merge(running), params


@program
def a_key_for_each_device(pmap, compiled):
    """Dropout with keys that are folded with the index of the device."""

    def step(key, x):
        key = jax.random.fold_in(key, lax.axis_index("i"))
        keep = jax.random.bernoulli(key, 0.7, x.shape)
        return lax.pmean(jnp.where(keep, x / 0.7, 0.0), "i") + x

    mapped = pmap(step, "i", in_axes=(None, 0))
    run = compiled(lambda key, x: mapped(key, x))
    x = _batches(1, 6, 3)[0]
    for key in jax.random.split(jax.random.key(3), 3):
        x = run(key, x)
    return x


@program
def a_trainer_with_pmaps_in_its_attributes(pmap, compiled):
    class Trainer:
        def __init__(self):
            self.scale = jnp.linspace(0.5, 1.5, 3)
            self.init = pmap(lambda key: jax.random.normal(key, (3,)))
            self.step = compiled(pmap(self._step, axis_name="i", donate_argnums=0))

        def _step(self, weights, batch):
            slope = jax.grad(lambda w: jnp.mean((batch @ (w * self.scale) - 1.0) ** 2))(weights)
            return weights - 0.1 * lax.pmean(slope, "i")

    trainer = Trainer()
    weights = trainer.init(jax.random.split(jax.random.key(4), _DEVICES))
    for batch in _batches(3, 6, 3):
        weights = trainer.step(weights, batch)
    return weights


@program
def agents_by_vmap_on_devices_by_pmap(pmap, compiled):
    """pmap(vmap(scan)), with means over both axes."""

    def learn(state):
        def update(state, _):
            slope = jax.grad(lambda s: jnp.sum(jnp.cos(s)))(state)
            slope = lax.pmean(lax.pmean(slope, axis_name="batch"), axis_name="device")
            return state - 0.3 * slope, jnp.sum(state)

        return lax.scan(update, state, None, length=3)

    learner = pmap(jax.vmap(learn, axis_name="batch"), axis_name="device")
    run = compiled(lambda state: learner(state))
    state = jnp.asarray(_batches(1, 5, 2)[0])
    for _ in range(2):
        state, sums = run(state)
    return state, sums


@program
def top_k_with_static_arguments(pmap, compiled):
    @functools.partial(pmap, static_broadcasted_argnums=(1, 2))
    def top(scores, count, order):
        values, places = lax.top_k(scores if order == "largest" else -scores, count)
        return values, places

    run = compiled(lambda scores, count: top(scores, count, "largest"), static_argnums=1)
    scores = _batches(1, 6)[0]
    return [run(scores, count) for count in (2, 3, 2)]


@program
def scan_over_steps_of_a_pmap(pmap, compiled):
    """Return the whole training loop in one program: the loop runs on the devices."""

    def step(weights, batch):
        slope = jax.grad(lambda w: jnp.mean((batch @ w - 1.0) ** 2))(weights)
        return weights - 0.1 * lax.pmean(slope, "i"), lax.pmean(jnp.mean(batch), "i")

    mapped = pmap(step, "i")

    @compiled
    def train(weights, batches):
        return lax.scan(lambda weights, batch: mapped(weights, batch), weights, batches)

    return train(_replicated(jnp.ones(3)), _batches(5, 6, 3))


@program
def parallel_chains(pmap, compiled):
    """Return a sampler: one chain a device, a hand-made while loop in each."""

    def chain(key, x):
        def body(carry):
            count, key, x, taken = carry
            key, move, accept = jax.random.split(key, 3)
            new = x + 0.8 * jax.random.normal(move, x.shape)
            ratio = jnp.sum(x**2 - new**2) / 2
            take = jnp.log(jax.random.uniform(accept)) < ratio
            return count + 1, key, jnp.where(take, new, x), taken + take

        return lax.while_loop(lambda c: c[0] < 7, body, (0, key, x, 0))[2:]

    run = compiled(pmap(chain))
    return run(jax.random.split(jax.random.key(5), _DEVICES), _batches(1, 3)[0])


@program
def model_that_captures_its_table(pmap, compiled):
    """Return an embedding table closed over, as a decorator on a nested function often does."""
    table = jnp.asarray(np.random.default_rng(6).normal(size=(50, 7)), jnp.float32)

    @functools.partial(pmap, axis_name="batch")
    def embed(tokens):
        vectors = table[tokens]
        return vectors - jnp.mean(lax.all_gather(jnp.mean(vectors, 0), "batch"), 0)

    run = compiled(lambda tokens: embed(tokens))
    return run(np.arange(24).reshape(4, 6) * 7 % 50)
