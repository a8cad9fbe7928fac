"""Random steps with a state, the same for the same seed.

A step makes new values from the leaves of its state and a batch: functions of one and of two
values, collectives, also of groups of devices, bodies of all kinds. Its new state are some of these
values, so that some leaves stay the same on all devices, and others do not. Parameters, a moment
and a sum of gradients are the same on all, and are updated as optimizers do it: in branches and
loops, clipped by a norm, with what needs a leaf whole. All values have one shape, of the size of 1.

Each value stands behind a barrier: XLA drops the zero of `x + 0.0`, and with it the sign of `-0.0`,
in whichever of two programs it sees that it is one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
SHAPE = (8, 4)
ALIKE = ("a", "b", "moment", "sum")  # leaves that are always the same on all devices


def state_of(seed: int) -> dict[str, np.ndarray]:
    """Return the values that all devices start with."""
    rng = np.random.default_rng(seed)
    state = {name: rng.normal(size=SHAPE).astype(np.float32) for name in ("a", "b", "c", "moment")}
    key = rng.integers(2**32, size=2, dtype=np.uint32)
    return {**state, "sum": np.zeros(SHAPE, np.float32), "turn": np.int32(0), "key": key}


def batch_of(seed: int, count: int = 8) -> np.ndarray:
    rng = np.random.default_rng(-1 - seed if seed < 0 else seed + 10**6)
    return rng.normal(size=(count, *SHAPE)).astype(np.float32)


def step_of(seed: int, count: int = 8, *, jumps: bool = True) -> Callable:
    """Return a step that draws anew in every trace, from the seed.

    Args:
      seed: of all that is drawn.
      count: of devices.
      jumps: whether a last bit of a value may decide which of two is taken.
    """

    def step(state: dict, x: Array) -> tuple[dict, Array]:
        maker = _Maker(np.random.default_rng(seed), count, state, jumps=jumps)
        leaves = [state[name] for name in ("a", "b", "c", "moment")]
        values = maker.values_from([*leaves, x], steps=7)
        # A leaf that is not touched, or one that only met what is shared, stays shared.
        new = {"c": maker.pick([state["c"], *values[-5:]])}
        new["b"] = maker.pick([state["b"], (state["b"] + lax.pmean(values[-2], "i")) / 2])
        shared = lax.pmean(values[-1], "i") if maker.chance(0.8) else state["a"]
        new |= maker.updated({name: state[name] for name in ("a", "moment", "sum")}, shared)
        if "own" in state:  # of each device
            new["own"] = 0.5 * state["own"] + values[-3] * lax.axis_index("i")
        return {**state, **new, "turn": state["turn"] + 1}, values[-1]

    return step


@dataclasses.dataclass
class _Maker:
    rng: np.random.Generator
    devices: int
    state: dict
    jumps: bool
    meets: bool = True  # whether collectives may stand here
    smooth: bool = False  # whether there is a derivative to take

    def pick(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def values_from(self, values: list[Array], steps: int, depth: int = 0) -> list[Array]:
        values = list(values)
        for _ in range(steps):
            kinds = [self._one, self._two, self._along, self._two, self._constant, self._noise]
            if self.meets:
                kinds += [self._meet, self._meet, self._meet_in_groups, self._indexed]
            if depth < 2:
                kinds += [self._jit, self._scan, self._loop, self._cond, self._rematted]
                kinds += [] if self.smooth else [self._gradient]
            values.append(lax.optimization_barrier(jnp.tanh(self.pick(kinds)(values, depth))))
        return values

    def _some(self, values: list[Array]) -> Array:
        return self.pick(values[-6:])

    # ---- one step each

    def _one(self, values: list[Array], depth: int) -> Array:
        kinds = [jnp.sin, jnp.cos, jnp.negative]
        kinds += [jnp.abs] if self.jumps or not self.smooth else []
        return self.pick(kinds)(self._some(values))

    def _two(self, values: list[Array], depth: int) -> Array:
        x, y = self._some(values), self._some(values)
        kinds = [lax.add, lax.mul, lax.sub]
        kinds += [lambda x, y: jnp.where(x > 0, x, y)] if self.jumps else []
        return self.pick(kinds)(x, y)

    def _along(self, values: list[Array], depth: int) -> Array:
        x = self._some(values)
        weights = jnp.asarray(self.rng.normal(size=(4, 4)), x.dtype)
        kinds = [
            lambda x: x @ weights,
            lambda x: x - jnp.mean(x, 0),
            lambda x: jnp.cumsum(x, 0) / 8,
            lambda x: jnp.roll(x, 1, 1),
            lambda x: x.T.reshape(SHAPE),
            lambda x: jnp.take(x, jnp.asarray([3, 1, 0, 2]), axis=1),
            lambda x: jnp.concatenate([x[4:], -x[:4]]),
        ]
        if not self.smooth:
            kinds += [lambda x: jnp.sort(x, 0), lambda x: x - jnp.max(x, 1, keepdims=True)]
        return self.pick(kinds)(x)

    def _constant(self, values: list[Array], depth: int) -> Array:
        x = self._some(values)
        return x * jnp.asarray(self.rng.uniform(size=SHAPE), x.dtype)

    def _noise(self, values: list[Array], depth: int) -> Array:
        """From a key of the state; of all devices, or of each."""
        key = jax.random.fold_in(jax.random.wrap_key_data(self.state["key"]), self.state["turn"])
        if self.meets and self.chance(0.5):
            key = jax.random.fold_in(key, lax.axis_index("i"))
        x = self._some(values)
        mask = jax.random.key_data(key)[0] % 2 == 0
        if self.chance(0.25):  # most of the time of the tests would be that of compiling this
            mask = jax.random.bernoulli(key, 0.75, SHAPE)
        # Not a product with the mask: XLA may take it for a choice of 0, which has no sign.
        return jnp.where(mask, x, 0.25 * x)

    def _indexed(self, values: list[Array], depth: int) -> Array:
        return self._some(values) * (1 + lax.axis_index("i") / self.devices).astype(values[0].dtype)

    def _meet(self, values: list[Array], depth: int) -> Array:
        count = self.devices
        ring = [(n, (n + 1) % count) for n in range(count)]
        kinds = [
            lambda x: lax.pmean(x, "i"),
            lambda x: lax.psum(x, "i") / 8,
            lambda x: lax.all_gather(x, "i").mean(0),
            lambda x: lax.all_gather(x, "i")[3 % count],
            lambda x: lax.ppermute(x, "i", ring[: count // 2 + 1]),
            lambda x: lax.ppermute(x, "i", ring),
            lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
            lambda x: lax.all_gather(lax.psum_scatter(x, "i", tiled=True), "i", tiled=True),
        ]
        if not self.smooth:
            kinds += [lambda x: lax.pmax(x, "i"), lambda x: lax.pmin(x, "i")]
        return self.pick(kinds)(self._some(values))

    def _meet_in_groups(self, values: list[Array], depth: int) -> Array:
        half = self.devices // 2
        numbers = np.arange(self.devices)
        groups = self.pick([numbers.reshape(2, half), numbers.reshape(half, 2).T]).tolist()
        kinds = [
            lambda x: lax.psum(x, "i", axis_index_groups=groups) / 8,
            lambda x: lax.all_gather(x, "i", axis_index_groups=groups).mean(0),
        ]
        if not self.smooth:
            kinds += [lambda x: lax.pmax(x, "i", axis_index_groups=groups)]
        return self.pick(kinds)(self._some(values))

    # ---- bodies

    def _inner(self, values: list[Array], depth: int, **limits: bool) -> Callable[..., Array]:
        """Return a function of two values, that reads others, too."""
        seed = int(self.rng.integers(2**31))
        limits = {"meets": self.meets and limits.get("meets", True),
                  "smooth": self.smooth or limits.get("smooth", False)}  # fmt: skip
        around = [self._some(values)]

        def inner(*args: Array) -> Array:
            maker = dataclasses.replace(self, rng=np.random.default_rng(seed), **limits)
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
        alike = self.chance(0.6) or not self.meets
        body = self._inner(values, depth, meets=alike)
        x = self._some(values)
        if self.smooth:
            return lax.fori_loop(0, 2, lambda _, x: body(x), x)
        count = 2 if alike else lax.axis_index("i") % 3
        if alike and self.meets and self.jumps and self.chance(0.5):
            largest = lambda x: lax.pmax(jnp.max(jnp.abs(x)), "i")
            going = lambda turn: (turn[0] < 3) & (largest(turn[1]) > 0.2)
            return lax.while_loop(going, lambda turn: (turn[0] + 1, body(turn[1]) / 2), (0, x))[1]
        return lax.while_loop(
            lambda turn: turn[0] < count, lambda turn: (turn[0] + 1, body(turn[1])), (0, x)
        )[1]

    def _cond(self, values: list[Array], depth: int) -> Array:
        alike = self.meets and self.chance(0.6)
        x, y = self._some(values), self._some(values)
        branches = [self._inner(values, depth, meets=alike) for _ in range(2)]
        if not self.jumps:
            chosen = self.state["turn"] % 2 == 0 if alike else lax.axis_index("i") % 2 == 0
        else:
            chosen = lax.psum(jnp.sum(y), "i") > 0 if alike else jnp.sum(y) > 0
        return lax.cond(chosen, *branches, x)

    def _gradient(self, values: list[Array], depth: int) -> Array:
        inner = self._inner(values, depth, smooth=True)
        return jax.grad(lambda x: jnp.sum(inner(x) ** 2))(self._some(values))

    # ---- as optimizers do it

    def updated(self, own: dict, gradient: Array) -> dict:
        """Return new leaves that are the same on all devices."""
        if self.chance(0.3):
            norm = jnp.sqrt(jnp.sum(gradient * gradient))
            gradient = gradient / jnp.maximum(norm, 1)
        update = self._update()
        match self.pick(["plain", "accumulated", "skipped", "switched", "scan", "while"]):
            case "accumulated":
                total = own["sum"] + gradient
                due = self.state["turn"] % 2 == 1
                apply = lambda own: {**update(own, total / 2), "sum": jnp.zeros_like(total)}
                return lax.cond(due, apply, lambda own: {**own, "sum": total}, own)
            case "skipped":
                finite = jnp.isfinite(gradient).all() & (self.state["turn"] < 5)
                return lax.cond(finite, lambda own: update(own, gradient), lambda own: own, own)
            case "switched":
                others = [update, self._update(), lambda own, _: own]
                return lax.switch(self.state["turn"] % 3, others, own, gradient)
            case "scan":
                parts = jnp.stack([gradient, -gradient / 2])
                return lax.scan(lambda own, part: (update(own, part), None), own, parts)[0]
            case "while":
                start = (jnp.int32(0), own)
                going = lambda turn: turn[0] <= self.state["turn"] % 2
                return lax.while_loop(
                    going, lambda turn: (turn[0] + 1, update(turn[1], gradient)), start
                )[1]
        return update(own, gradient)

    def _update(self) -> Callable[[dict, Array], dict]:
        weights = np.asarray(self.rng.normal(size=(4, 4)), np.float32)
        kinds = [
            lambda m, g: 0.75 * m + g,
            lambda m, g: jnp.tanh(m - g) * 0.5,
            lambda m, g: jnp.sqrt(m * m + g * g),
            lambda m, g: (m + g).T.reshape(SHAPE) / 2,
            lambda m, g: 0.5 * m + (g - jnp.mean(g, 0)),  # whole
            lambda m, g: 0.5 * m + g @ weights.astype(g.dtype) / 4,
        ]
        if self.jumps:
            kinds += [lambda m, g: jnp.where(g > 0, m, g), lambda m, g: m + jnp.sort(g, 0)]
        kind = self.pick(kinds)
        once_more = self.chance(0.3)

        def update(own: dict, gradient: Array) -> dict:
            moment = kind(own["moment"], gradient)
            if once_more:
                small = self.state["turn"] % 2 == 0
                moment = lax.cond(small, jnp.tanh, lambda m: 0.5 * m, moment)
            return {**own, "a": 0.5 * own["a"] - 0.125 * moment, "moment": moment}

        return update
