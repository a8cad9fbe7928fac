import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def train_step(state, batch, config, rate=0.1, dropout_rng=None):
    def loss_of(w):
        mask = jax.random.bernoulli(dropout_rng, 1.0, batch["x"].shape)
        return jnp.mean((batch["x"] * mask) @ w * config["scale"])

    gradient = jax.lax.pmean(jax.grad(loss_of)(state["w"]), "batch")
    return {"w": state["w"] - rate * gradient}, jax.lax.pmean(jnp.sum(gradient), "batch")


def result():
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    state = jax.device_put({"w": jnp.zeros(3)}, NamedSharding(mesh, P()))

    def train_step_on_device(state, batch, dropout_rng):
        return train_step(
            state, batch, config={"scale": 2.0}, rate=0.2, dropout_rng=dropout_rng[0]
        )

    p_train_step = jax.jit(
        jax.shard_map(
            train_step_on_device,
            mesh=mesh,
            in_specs=(P(), P("batch"), P("batch")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    rngs = jax.make_array_from_process_local_data(
        sharded, jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
    )
    for _ in range(4):
        batch = jax.make_array_from_process_local_data(
            sharded, {"x": np.ones((16, 3), np.float32)}
        )
        state, metrics = p_train_step(state, batch, rngs)
    return state["w"], metrics
