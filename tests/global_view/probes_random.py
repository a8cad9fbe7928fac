"""Random numbers: keys of all kinds, one for each device, one for all, and in bodies."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from probe import Probe, normal

IMPLEMENTATIONS = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}  # with the words of a key
X = normal(8, 8, 16)


def _in_scan(key: jax.Array) -> jax.Array:
    def turn(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, own = jax.random.split(key)
        return key, jax.random.normal(own, (3,))

    return lax.scan(turn, key, None, length=4)[1]


# Of the key of a device.
OF_KEY: dict[str, Callable[[jax.Array], Any]] = {
    "bits": lambda key: jax.random.bits(key, (5, 3)),
    "uniform": lambda key: jax.random.uniform(key, (257, 33)),
    "normal": lambda key: jax.random.normal(key, (33,)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 3)),
    "permutation": lambda key: jax.random.permutation(key, 40),
    "choice": lambda key: jax.random.choice(key, 40, (5,), replace=False),
    "randint and gamma": lambda key: (
        jax.random.randint(key, (4,), 0, 99),
        jax.random.gamma(key, 2.0, (4,)),
    ),
    "key in a scan": _in_scan,
    "keys of a vmap": lambda key: jax.vmap(lambda each: jax.random.normal(each, (3,)))(
        jax.random.split(key, 4)
    ),
    "truncated normal": lambda key: jax.random.truncated_normal(key, -1.0, 1.0, (7,)),
}
# Of it and the batch.
OF_BOTH: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "dropout": lambda key, v: v * jax.random.bernoulli(key, 0.9, v.shape),
    "permutation of rows": lambda key, v: jax.random.permutation(key, v, independent=True),
    "categorical": jax.random.categorical,
}
# Of one key for all devices, and the batch.
OF_SHARED: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "fold_in of axis_index": lambda key, v: jax.random.uniform(
        jax.random.fold_in(key, lax.axis_index("i")), v.shape
    ),
    "shared key": lambda key, v: v + jax.random.uniform(key, v.shape),
    "own of split": lambda key, v: jax.random.uniform(
        jax.random.split(key, 8)[lax.axis_index("i")], v.shape
    ),
}


def _probes(implementation: str, words: int) -> Iterator[Probe]:
    data = np.random.default_rng(words).integers(0, 2**32, (8, words), np.uint32)

    def key_of(words: Any) -> jax.Array:
        return jax.random.wrap_key_data(words, impl=implementation)

    for name, step in OF_KEY.items():
        # Seen on a mesh of several axes: another last bit, of at most 4e-7 of the number.
        bound = 1e-6 if "gamma" in name else 0
        of_key = lambda k, step=step: step(key_of(k))
        yield Probe(f"{implementation} {name}", of_key, (data,), bound=bound)
    for name, step in OF_BOTH.items():
        both = lambda k, v, step=step: step(key_of(k), v)
        yield Probe(f"{implementation} {name}", both, (data, X))
    for name, step in OF_SHARED.items():
        shared = lambda v, step=step: step(key_of(jnp.asarray(data[0])), v)
        yield Probe(f"{implementation} {name}", shared, (X,))


PROBES = [probe for name, words in IMPLEMENTATIONS.items() for probe in _probes(name, words)]
PROBES.append(
    Probe(
        "threefry2x32 poisson",
        lambda data: jax.random.poisson(jax.random.wrap_key_data(data), 3.0, (4,)),
        (np.random.default_rng(0).integers(0, 2**32, (8, 2), np.uint32),),
    )
)
