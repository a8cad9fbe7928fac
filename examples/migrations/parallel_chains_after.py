"""Hamiltonian Monte Carlo with one chain on each device, as numpyro runs parallel chains."""

from collections import namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HMCState = namedtuple("HMCState", ["z", "step_size", "accept_prob", "rng_key"])


def potential(z, data):
    """Logistic regression with a standard normal prior."""
    x, y = data
    logits = x @ z["weights"] + z["bias"]
    log_likelihood = jnp.sum(y * logits - jnp.logaddexp(0.0, logits))
    return 0.5 * (jnp.sum(z["weights"] ** 2) + z["bias"] ** 2) - log_likelihood


def leapfrog(z, momentum, step_size, steps, data):
    def kick(momentum, z):
        gradient = jax.grad(potential)(z, data)
        return jax.tree.map(lambda p, g: p - 0.5 * step_size * g, momentum, gradient)

    def body(carry, _):
        z, momentum = carry
        momentum = kick(momentum, z)
        z = jax.tree.map(lambda a, p: a + step_size * p, z, momentum)
        return (z, kick(momentum, z)), None

    (z, momentum), _ = lax.scan(body, (z, momentum), None, length=steps)
    return z, momentum


def energy(z, momentum, data):
    kinetic = sum(0.5 * jnp.sum(p**2) for p in jax.tree.leaves(momentum))
    return potential(z, data) + kinetic


def sample_kernel(state, adapting, data):
    rng_key, key_momentum, key_accept = random.split(state.rng_key, 3)
    leaves, treedef = jax.tree.flatten(state.z)
    keys = random.split(key_momentum, len(leaves))
    momentum = [random.normal(k, jnp.shape(x)) for k, x in zip(keys, leaves, strict=True)]
    momentum = treedef.unflatten(momentum)
    z, end_momentum = leapfrog(state.z, momentum, state.step_size, 4, data)
    difference = energy(state.z, momentum, data) - energy(z, end_momentum, data)
    accept_prob = jnp.minimum(1.0, jnp.exp(difference))
    accepted = random.uniform(key_accept) < accept_prob
    z = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), z, state.z)
    towards_80_percent = jnp.exp(0.2 * (accept_prob - 0.8))
    step_size = jnp.where(adapting, state.step_size * towards_80_percent, state.step_size)
    return HMCState(z, step_size, accept_prob, rng_key)


def single_chain_mcmc(rng_key, init_params, data, num_warmup, num_samples):
    state = HMCState(init_params, jnp.float32(0.1), jnp.float32(0.0), rng_key)

    def one_sample(state, i):
        state = sample_kernel(state, i < num_warmup, data)
        return state, {"z": state.z, "accept_prob": state.accept_prob}

    last_state, collected = lax.scan(one_sample, state, jnp.arange(num_warmup + num_samples))
    return jax.tree.map(lambda x: x[num_warmup:], collected), last_state


class MCMC:
    def __init__(self, num_warmup, num_samples, num_chains):
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.num_chains = num_chains
        self._states = None

    def run(self, rng_key, init_params, data):
        partial_map_fn = partial(
            single_chain_mcmc,
            data=data,
            num_warmup=self.num_warmup,
            num_samples=self.num_samples,
        )
        mesh = jax.sharding.Mesh(jax.devices(), ("devices",))
        sharded = NamedSharding(mesh, P("devices"))
        rng_keys = jax.make_array_from_process_local_data(
            sharded, random.split(rng_key, self.num_chains)
        )

        def partial_map_fn_on_device(rng_key, init_params):
            rng_key, init_params = jax.tree.map(lambda x: x[0], (rng_key, init_params))
            return jax.tree.map(lambda x: x[None], partial_map_fn(rng_key, init_params))

        init_params = jax.make_array_from_process_local_data(sharded, init_params)
        states, last_state = jax.jit(
            jax.shard_map(
                partial_map_fn_on_device,
                mesh=mesh,
                in_specs=P("devices"),
                out_specs=P("devices"),
                check_vma=False,
            )
        )(rng_keys, init_params)
        self._states = states
        return last_state

    def get_samples(self, *, group_by_chain=False):
        if group_by_chain:
            return self._states["z"]
        return jax.tree.map(lambda x: np.reshape(x, (-1,) + x.shape[2:]), self._states["z"])


def infer(num_samples=200):
    x_key, y_key, init_key, run_key = random.split(random.PRNGKey(0), 4)
    x = random.normal(x_key, (100, 3))
    y = random.bernoulli(y_key, jax.nn.sigmoid(x @ jnp.array([1.0, -2.0, 0.5]) + 0.3))
    mcmc = MCMC(num_warmup=100, num_samples=num_samples, num_chains=8)
    weights = 2.0 * random.normal(init_key, (8, 3))
    init_params = {"weights": weights, "bias": jnp.linspace(-2.0, 2.0, 8)}
    last_state = mcmc.run(run_key, init_params, (x, y.astype(jnp.float32)))
    of_chains = jax.tree.map(lambda z: z.mean(axis=1), mcmc.get_samples(group_by_chain=True))
    mean = jax.tree.map(lambda z: z.mean(axis=0), mcmc.get_samples())
    return mean, of_chains, np.asarray(last_state.step_size)


if __name__ == "__main__":
    mean, _, _ = infer()
    print({name: np.round(value, 2) for name, value in mean.items()})
