# What unreplicate gives lies on one device, and the next mapped function shares it.

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
sharded = NamedSharding(mesh, P("batch"))
double = jax.jit(
    jax.shard_map(
        lambda state: jax.lax.pmean(state * 2, "batch"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
)
def step_on_device(state, rays):
    rays = jax.tree.map(lambda x: x[0], rays)
    return jax.tree.map(
        lambda x: x[None], jax.lax.all_gather(rays * state, axis_name="batch")
    )


render = jax.jit(
    jax.shard_map(
        step_on_device,
        mesh=mesh,
        in_specs=(P(), P("batch")),
        out_specs=P("batch"),
        check_vma=False,
    )
)


def result():
    state = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
    for _ in range(2):
        state = double(state)
    return render(
        state,
        jax.make_array_from_process_local_data(sharded, jnp.arange(8.0).reshape(8, 1)),
    )
