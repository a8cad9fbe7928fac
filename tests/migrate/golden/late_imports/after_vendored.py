# A docstring, a future import, and pmap only inside.

"""Trains."""

from __future__ import annotations


def result():
    import jax
    from _mapped import mapped
    from jax import numpy as jnp

    return mapped(lambda x: x * 2, axis_name="i")(jnp.arange(8.0))
