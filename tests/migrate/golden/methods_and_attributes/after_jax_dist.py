# A bound method that is mapped into an attribute, and called from other methods.

import jax
import jax.numpy as jnp
import jax_dist


class Learner(object):

  def __init__(self):
    self._update = jax_dist.pmap(self._update_fn, axis_name='i', donate_argnums=(0,))
    self._init = jax_dist.pmap(self.init)

  def init(self, key):
    return jax.random.normal(key, (2,))

  def _update_fn(self, params, x):
    return params + jax.lax.pmean(x, axis_name='i')

  def run(self):
    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    params = self._init(keys)
    return self._update(params, jnp.ones((8, 2)))


def result():
  return Learner().run()
