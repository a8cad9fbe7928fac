"""What the programs share, clean ones and planted ones."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jax_dist

_DRAWN = np.random.default_rng(7)
ROWS = jnp.asarray(_DRAWN.normal(size=(16, 3)), jnp.float32)
TARGETS = jnp.asarray(_DRAWN.normal(size=16), jnp.float32)
WEIGHTS = jnp.asarray([0.5, -1.0, 2.0], jnp.float32)
KEY = jax.random.key(3)


class Case(NamedTuple):
    """A program with its arguments."""

    fun: Callable
    args: tuple
    in_axes: Any
    out_axes: Any = None
    mesh: Callable | None = None  # makes the mesh of a function of whole arrays

    def report(self, devices=(1, 2, 4)):
        if self.mesh is not None:
            return jax_dist.compare_device_counts(
                self.fun, *self.args, mesh=self.mesh(), devices=devices
            )
        return jax_dist.compare_device_counts(
            self.fun,
            *self.args,
            axis_name="i",
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            devices=devices,
        )

    @property
    def wrong_line(self) -> int:
        lines, first = inspect.getsourcelines(self.fun)
        (wrong,) = [number for number, line in enumerate(lines) if line.endswith("# wrong\n")]
        return first + wrong


def mesh_of(*sizes):
    """With the axes "data" and, if there are two, "model"."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("data", "model")[: len(sizes)])


def squared_error(w, x, y):
    return jnp.mean(jnp.square(x @ w - y))


def dense(x):
    return jnp.tanh(x @ jnp.eye(3, 2, dtype=x.dtype))
