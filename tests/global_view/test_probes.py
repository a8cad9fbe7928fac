"""Whatever JAX can do on a device: as under pmap to the bit, or refused with a message.

All are slow together. The default run has one of each kind that the automatic way of JAX, `jit` of
`vmap`, gets wrong without an error, or refuses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from probe import FOLDED, FOLDED_FREE, FREE, Probe, check, in_global_view, names, under_pmap
from probes_bodies import PROBES as BODIES
from probes_collective import PROBES as COLLECTIVE
from probes_library import PROBES as LIBRARY
from probes_random import PROBES as RANDOM

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

PROBES = [*COLLECTIVE, *RANDOM, *BODIES, *LIBRARY]
QUICK = (
    *("max of gathered nan", "all_to_all of shared", "ppermute without the last"),
    *("psum in groups", "rbg bits", "custom vmap", "gradient by a kernel", "ragged dot"),
    *("pbroadcast", "cond on a mean"),
)
QUICK_ON_MESHES = (
    *("ppermute without the last", "psum in groups", "rbg bits", "psum bfloat16"),
    "psum_scatter bfloat16",
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for probe, name in zip(PROBES, names(PROBES), strict=True)
    ],
)
def test_probe(probe: Probe):
    check(probe)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [FOLDED, FREE, FOLDED_FREE], ids=["folded", "free", "both"])
@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, id=name, marks=() if name in QUICK_ON_MESHES else pytest.mark.slow)
        for probe, name in zip(PROBES, names(PROBES), strict=True)
    ],
)
def test_probe_on_a_mesh_of_several_axes(probe: Probe, options: dict):
    check(probe, **options)


def test_the_quick_ones_are_there():
    assert {*QUICK, *QUICK_ON_MESHES} <= set(names(PROBES))


@pytest.mark.slow
def test_keys_go_in_and_out():
    probe = Probe(
        "split", lambda key: jax.random.split(key, 2), (jax.random.split(jax.random.key(0), 8),)
    )

    check(probe)


# ---- effects


def _seen_in_branch(see: Callable, v: jax.Array) -> jax.Array:
    return lax.cond(lax.axis_index("i") == 0, lambda v: (see(v), v)[1], lambda v: v, v)


def _seen_in_loop(see: Callable, v: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c > 0, lambda c: (see(c), c - 1)[1], v)


EFFECTS = {
    "of each device": (lambda see, v: (see(v), v)[1], 8),
    "of a sum": (lambda see, v: (see(lax.psum(v, "i")), v)[1], 8),
    "in a branch": (_seen_in_branch, 1),
    "in a loop": (_seen_in_loop, 28),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", EFFECTS)
def test_effects_happen_as_often_as_under_pmap(kind: str):
    step, wanted = EFFECTS[kind]
    seen: list[float] = []
    see = lambda value: jax.debug.callback(lambda each: seen.append(float(each)), value)
    probe = Probe(kind, lambda v: step(see, v), (np.arange(8, dtype=np.float32),))

    found = []
    for run in (under_pmap, in_global_view):
        seen.clear()
        jax.block_until_ready(run(probe))
        jax.effects_barrier()
        found.append(sorted(seen))

    assert found[0] == found[1]
    assert len(found[0]) == wanted


# ---- derivatives from outside


def _mean_squares(w: Any, a: Any) -> Any:
    return (lax.pmean(jnp.tanh(w * a), "i") - a) ** 2


def _thrice(w: Any, a: Any) -> Any:
    turn = lambda c, _: (c + lax.pmean(jnp.sin(c * a), "i"), None)
    return lax.scan(turn, w, None, length=3)[0]


W, A = np.float32(0.3), np.arange(1, 9, dtype=np.float32)
OUTSIDE = [
    Probe("psum squared", lambda a: lax.psum(a, "i") ** 2, (A,)),
    Probe(
        "cond", lambda a: lax.cond(a > 4, lambda a: jnp.sqrt(a - 4), lambda a: a * 0 + 1, a), (A,)
    ),
    Probe("of shared", lambda w, a: lax.psum(jnp.tanh(w * a), "i"), (W, A), (0,)),
    Probe("pmean", _mean_squares, (W, A), (0,)),
    Probe("scan", _thrice, (W, A), (0,)),
    Probe("gathered", lambda a: (lax.all_gather(a, "i") * a).sum(), (A,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("probe", OUTSIDE, ids=names(OUTSIDE))
def test_derivatives_from_outside(probe: Probe):
    view = global_view(probe.step, "i", state=None, in_axes=probe.in_axes)
    mapped = jax.pmap(probe.step, "i", in_axes=probe.in_axes)

    ours, wanted = (
        jax.grad(lambda *args, run=run: run(*args).sum())(*probe.args) for run in (view, mapped)
    )
    np.testing.assert_allclose(ours, wanted, rtol=1e-5)

    ours, wanted = (jax.jvp(run, probe.args, probe.args)[1] for run in (view, mapped))
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
