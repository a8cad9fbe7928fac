"""How well pictures find their captions: each is compared with what all devices embedded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

FEATURES, EMBEDDING = 12, 6
BATCH_SIZE = 32


def embed(weights, x):
    y = x @ weights
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def contrastive_loss(params, batch):
    image = embed(params["image"], batch["image"])
    text = embed(params["text"], batch["text"])
    # Captions of all devices are negatives for the images of this one.
    all_text = jax.lax.all_gather(text, axis_name="batch").reshape(-1, EMBEDDING)
    logits = 5.0 * image @ all_text.T
    place = jax.lax.axis_index("batch") * image.shape[0] + jnp.arange(image.shape[0])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), place[:, None], 1))


mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
sharded = NamedSharding(mesh, P("batch"))
@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("batch")),
    out_specs=P(),
    check_vma=False,
)
def train_step(params, batch):
    batch = jax.tree.map(lambda x: x[0], batch)  # of this device
    loss, grads = jax.value_and_grad(contrastive_loss)(params, batch)
    grads = jax.tree.map(lambda g: jnp.mean(jax.lax.all_gather(g, "batch"), axis=0), grads)
    params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return params, jnp.mean(jax.lax.all_gather(loss, axis_name="batch"))


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("batch")),
    out_specs=P(),
    check_vma=False,
)
def eval_step(params, batch):
    batch = jax.tree.map(lambda x: x[0], batch)  # of this device
    image = embed(params["image"], batch["image"])
    text = embed(params["text"], batch["text"])
    all_text = jax.lax.all_gather(text, axis_name="batch", tiled=True)
    place = jax.lax.axis_index("batch") * image.shape[0] + jnp.arange(image.shape[0])
    similarity = image @ all_text.T
    own = jnp.take_along_axis(similarity, place[:, None], 1)
    rank = jnp.sum(similarity > own, axis=1)  # 0: its own caption is the nearest
    weight = batch["weight"]
    hits = jnp.sum((rank < 5) * weight)
    metrics = {
        "recall_at_5": jnp.sum(jax.lax.all_gather(hits, axis_name="batch"), axis=0),
        "count": jax.lax.psum(jnp.sum(weight), axis_name="batch"),
    }
    return metrics, jax.lax.all_gather(rank, axis_name="batch")


def make_batch(rng, real=BATCH_SIZE):
    """Fill the last batch of an epoch up with examples of weight 0."""
    meaning = rng.normal(size=(BATCH_SIZE, 4))
    image_of, text_of = np.random.default_rng(7).normal(size=(2, 4, FEATURES))
    noise = 0.1 * rng.normal(size=(2, BATCH_SIZE, FEATURES))
    flat = {
        "image": (meaning @ image_of + noise[0]).astype(np.float32),
        "text": (meaning @ text_of + noise[1]).astype(np.float32),
        "weight": (np.arange(BATCH_SIZE) < real).astype(np.float32),
    }
    devices = jax.local_device_count()
    return {name: x.reshape((devices, -1) + x.shape[1:]) for name, x in flat.items()}


def train_and_evaluate(steps=60):
    rng = np.random.default_rng(0)
    weights = jax.random.normal(jax.random.PRNGKey(0), (2, FEATURES, EMBEDDING))
    params = {"image": weights[0], "text": weights[1]}
    losses = []
    for _ in range(steps):
        params, loss = train_step(
            params,
            jax.make_array_from_process_local_data(sharded, make_batch(rng)),
        )
        losses.append(float(loss))

    hits, count, ranks = 0.0, 0.0, []
    for real in (BATCH_SIZE, BATCH_SIZE, 20):
        metrics, rank = eval_step(
            params,
            jax.make_array_from_process_local_data(sharded, make_batch(rng, real)),
        )
        hits += metrics["recall_at_5"]
        count += metrics["count"]
        ranks.append(np.asarray(rank).reshape(-1)[:real])
    return np.array(losses), float(hits / count), np.concatenate(ranks)


if __name__ == "__main__":
    losses, recall, ranks = train_and_evaluate()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, recall at 5: {recall:.3f}")
