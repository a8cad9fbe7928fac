"""Histories: the same steps on `jax.pmap` and on ours, with what the function captures changing.

Whether a function computes with a new value or with one that it was traced with depends on all that
came before. So histories are drawn, and each result is compared with that of `jax.pmap`.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist

pytestmark = pytest.mark.mapping

_STEPS = 25


class _World:
    """A function, all that it captures, and the ways to call it and to change these."""

    def __init__(self, pmap: Callable, rng: np.random.Generator) -> None:
        self.pmap, self.rng = pmap, rng
        self.large = np.arange(512, dtype=np.float32)  # more than 1 kB: lifted to an argument
        self.small = np.ones(4, np.float32)
        self.placed = jnp.arange(300, dtype=jnp.float32)
        self.key = np.array([0, 7], np.uint32)  # of a random draw
        self.number = 1.0
        self.fails = False
        self.runs = 0
        self.place = pmap(lambda x: x, "i")
        self.fed = self.place(np.zeros((8, 3), np.float32))

        def step(x: jax.Array, n: int) -> jax.Array:
            self.runs += 1
            if self.fails:
                raise RuntimeError("the body fails")
            drawn = jax.random.uniform(self.key.copy(), ())
            captured = self.large.sum() + jnp.sum(self.large[:7] * 2) + self.placed.sum()
            total = lax.psum(x.sum(), "i")
            return x * n + captured + self.small[0] * self.number + drawn + total

        def carry(state: jax.Array, x: jax.Array) -> jax.Array:
            return state * 0.5 + lax.pmean(x.sum(), "i") * self.small[1] + self.large[3]

        self.step, self.carry = step, carry
        self.decorate()

    def decorate(self) -> None:
        self.mapped = self.pmap(self.step, "i", static_broadcasted_argnums=1)
        self.carried = self.pmap(self.carry, "i", donate_argnums=0)

    # ---- the steps; each draws from `rng`, in the same order in both worlds

    def call(self) -> Any:
        return self.mapped(self._x(), self._n())

    def call_on_jax_array(self) -> Any:
        return self.mapped(jnp.asarray(self._x()), self._n())

    def call_in_jit(self) -> Any:
        n = self._n()
        return jax.jit(lambda x: self.mapped(x, n) + 1)(self._x())

    def call_in_a_thread(self) -> Any:
        results: list[Any] = []
        x, n = self._x(), self._n()
        thread = threading.Thread(target=lambda: results.append(self.mapped(x, n)))
        thread.start()
        thread.join()
        return results[0] if results else "raised"

    def lower(self) -> None:
        self.mapped.lower(self._x(), self._n())

    def feed_back(self) -> Any:
        self.fed = self.carried(self.fed, self._x())
        return self.fed

    def start_again(self) -> None:
        # On the devices, as what comes back: jax.pmap traces again where it lies otherwise.
        self.fed = self.place(np.full((8, 3), self.rng.integers(4), np.float32))

    def write_in_place(self) -> None:
        self.large[int(self.rng.integers(9))] += 1
        self.small[int(self.rng.integers(2))] *= 2
        self.key[1] += 1

    def rebind(self) -> None:
        choice = self.rng.integers(4)
        if choice == 0:
            self.large = self.large * 2
        elif choice == 1:
            self.placed = self.placed + 1
        elif choice == 2:
            self.number += 1
        else:
            self.small = self.small.copy()

    def clear(self) -> None:
        jax.clear_caches()

    def fail(self) -> Any:
        self.fails = True
        try:
            return self.mapped(np.ones((8, int(self.rng.integers(4, 7))), np.float32), 1)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self.fails = False

    def _x(self) -> np.ndarray:
        width = int(self.rng.integers(1, 4))
        return self.rng.normal(size=(8, width)).astype(np.float32)

    def _n(self) -> int:
        return int(self.rng.integers(1, 3))


_CALLS = ("call", "call_on_jax_array", "call_in_a_thread", "feed_back", "fail")
_CHANGES = ("start_again", "write_in_place", "rebind", "decorate")


def _histories(seed: int) -> tuple[_World, _World, list[str]]:
    rng = np.random.default_rng(seed)
    names = []
    for _ in range(_STEPS):
        kinds = _CALLS if rng.random() < 0.6 else _CHANGES
        names.append("clear" if rng.random() < 0.02 else str(rng.choice(kinds)))
    worlds = [_World(pmap, np.random.default_rng(seed)) for pmap in (jax.pmap, jax_dist.pmap)]
    return worlds[0], worlds[1], names


def _differences(seed: int) -> list[str]:
    """The first step of a history that gives another result, with all before it."""
    theirs, ours, names = _histories(seed)
    for count, name in enumerate(names, 1):
        if name == "clear":  # of the whole process: once
            jax.clear_caches()
            continue
        expected, result = getattr(theirs, name)(), getattr(ours, name)()
        if not _same(expected, result):
            return [*names[:count], f"gives {result}, and with jax.pmap {expected}"]
    return [] if ours.runs <= theirs.runs else [*names, f"runs {ours.runs}, not {theirs.runs}"]


def _same(expected: Any, result: Any) -> bool:
    if isinstance(expected, str) or expected is None:
        return expected == result
    return np.array_equal(np.asarray(expected), np.asarray(result), equal_nan=True)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(2, 6))]
)
def test_a_history_gives_what_it_gives_with_jax_pmap(seed: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _differences(seed) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 206))
def test_more_histories(seed: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _differences(seed) == []
