"""Whatever a step does, it has the numbers of pmap; and loops keep what is shared in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from against_pmap import compare
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

pytestmark = pytest.mark.rewriting


def _in_parts(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    del path, leaf
    return P("i")


def test_bodies_have_the_numbers_of_pmap():
    state, own = probes.arguments()

    compare(probes.step_of("bodies"), state, own, times=1, shardings=_in_parts, gradients="reduce")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"shardings": _in_parts}, {"shardings": _in_parts, "regather": True}],
    ids=["whole", "parts", "regather"],
)
@pytest.mark.parametrize("table", probes.TABLES)
def test_probes_have_the_numbers_of_pmap(table, options):
    state, own = probes.arguments()

    compare(probes.step_of(table), state, own, times=2, gradients="reduce", **options)


def _epochs(state, x):
    """Two passes over small batches, each with an update of its own; as in PPO."""

    def update(w, rows):
        gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(w)
        return w - 0.25 * lax.pmean(gradient, "i"), lax.pmean(jnp.sum(gradient), "i")

    return lax.scan(lambda w, _: lax.scan(update, w, x), state, None, length=2)


def test_what_a_loop_carries_stays_in_parts():
    x = np.random.default_rng(0).normal(size=(8, 3, 4, 32)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32) / 8

    view, kept = compare(_epochs, w, x, shardings="fsdp")

    assert kept.sharding.spec == P(None, "i")
    assert view.report().scattered == 1
    text = view.lower(w, x).compile().as_text()
    assert "reduce-scatter" in text
    assert f"f32[{32},{64 // 8}]" in text


def test_parameters_that_a_loop_only_reads_are_gathered_before_it():
    def step(w, x):
        def turn(total, rows):
            gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(w)
            return total + lax.pmean(gradient, "i"), None

        total, _ = lax.scan(turn, jnp.zeros_like(w), x)
        return w - 0.25 * total

    x = np.random.default_rng(0).normal(size=(8, 3, 4, 32)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32) / 8

    view, _ = compare(step, w, x, shardings="fsdp")

    lines = view.lower(w, x).compile().as_text().splitlines()
    gathers = [line for line in lines if " all-gather(" in line]
    assert len(gathers) == 1
    assert "while" not in gathers[0].split("op_name=")[-1]


def test_many_sums_are_one_island():
    def step(state, x):
        sums = {name: lax.pmean(jnp.mean(x * leaf), "i") for name, leaf in state.items()}
        return {name: leaf - sums[name] for name, leaf in state.items()}

    view, _ = compare(step, {f"{n}": np.float32(n) for n in range(5)}, np.ones((8, 3), np.float32))

    assert view.report().islands == 1


def test_an_effect_happens_once_on_each_device():
    seen = []

    def step(w, x):
        total = lax.psum(x, "i")
        jax.debug.callback(lambda value: seen.append(float(value)), total)
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return w + total

    view = global_view(step, "i", state=0)
    jax.block_until_ready(view(np.float32(0), np.arange(8, dtype=np.float32)))
    jax.effects_barrier()

    assert sorted(seen) == [*map(float, range(8)), *[28.0] * 8]


def test_an_island_that_nothing_reads_but_its_effects_runs():
    seen = []

    def step(w, x):
        jax.debug.callback(lambda value: seen.append(float(value)), x)
        return w + 1

    jax.block_until_ready(global_view(step, "i")(np.float32(0), np.arange(8, dtype=np.float32)))
    jax.effects_barrier()

    assert sorted(seen) == list(map(float, range(8)))


def test_sums_are_scattered_through_operations_that_move_dimensions():
    """Of the three gradients, one is broadcast after its sum, and that sum is read whole."""

    def step(state, x):
        loss = lambda s: jnp.sum((x @ s["w"] @ s["v"].T) ** 2) + jnp.sum(s["b"])
        gradient = lax.pmean(jax.grad(loss)(state), "i")
        gradient["b"] = jnp.broadcast_to(jnp.sum(gradient["b"]), (2048,))
        gradient["v"] = jnp.squeeze(gradient["v"].T[:, None].T, 1)
        return jax.tree.map(lambda old, g: old - g / 128, state, gradient)

    random = np.random.default_rng(0)
    state = {
        "w": random.normal(size=(32, 64)).astype(np.float32),
        "v": random.normal(size=(64, 64)).astype(np.float32),
        "b": random.normal(size=2048).astype(np.float32),
    }
    x = random.normal(size=(8, 4, 32)).astype(np.float32)

    view, _ = compare(step, state, x, times=1, shardings="fsdp")

    assert view.report().scattered == 2


def _loop(value):
    return lax.fori_loop(0, 3, lambda _, v: jnp.tanh(v - jnp.sum(v, 0) / 3), value)


def _scan(value):
    return lax.scan(lambda v, _: (v - jnp.sum(v, 0) / 3, v), value, None, length=3)[1][1]


@pytest.mark.parametrize("body", [_loop, _scan])
def test_a_sum_inside_of_a_body_is_not_taken_over_parts(body):
    """The state wants the result in parts, so XLA would cut the whole body, and add up parts."""

    def step(state, x):
        return state + body(jnp.cos(state)) * lax.pmean(jnp.mean(x), "i")

    state = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)

    view, kept = compare(step, state, x, times=2, shardings=_in_parts, gradients="reduce")

    compiled = view.lower(kept, x).compile().as_text()
    assert compiled.count(" all-reduce(") == 1  # pmean's
