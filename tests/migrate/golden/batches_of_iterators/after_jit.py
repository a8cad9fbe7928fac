"""Iterators split their batches for pmap, as in Flax's ImageNet example."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def train_step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(state)
    return state - 0.1 * grads


def eval_step(state, batch):
    return jnp.mean(batch["x"] @ state)


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        yield {"x": rng.normal(size=(16, 3)).astype(np.float32), "y": np.arange(16.0)}


def prepare(batch):
    """Convert a batch to NumPy arrays."""

    def _prepare(x):
        x = np.asarray(x, np.float32)

        return x

    return jax.tree.map(_prepare, batch)


def create_iterator(seed):
    it = map(prepare, batches(seed))
    return it


def result():
    train_iterator = create_iterator(seed=0)
    eval_iterator = create_iterator(seed=1)
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    replicated = NamedSharding(mesh, P())
    sharded = NamedSharding(mesh, P("batch"))
    p_train_step = jax.jit(
        train_step, in_shardings=(replicated, sharded), out_shardings=replicated
    )
    p_eval_step = jax.jit(
        eval_step, in_shardings=(replicated, sharded), out_shardings=replicated
    )
    state = jax.device_put(jnp.ones(3), replicated)
    losses = []
    for step, batch in zip(range(4), train_iterator):
        batch = jax.make_array_from_process_local_data(sharded, batch)
        state = p_train_step(state, batch)
        if step % 2:
            eval_batch = jax.make_array_from_process_local_data(
                sharded, next(eval_iterator)
            )
            loss = p_eval_step(state, eval_batch)
            losses.append(loss)
    return losses, state
