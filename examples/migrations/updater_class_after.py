"""A language model of letters, trained by a class that keeps the update and its state apart.

The functions are pure, and the class keeps how to call them, as in haiku's examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

TEXT = "she sells sea shells by the sea shore. " * 8
LETTERS = sorted(set(TEXT))
LENGTH = 16
PER_DEVICE = 4


def init_network(rng):
    keys = jax.random.split(rng, 3)
    return {
        "embed": 0.1 * jax.random.normal(keys[0], (len(LETTERS), 24)),
        "cell": 0.2 * jax.random.normal(keys[1], (48, 24)),
        "out": 0.2 * jax.random.normal(keys[2], (24, len(LETTERS))),
    }


def apply_network(params, rng, tokens, dropout):
    """[batch, length] -> [batch, length, vocabulary]."""
    inputs = params["embed"][tokens]
    keep = jax.random.bernoulli(rng, 1.0 - dropout, inputs.shape)
    inputs = jnp.where(keep, inputs / (1.0 - dropout), 0.0)

    def cell(state, x):
        state = jnp.tanh(jnp.concatenate([x, state], -1) @ params["cell"])
        return state, state

    start = jnp.zeros((tokens.shape[0], 24))
    _, states = jax.lax.scan(cell, start, jnp.swapaxes(inputs, 0, 1))
    return jnp.swapaxes(states, 0, 1) @ params["out"]


def lm_loss_fn(params, rng, batch):
    logits = apply_network(params, rng, batch["obs"], dropout=0.1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    return jnp.mean(losses)


class Updater:
    """Keeps parameters, optimiser state and random key together in one state."""

    def __init__(self, net_init, loss_fn, optimizer):
        self._net_init = net_init
        self._loss_fn = loss_fn
        self._opt = optimizer
        mesh = jax.sharding.Mesh(jax.devices(), ("i",))
        self.init = jax.jit(
            jax.shard_map(
                self._init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
        )

        def _update_on_device(state, batch):
            batch = jax.tree.map(lambda x: x[0], batch)
            return self._update(state, batch)

        self.update = jax.jit(
            jax.shard_map(
                _update_on_device,
                mesh=mesh,
                in_specs=(P(), P("i")),
                out_specs=P(),
                check_vma=False,
            ),
            donate_argnums=(0,),
        )

    def _init(self, rng):
        out_rng, init_rng = jax.random.split(rng)
        params = self._net_init(init_rng)
        return {
            "step": jnp.zeros((), jnp.int32),
            "rng": out_rng,
            "opt_state": self._opt.init(params),
            "params": params,
        }

    def _update(self, state, batch):
        rng, new_rng = jax.random.split(state["rng"])
        rng = jax.random.fold_in(rng, jax.lax.axis_index("i"))  # its own dropout for each device
        loss, grads = jax.value_and_grad(self._loss_fn)(state["params"], rng, batch)
        grads = jax.lax.pmean(grads, axis_name="i")
        loss = jax.lax.pmean(loss, axis_name="i")
        updates, opt_state = self._opt.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        new_state = {
            "step": state["step"] + 1,
            "rng": new_rng,
            "opt_state": opt_state,
            "params": params,
        }
        return new_state, {"step": state["step"], "loss": loss}


def load(seed):
    """Endless batches, [devices, batch, length]."""
    rng = np.random.default_rng(seed)
    tokens = np.array([LETTERS.index(letter) for letter in TEXT])
    shape = (jax.local_device_count(), PER_DEVICE)
    while True:
        starts = rng.integers(0, len(tokens) - LENGTH - 1, shape)
        windows = tokens[starts[..., None] + np.arange(LENGTH + 1)]
        yield {"obs": windows[..., :-1], "target": windows[..., 1:]}


def train(steps=60):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    updater = Updater(init_network, lm_loss_fn, optimizer)
    dataset = load(seed=0)

    # The same key everywhere, so that all devices begin with the same parameters.
    rng = jax.random.PRNGKey(428)
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    sharded = NamedSharding(mesh, P("i"))
    rng = jax.device_put(rng, NamedSharding(mesh, P()))
    state = updater.init(rng)
    losses = []
    for _ in range(steps):
        state, metrics = updater.update(
            state, jax.make_array_from_process_local_data(sharded, next(dataset))
        )
        losses.append(float(metrics["loss"]))
    params = jax.device_get(state["params"])
    return np.array(losses), int(state["step"]), params


if __name__ == "__main__":
    losses, steps, _ = train()
    print(f"{steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
