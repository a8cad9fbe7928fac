import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def train_step(state, batch, config, rate=0.1, dropout_rng=None):
    def loss_of(w):
        mask = jax.random.bernoulli(dropout_rng, 1.0, batch["x"].shape)
        return jnp.mean((batch["x"] * mask) @ w * config["scale"])

    gradient = jax.grad(loss_of)(state["w"])
    return {"w": state["w"] - rate * gradient}, jnp.sum(gradient)


def result():
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    replicated = NamedSharding(mesh, P())
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put({"w": jnp.zeros(3)}, replicated)
    p_train_step = jax.jit(
        lambda state, batch, dropout_rng: train_step(
            state, batch, config={"scale": 2.0}, rate=0.2, dropout_rng=dropout_rng
        ),
        in_shardings=(replicated, sharded, replicated),
        out_shardings=replicated,
        donate_argnums=(0,),
    )
    rngs = jax.random.PRNGKey(0)
    for _ in range(4):
        batch = jax.make_array_from_process_local_data(
            sharded, {"x": np.ones((16, 3), np.float32)}
        )
        state, metrics = p_train_step(state, batch, rngs)
    return state["w"], metrics
