"""Random programs that gather and reduce, the same for the same seed.

A program starts from this device's block and makes new values from earlier ones, step by step:
gathers, functions of one value, mixtures with values that are the same on all devices or not, moves
of dimensions, reductions, and bodies. Values stay of the size of 1, so that sums can be compared.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from observing import mesh_of, numbers

Array = jax.Array
STEPS = 9
LARGEST = 4000  # elements of one value


def program_of(seed: int, dtype: Any = jnp.float32) -> tuple[Callable[[Array], Any], Array]:
    """Return a shard_map and its argument; the seed decides on the mesh, check_vma and steps."""
    mesh = mesh_of(i=4) if seed // 10 % 2 else mesh_of(i=2, j=3)
    axes = mesh.axis_names
    specs = {"in_specs": P(axes), "out_specs": P(axes), "check_vma": seed % 2 == 0}
    body = lambda x: Maker(seed, axes, dtype).values_from(x)
    x = jnp.asarray(numbers(mesh.size * 2, 3, 2, seed=seed), dtype)
    return jax.shard_map(body, mesh=mesh, **specs), x


def _steps_by_device(index: Array) -> Array:
    body = lambda carry: (carry[0] + 1, carry[1] * 1.5)
    return lax.while_loop(lambda carry: carry[0] < index, body, (0, 1.0))[1]


def _drawn_by_device(index: Array) -> Array:
    key = (index + jnp.arange(4)).astype(jnp.uint32)
    return (lax.rng_bit_generator(key, ())[1] % 7).astype(jnp.float32)


_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
# From the number of a device, a number of its own. JAX types most of them as the same everywhere.
OF_A_DEVICE: dict[str, Callable[[Array], Array]] = {
    "index": lambda index: index.astype(jnp.float32),
    "cond": lambda index: lax.cond(index == 0, lambda: 1.0, lambda: 2.0),
    "switch": lambda index: lax.switch(index % 3, [lambda: 1.0, lambda: 3.0, lambda: -2.0]),
    "while": _steps_by_device,
    "rng_bit_generator": _drawn_by_device,
    "pure_callback": lambda index: jax.pure_callback(np.float32, _SCALAR, index),
    "scan": lambda index: lax.scan(lambda c, _: (c + (index > 0), c), 0.0 * index, length=2)[0],
}


class Maker:
    """Makes one program. `rng` is used while tracing, so every trace has to start anew."""

    def __init__(self, seed: int, axes: tuple[str, ...], dtype: Any = jnp.float32) -> None:
        self.rng = np.random.default_rng(seed)
        self.axes = axes
        self.dtype = dtype

    def values_from(self, x: Array) -> list[Array]:
        """Return the last two values of all, as vectors. The first step gathers."""
        values = [x, jnp.tanh(self._gathered(x))]
        for _ in range(STEPS):
            recent = 1 if self._chance(0.7) else int(self.rng.integers(1, len(values) + 1))
            x = values[-recent]
            value = self._pick(self._steps(x))(x)
            if 0 < value.size <= LARGEST:
                values.append(jnp.sin(value) if self._chance(0.3) else value)
        return [
            jnp.sum(value.reshape(value.shape[0], -1), 1) if value.ndim else value[None]
            for value in values[-2:]
        ]

    def _steps(self, x: Array) -> list[Callable[[Array], Array]]:
        """Return the steps, the more likely ones twice."""
        steps = [self._gathered, self._unary, self._in_a_body]
        steps += 2 * [self._mixed, self._moved, self._reshaped]
        of_dimensions = [*2 * [self._reduced], self._multiplied, self._sliced, self._joined]
        return steps + of_dimensions * (x.ndim > 0)

    # ---- one step each

    def _gathered(self, x: Array) -> Array:
        axis = int(self.rng.integers(0, max(x.ndim, 1)))
        several = len(self.axes) > 1 and self._chance(0.3)
        names = self.axes if several else self._pick(self.axes)
        return lax.all_gather(x, names, axis=axis, tiled=x.ndim > 0 and self._chance(0.4))

    def _unary(self, x: Array) -> Array:
        return self._pick([jnp.sin, jnp.tanh, jnp.abs, lambda x: jnp.exp(-(x**2)), lambda x: -x])(x)

    def _mixed(self, x: Array) -> Array:
        """With an operand of the same shape, of size 1 somewhere, or of rank 0."""
        shape = [1 if self._chance(0.3) else size for size in x.shape]
        other = self._operand(() if self._chance(0.2) else tuple(shape))
        return self._pick([jnp.add, jnp.multiply, jnp.subtract])(x, other)

    def _operand(self, shape: tuple[int, ...]) -> Array:
        """Return a value that is the same on all devices, three times of four."""
        same = jnp.asarray(self.rng.uniform(0.5, 1.5, shape), self.dtype)
        if self._chance(0.75):
            return same
        index = lax.axis_index(self._pick(self.axes))
        return same * (1 + 0.1 * self._pick([*OF_A_DEVICE.values()])(index)).astype(self.dtype)

    def _moved(self, x: Array) -> Array:
        transposed = lambda x: jnp.transpose(x, self.rng.permutation(x.ndim))
        expanded = lambda x: jnp.expand_dims(x, self._dimension(x.ndim + 1))
        doubled = lambda x: jnp.broadcast_to(x, (2, *x.shape))
        return self._pick([transposed, expanded, doubled, jnp.squeeze])(x)

    def _reshaped(self, x: Array) -> Array:
        """Merge two neighbours, or split one in two."""
        shape = list(x.shape)
        if len(shape) >= 2 and self._chance(0.6):
            place = self._dimension(len(shape) - 1)
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
        elif shape:
            place = self._dimension(len(shape))
            size = self._pick([d for d in range(1, shape[place] + 1) if shape[place] % d == 0])
            shape[place : place + 1] = [size, shape[place] // size]
        return x.reshape(shape)

    def _reduced(self, x: Array) -> Array:
        count = int(self.rng.integers(1, x.ndim + 1))
        axes = tuple(int(d) for d in self.rng.permutation(x.ndim)[:count])
        return self._pick([jnp.mean, jnp.mean, jnp.max, jnp.min, jnp.var])(x, axis=axes)

    def _multiplied(self, x: Array) -> Array:
        axis = self._dimension(x.ndim)
        weights = self._operand((x.shape[axis],)) / x.shape[axis]
        return jnp.tensordot(weights, x, ((0,), (axis,)))

    def _sliced(self, x: Array) -> Array:
        axis = self._dimension(x.ndim)
        return lax.slice_in_dim(x, 0, int(self.rng.integers(1, x.shape[axis] + 1)), axis=axis)

    def _joined(self, x: Array) -> Array:
        return jnp.concatenate([x, x * 0.5], axis=self._dimension(x.ndim))

    def _in_a_body(self, x: Array) -> Array:
        step = self._pick([self._unary, self._mixed])
        looped = lambda x: lax.scan(lambda c, _: (self._averaged(c), None), x, None, length=2)[0]
        return self._pick([jax.jit(step), looped, jax.checkpoint(self._averaged)])(x)

    def _averaged(self, x: Array) -> Array:
        return jnp.tanh(x) + lax.all_gather(x, self.axes[0]).mean(0)

    # ---- chance

    def _dimension(self, ndim: int) -> int:
        return int(self.rng.integers(0, ndim))

    def _pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(0, len(choices)))]

    def _chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)
