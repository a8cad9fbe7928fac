# A factory returns the mapped function, as in trainers of vision transformers.

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def make_update_fn(rate):
    def update_fn(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
        grads = jax.lax.pmean(grads, axis_name="batch")
        return params - rate * grads, opt_state + 1, jax.lax.pmean(loss, axis_name="batch")

    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))

    def update_fn_on_device(params, opt_state, batch):
        batch = jax.tree.map(lambda x: x[0], batch)
        return update_fn(params, opt_state, batch)

    return jax.jit(
        jax.shard_map(
            update_fn_on_device,
            mesh=mesh,
            in_specs=(P(), P(), P("batch")),
            out_specs=P(),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )


def result():
    n = jax.local_device_count()
    update_fn_repl = make_update_fn(0.1)
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    sharded = NamedSharding(mesh, P("batch"))
    params_repl, opt_state_repl = jax.device_put(
        (jnp.ones(3), jnp.zeros((), jnp.int32)), NamedSharding(mesh, P())
    )
    losses = []
    for seed in range(3):
        batch = jax.make_array_from_process_local_data(
            sharded,
            np.random.default_rng(seed).normal(size=(n, 2, 3)).astype(np.float32),
        )
        params_repl, opt_state_repl, loss_repl = update_fn_repl(params_repl, opt_state_repl, batch)
        losses.append(float(loss_repl))
    return losses, np.asarray(params_repl)
