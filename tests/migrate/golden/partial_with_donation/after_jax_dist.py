# A partial of a module-level function, with arguments bound and donation, as trainers have it.

import functools

import jax
import jax.numpy as jnp
import jax_dist


def train_step(state, batch, *, rate, power):
    gradient = jax.lax.pmean(batch**power, axis_name='batch')
    return state - rate * gradient, {'loss': jax.lax.psum(batch.sum(), 'batch')}


def result():
    train_step_pmapped = jax_dist.pmap(
        functools.partial(train_step, rate=0.5, power=2),
        axis_name='batch',
        donate_argnums=(0, 1),
    )
    state = jnp.zeros((8, 3))
    batch = jnp.arange(24.0).reshape(8, 3)
    return train_step_pmapped(state, batch)
