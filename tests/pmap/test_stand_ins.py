"""chex.fake_pmap takes the place of jax.pmap, and of ours with it."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from watching import lies_on

import jax_dist

pytestmark = pytest.mark.mapping


def _share(x, scale):
    return scale * x / lax.psum(x, "i")


def test_chex_fakes_our_pmap_too():
    with chex.fake_pmap():
        mapped = jax_dist.pmap(_share, "i", in_axes=(0, None))
        found = mapped(jnp.arange(4.0), 2.0)

    assert found.tolist() == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert len(found.devices()) == 1
    real = jax_dist.pmap(_share, "i", in_axes=(0, None))(jnp.arange(4.0), 2.0)
    lies_on(real, jax.devices()[:4])


def test_the_body_runs_in_python_each_time():
    calls = []

    @functools.partial(jax_dist.pmap, axis_name="i")
    def real(x):
        calls.append(x)
        return x

    with chex.fake_pmap():

        @jax_dist.pmap
        def faked(x):
            calls.append(x)
            return x

        for _ in range(3):
            faked(np.ones(8, np.float32))
        assert len(calls) == 3

        real(np.ones(8, np.float32))  # was mapped before
        real(np.ones(8, np.float32))
    assert len(calls) == 4


def test_chex_knows_that_jax_traces_it():
    with pytest.raises(ValueError, match="must not wrap JAX-transformed function"):
        chex.assert_max_traces(jax_dist.pmap(lambda x: x), n=1)
