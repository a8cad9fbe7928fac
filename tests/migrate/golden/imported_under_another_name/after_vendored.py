# import jax as j, and from jax import pmap as p.

from _mapped import mapped, mapped as p
import jax.numpy as np


def result():
    xs = np.arange(8.0)
    return p(lambda x: x * 2)(xs), mapped(lambda x: x * 3)(xs)
