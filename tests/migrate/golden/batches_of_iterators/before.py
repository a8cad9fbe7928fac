"""Iterators split their batches for pmap, as in Flax's ImageNet example."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


def train_step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state)
    return state - 0.1 * jax.lax.pmean(grads, "batch")


def eval_step(state, batch):
    return jax.lax.pmean(jnp.mean(batch["x"] @ state), "batch")


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        yield {"x": rng.normal(size=(16, 3)).astype(np.float32), "y": np.arange(16.0)}


def prepare(batch):
    """Convert a batch to NumPy arrays."""
    local_device_count = jax.local_device_count()

    def _prepare(x):
        x = np.asarray(x, np.float32)

        # reshape (host_batch_size, features) to
        # (local_devices, device_batch_size, features)
        return x.reshape((local_device_count, -1) + x.shape[1:])

    return jax.tree.map(_prepare, batch)


def create_iterator(seed):
    it = map(prepare, batches(seed))
    it = jax_utils.prefetch_to_device(it, 2)
    return it


def result():
    train_iterator = create_iterator(seed=0)
    eval_iterator = create_iterator(seed=1)
    p_train_step = jax.pmap(train_step, axis_name="batch")
    p_eval_step = jax.pmap(eval_step, axis_name="batch")
    state = jax_utils.replicate(jnp.ones(3))
    losses = []
    for step, batch in zip(range(4), train_iterator):
        state = p_train_step(state, batch)
        if step % 2:
            eval_batch = next(eval_iterator)
            loss = p_eval_step(state, eval_batch)
            losses.append(jax_utils.unreplicate(loss))
    return losses, jax_utils.unreplicate(state)
