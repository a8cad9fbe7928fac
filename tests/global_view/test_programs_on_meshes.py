"""Thirty training programs on meshes of one axis and of several: pmap's bits, or its numbers.

    python -m pytest -m slow tests/global_view/test_programs_on_meshes.py

With gradients="reduce" every sum is the one of pmap, so all is equal to the bit, however the state
lies. Where sums go over parts, they have another order: float64 is then compared, to 1e-9 of the
largest number of a leaf. `optax.MultiSteps` does not take float64, and what is computed in half
precision rounds as coarsely in any; they have bounds of their own.
"""

import gc
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from against_pmap import compare
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

pytest.importorskip("optax")
from training_programs import PROGRAMS  # noqa: E402 (it imports optax)

pytestmark = [pytest.mark.rewriting, pytest.mark.slow]

BOUNDS = {"MultiSteps": 1e-3, "half precision": 3e-2}
MESHES = {
    "8": {"i": 8},
    "2 x 4": {"replica": 2, "shard": 4},
    "4 x 2": {"replica": 4, "shard": 2},
    "2 x model 4": {"i": 2, "model": 4},
    "4 x model 2": {"i": 4, "model": 2},
    "(2, 2) x model 2": {"replica": 2, "shard": 2, "model": 2},
}
_FURTHER = {
    "qkv": (None, None, "model"), "o": (None, "model", None), "gate": (None, None),
    "table": ("model", None), "in": (None, "model"), "out": ("model", None), "own": ("model",),
}  # fmt: skip


def _rule(over: str) -> Any:
    """Matrices over the further axis as their names say, and over `over` along another one."""

    def rule(path: str, leaf: jax.ShapeDtypeStruct) -> P:
        name = path.rsplit("/", maxsplit=1)[-1]
        if name == "own":
            return P("model")
        if leaf.ndim < 2 or leaf.size < 1024:
            return P()
        further = _FURTHER.get(name, (None, "model"))
        parts: list[Any] = [*[None] * leaf.ndim, *further][-leaf.ndim :]
        free = [n for n, part in enumerate(parts) if part is None and leaf.shape[n] >= 32]
        for last in free[-1:]:
            parts[last] = over
        return P(*parts)

    return rule


def _options(sizes: dict[str, int]) -> dict[str, Any]:
    own = tuple(name for name in sizes if name != "model")
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    shardings = _rule(own[-1]) if "model" in sizes else "fsdp"
    return {"mesh": mesh, "mesh_axes": own, "shardings": shardings}


def _on(sizes: dict[str, int], batch: Any) -> Any:
    count = 8 // sizes.get("model", 1)
    return jax.tree.map(lambda leaf: leaf[:count], batch)


def _assert_lies_as_cut(view: Any, state: Any, sizes: dict[str, int]) -> None:
    cut = 0
    for leaf, array in zip(view.report().leaves, jax.tree.leaves(state), strict=True):
        named = [part for part in leaf.sharding.spec if part is not None]
        names = [n for part in named for n in (part if isinstance(part, tuple) else (part,))]
        parts = math.prod(sizes[name] for name in names)
        assert array.addressable_shards[0].data.nbytes * parts == array.nbytes
        assert leaf.bytes_per_device * parts == array.nbytes
        cut += leaf.shared and parts > 1
    assert cut >= 2


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """A process may map only so many pieces of code."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bits_are_those_of_pmap(name, mesh):
    step, state, batch = PROGRAMS[name]()
    sizes = MESHES[mesh]
    view, held = compare(step, state, *_on(sizes, batch), gradients="reduce", **_options(sizes))
    _assert_lies_as_cut(view, held, sizes)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_sums_have_another_order(name, mesh):
    with jax.enable_x64(name != "MultiSteps"):
        step, state, batch = PROGRAMS[name]()
        if name != "MultiSteps":
            wide = lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf
            state, batch = jax.tree.map(lambda leaf: wide(np.asarray(leaf)), (state, batch))
        sizes = MESHES[mesh]
        bound = BOUNDS.get(name, 1e-9)
        options = _options(sizes)
        view, held = compare(step, state, *_on(sizes, batch), times=3, bound=bound, **options)
        _assert_lies_as_cut(view, held, sizes)


def test_thirty_programs():
    assert len(PROGRAMS) == 30
