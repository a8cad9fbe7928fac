# devices= from a parameter or a branch, None among them.

import jax
import jax.numpy as jnp

from _mapped import mapped


class Trainer:
    def __init__(self, f, devices=None):
        self.step = mapped(f, axis_name="i", devices=devices)


def sample(video):
    if video.shape[0] < jax.local_device_count():
        devices = jax.local_devices()[: video.shape[0]]
    else:
        devices = None
    return mapped(lambda x: x * 2, devices=devices)(video)


def result():
    step = Trainer(lambda x: x - jax.lax.pmean(x, "i")).step
    return step(jnp.arange(8.0)), sample(jnp.ones((8, 3))), sample(jnp.ones((2, 3)))
