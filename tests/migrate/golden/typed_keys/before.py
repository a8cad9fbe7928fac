# Keys of the new kind, split over the devices.

import jax


def result():
    keys = jax.random.split(jax.random.key(3), 8)
    draw = jax.pmap(lambda key: (jax.random.uniform(key, (2,)), jax.random.fold_in(key, 1)))
    numbers, keys = draw(keys)
    return numbers, jax.random.key_data(keys)
