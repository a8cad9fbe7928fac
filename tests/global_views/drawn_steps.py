"""Random steps with a state, the same for the same seed.

A step makes new values from the leaves of its state and a batch: functions of one and of two
values, collectives, bodies of all kinds. Its new state are some of these values, so that some
leaves stay the same on all devices, and others do not. All values have one shape, of the size of 1.

Each value stands behind a barrier: XLA drops the zero of `x + 0.0`, and with it the sign of `-0.0`,
in whichever of two programs it sees that it is one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
SHAPE = (8, 4)
LEAVES = ("a", "b", "c")


def state_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=SHAPE).astype(np.float32) for name in LEAVES}


def batch_of(seed: int) -> np.ndarray:
    return (
        np.random.default_rng(-1 - seed if seed < 0 else seed + 10**6)
        .normal(size=(8, *SHAPE))
        .astype(np.float32)
    )


def step_of(seed: int) -> Callable[[dict, Array], tuple[dict, Array]]:
    """Draws anew in every trace, from the seed."""

    def step(state: dict, x: Array) -> tuple[dict, Array]:
        maker = _Maker(np.random.default_rng(seed))
        values = maker.values_from([*state.values(), x], steps=7)
        # A leaf that is not touched, or one that only met what is shared, stays shared.
        new = {name: maker.pick([state[name], *values[-5:]]) for name in LEAVES}
        shared = lax.pmean(values[-1], "i") if maker.chance(0.7) else state["a"]
        new["a"] = 0.5 * state["a"] + 0.25 * shared
        return new, values[-1]

    return step


class _Maker:
    def __init__(self, rng: np.random.Generator, *, meets: bool = True, smooth: bool = False):
        self._rng = rng
        self._meets = meets  # whether collectives may stand here
        self._smooth = smooth  # whether there is a derivative to take

    def pick(self, choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def values_from(self, values: list[Array], steps: int, depth: int = 0) -> list[Array]:
        values = list(values)
        for _ in range(steps):
            kinds = [self._one, self._two, self._along, self._two, self._constant]
            if self._meets:
                kinds += [self._meet, self._meet, self._indexed]
            if depth < 2:
                kinds += [self._jit, self._scan, self._loop, self._cond, self._rematted]
                kinds += [] if self._smooth else [self._gradient]
            values.append(lax.optimization_barrier(jnp.tanh(self.pick(kinds)(values, depth))))
        return values

    def _some(self, values: list[Array]) -> Array:
        return self.pick(values[-6:])

    # ---- one step each

    def _one(self, values: list[Array], depth: int) -> Array:
        del depth
        return self.pick([jnp.sin, jnp.cos, jnp.negative, jnp.abs])(self._some(values))

    def _two(self, values: list[Array], depth: int) -> Array:
        del depth
        x, y = self._some(values), self._some(values)
        return self.pick([lax.add, lax.mul, lax.sub, lambda x, y: jnp.where(x > 0, x, y)])(x, y)

    def _along(self, values: list[Array], depth: int) -> Array:
        del depth
        x = self._some(values)
        weights = jnp.asarray(self._rng.normal(size=(4, 4)), jnp.float32)
        kinds = [
            lambda x: x @ weights,
            lambda x: x - jnp.mean(x, 0),
            lambda x: jnp.cumsum(x, 0) / 8,
            lambda x: jnp.roll(x, 1, 1),
            lambda x: x.T.reshape(SHAPE),
        ]
        if not self._smooth:
            kinds += [lambda x: jnp.sort(x, 0), lambda x: x - jnp.max(x, 1, keepdims=True)]
        return self.pick(kinds)(x)

    def _constant(self, values: list[Array], depth: int) -> Array:
        del depth
        key = jax.random.key(int(self._rng.integers(100)))
        return self._some(values) * jax.random.uniform(key, SHAPE)

    def _indexed(self, values: list[Array], depth: int) -> Array:
        del depth
        return self._some(values) * (1 + lax.axis_index("i") / 8)

    def _meet(self, values: list[Array], depth: int) -> Array:
        del depth
        ring = [(n, (n + 1) % 8) for n in range(8)]
        kinds = [
            lambda x: lax.pmean(x, "i"),
            lambda x: lax.psum(x, "i") / 8,
            lambda x: lax.all_gather(x, "i").mean(0),
            lambda x: lax.all_gather(x, "i")[3],
            lambda x: lax.ppermute(x, "i", ring[:5]),
            lambda x: lax.ppermute(x, "i", ring),
            lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
            lambda x: lax.all_gather(lax.psum_scatter(x, "i", tiled=True), "i", tiled=True),
        ]
        if not self._smooth:
            kinds += [lambda x: lax.pmax(x, "i"), lambda x: lax.pmin(x, "i")]
        return self.pick(kinds)(self._some(values))

    # ---- bodies

    def _inner(self, values: list[Array], depth: int, **limits: bool) -> Callable[..., Array]:
        """A function of two values, that reads others, too."""
        seed = int(self._rng.integers(2**31))
        meets = self._meets and limits.get("meets", True)
        smooth = self._smooth or limits.get("smooth", False)
        around = [self._some(values)]

        def inner(*args: Array) -> Array:
            maker = _Maker(np.random.default_rng(seed), meets=meets, smooth=smooth)
            return maker.values_from([*around, *args], 3, depth + 1)[-1]

        return inner

    def _jit(self, values: list[Array], depth: int) -> Array:
        inner = self._inner(values, depth)
        x, y = self._some(values), self._some(values)
        first, second = jax.jit(lambda x, y: (inner(x, y), inner(y, y)))(x, y)
        return self.pick([first, second, first + second])

    def _rematted(self, values: list[Array], depth: int) -> Array:
        return jax.checkpoint(self._inner(values, depth))(self._some(values))

    def _scan(self, values: list[Array], depth: int) -> Array:
        first, second = self._inner(values, depth), self._inner(values, depth)
        start = self._some(values), self._some(values)
        rows = jnp.stack([self._some(values), self._some(values)])

        def body(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
            x, y = carry
            return (first(x, row), jnp.tanh(y + second(x, y))), x * row

        (x, y), rows = lax.scan(body, start, rows, reverse=self.chance(0.5))
        return self.pick([x, y, rows[1], x - y])

    def _loop(self, values: list[Array], depth: int) -> Array:
        """So many times as all devices say, or as each says."""
        alike = self.chance(0.6) or not self._meets
        body = self._inner(values, depth, meets=alike)
        x = self._some(values)
        if self._smooth:
            return lax.fori_loop(0, 2, lambda _, x: body(x), x)
        count = 2 if alike else lax.axis_index("i") % 3
        if alike and self._meets and self.chance(0.5):
            largest = lambda x: lax.pmax(jnp.max(jnp.abs(x)), "i")
            going = lambda turn: (turn[0] < 3) & (largest(turn[1]) > 0.2)
            return lax.while_loop(going, lambda turn: (turn[0] + 1, body(turn[1]) / 2), (0, x))[1]
        return lax.while_loop(
            lambda turn: turn[0] < count, lambda turn: (turn[0] + 1, body(turn[1])), (0, x)
        )[1]

    def _cond(self, values: list[Array], depth: int) -> Array:
        alike = self._meets and self.chance(0.6)
        x, y = self._some(values), self._some(values)
        branches = [self._inner(values, depth, meets=alike) for _ in range(2)]
        chosen = jnp.sum(y) > 0
        if alike:
            chosen = lax.psum(jnp.sum(y), "i") > 0
        return lax.cond(chosen, *branches, x)

    def _gradient(self, values: list[Array], depth: int) -> Array:
        inner = self._inner(values, depth, smooth=True)
        return jax.grad(lambda x: jnp.sum(inner(x) ** 2))(self._some(values))
