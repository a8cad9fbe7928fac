"""A small classifier, trained and evaluated on all devices with flax and optax."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import common_utils, train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH_SIZE = 64
CLASSES = 4


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(CLASSES)(x)


def create_train_state(rng, learning_rate):
    model, tx = Classifier(), optax.adam(learning_rate)
    params = model.init(rng, jnp.ones((1, 2)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def compute_metrics(logits, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return jax.lax.pmean({"loss": loss, "accuracy": accuracy}, axis_name="batch")


def train_step(state, batch, smoothing):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        targets = optax.smooth_labels(common_utils.onehot(batch["label"], CLASSES), smoothing)
        return optax.softmax_cross_entropy(logits, targets).mean(), logits

    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    return state.apply_gradients(grads=grads), compute_metrics(logits, batch["label"])


def eval_step(params, batch):
    logits = Classifier().apply({"params": params}, batch["x"])
    return compute_metrics(logits, batch["label"])


def batches(seed, steps):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        label = rng.integers(0, CLASSES, BATCH_SIZE)
        angle = 2 * np.pi * label / CLASSES
        centre = np.stack([np.cos(angle), np.sin(angle)], -1)
        x = (centre + 0.4 * rng.normal(size=centre.shape)).astype(np.float32)
        yield {"x": x, "label": label}


def train_and_evaluate(steps=40, learning_rate=0.02):
    state = create_train_state(jax.random.PRNGKey(0), learning_rate)
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put(state, NamedSharding(mesh, P()))
    p_train_step = jax.jit(
        jax.shard_map(
            functools.partial(train_step, smoothing=0.1),
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    p_eval_step = jax.jit(
        jax.shard_map(
            eval_step,
            mesh=mesh,
            in_specs=(P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        )
    )

    history = []
    for step, batch in enumerate(batches(seed=0, steps=steps)):
        state, metrics = p_train_step(
            state, jax.make_array_from_process_local_data(sharded, batch)
        )
        if step % 10 == 9:  # do not wait for the devices at each step
            history.append(jax.device_get(metrics))

    accuracy = []
    for batch in batches(seed=1, steps=4):
        metrics = p_eval_step(
            state.params, jax.make_array_from_process_local_data(sharded, batch)
        )
        accuracy.append(metrics["accuracy"])
    params = jax.device_get(state.params)
    return history, np.mean(accuracy), params


if __name__ == "__main__":
    history, accuracy, _ = train_and_evaluate()
    print(f"loss {history[-1]['loss']:.4f}, accuracy on new data {accuracy:.3f}")
