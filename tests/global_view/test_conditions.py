"""Optimizers in branches and loops: the state stays in parts, with the numbers of pmap."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare, stacked
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

_random = np.random.default_rng(0)
_WIDE, _DEEP = 64, 256
X, Y = _random.normal(size=(2, 8, 2, _WIDE)).astype(np.float32)
_WEIGHTS = _DEEP * _WIDE * 4 * 2  # bytes of what is cut


def _state() -> dict:
    params = {
        "a": _random.normal(size=(_WIDE, _DEEP)).astype(np.float32) / 8,
        "b": _random.normal(size=(_DEEP, _WIDE)).astype(np.float32) / 16,
    }
    return {"params": params, "mean": params, "sums": params, "turn": np.int32(0)}


def _loss(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def _updated(state: dict, gradient: dict) -> dict:
    mean = jax.tree.map(lambda m, g: 0.75 * m + g, state["mean"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.125 * m, state["params"], mean)
    return {**state, "params": params, "mean": mean}


def _step(update: Callable[[dict, dict], dict]) -> Callable:
    def step(state: dict, x: jax.Array, y: jax.Array) -> dict:
        gradient = lax.pmean(jax.grad(_loss)(state["params"], x, y), "i")
        return {**update(state, gradient), "turn": state["turn"] + 1}

    return step


def _is_finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _skips(state, gradient):
    return lax.cond(_is_finite(gradient), lambda: _updated(state, gradient), lambda: state)


def _each_second(state, gradient):
    sums = jax.tree.map(jnp.add, state["sums"], gradient)
    emptied = jax.tree.map(jnp.zeros_like, sums)
    return lax.cond(
        state["turn"] % 2 == 1,
        lambda: {**_updated(state, sums), "sums": emptied},
        lambda: {**state, "sums": sums},
    )


def _either(state, gradient):
    signs = lambda: _updated(state, jax.tree.map(jnp.sign, gradient))
    return lax.cond(state["turn"] % 2 == 0, signs, lambda: _updated(state, gradient))


def _while_small(state, gradient):
    def turn(carry):
        count, state = carry
        return count + 1, _updated(state, gradient)

    return lax.while_loop(lambda carry: carry[0] < 2, turn, (0, state))[1]


def _three_times(state, gradient):
    return lax.scan(lambda s, _: (_updated(s, gradient), None), state, None, length=3)[0]


def _layer_by_layer(state, gradient):
    """Which leaves a scan walks over and makes."""
    a, slope = state["params"]["a"], gradient["a"]
    _, rows = lax.scan(lambda _, pair: (None, pair[0] - 0.125 * pair[1]), None, (a, slope))
    return {**state, "sums": {**state["sums"], "a": rows}}


def _shifted(state, gradient):
    """A carry that is wanted in parts by a turn before the last only."""

    def turn(_, carry):
        params, mean, older = carry
        return jax.tree.map(jnp.subtract, params, mean), older, older

    params, _, _ = lax.fori_loop(0, 3, turn, (state["params"], state["mean"], gradient))
    return {**state, "params": params}


def _in_calls(state, gradient):
    return jax.jit(lambda state, gradient: jax.jit(_skips)(state, gradient))(state, gradient)


def _branch_in_a_loop(state, gradient):
    return lax.fori_loop(0, 2, lambda _, state: _skips(state, gradient), state)


_UPDATES = [
    *(_skips, _each_second, _either, _while_small, _three_times, _layer_by_layer, _shifted),
    *(_in_calls, _branch_in_a_loop),
]


def _gathered(text: str) -> int:
    """The bytes of all gathers in a program."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    return sum(4 * int(np.prod(list(map(int, shape.split(","))))) for shape in shapes)


def _memory(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("update", _UPDATES)
def test_the_numbers_are_those_of_pmap(update):
    compare(_step(update), _state(), X, Y, times=3, shardings="fsdp")


@pytest.mark.parametrize("update", _UPDATES)
def test_the_state_stays_in_parts(update):
    step, state = _step(update), _state()
    pmapped = jax.pmap(step, "i").lower(stacked(state), X, Y).compile()
    view = global_view(step, "i", shardings="fsdp").lower(state, X, Y).compile()

    assert _memory(view) <= 0.55 * _memory(pmapped)
    assert _gathered(view.as_text()) == _WEIGHTS  # for the forward and the backward pass
    assert "reduce-scatter(" in view.as_text()


def test_what_needs_whole_operands_in_a_branch_gathers_them_there():
    def update(state, gradient):
        middle = lambda g: jnp.sort(g.ravel())[g.size // 2]
        centered = lambda: jax.tree.map(lambda g: g - middle(g), gradient)
        return lax.cond(state["turn"] < 1, lambda: _updated(state, centered()), lambda: state)

    compare(_step(update), _state(), X, Y, shardings="fsdp")
    text = global_view(_step(update), "i", shardings="fsdp").lower(_state(), X, Y).compile()
    assert _gathered(text.as_text()) == 2 * _WEIGHTS  # the parameters, and the gradients


def test_what_all_turns_need_whole_is_gathered_before_a_loop():
    def update(state, gradient):
        def turn(_, state):
            more = jax.tree.map(lambda g, s: g + jnp.cumsum(s, -1) / 64, gradient, sums)
            return _updated(state, more)

        sums = state["sums"]
        return lax.fori_loop(0, 3, turn, state)

    view = global_view(_step(update), "i", shardings="fsdp").lower(_state(), X, Y).compile()
    places = re.findall(r'all-gather\(.*op_name="([^"]*)"', view.as_text())
    assert len(places) == 4
    assert not [place for place in places if "while" in place]


def test_whole_numbers_are_summed_where_they_lie():
    """In any order their sum is the same, so that "reduce" gathers none either."""

    def update(state, gradient):
        wrong = sum(jnp.sum(~jnp.isfinite(g)) for g in jax.tree.leaves(gradient))
        return lax.cond(wrong == 0, lambda: _updated(state, gradient), lambda: state)

    options = {"shardings": "fsdp", "gradients": "reduce"}
    compare(_step(update), _state(), X, Y, **options)
    text = global_view(_step(update), "i", **options).lower(_state(), X, Y).compile().as_text()
    assert text.count(" all-gather(") == 2  # the parameters


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["MultiSteps", "apply_if_finite", "clip"])
def test_wrappers_of_optax(name):
    optax = pytest.importorskip("optax")
    adam = optax.adamw(1e-2)
    if name == "MultiSteps":
        wrapped = optax.MultiSteps(
            adam, 2, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation()
    elif name == "clip":
        clipped = optax.chain(optax.clip_by_global_norm(0.125), adam)
        wrapped = optax.MultiSteps(clipped, 2).gradient_transformation()
    else:
        wrapped = optax.apply_if_finite(adam, 3)

    def step(state, x, y):
        params, rest = state
        gradient = lax.pmean(jax.grad(_loss)(params, x, y), "i")
        updates, rest = wrapped.update(gradient, rest, params)
        return (optax.apply_updates(params, updates), rest), None

    params = _state()["params"]
    state = params, wrapped.init(params)
    gradients = "reduce" if name == "clip" else "scatter"  # a norm is a sum of floats
    compare(step, state, X, Y, times=3, shardings="fsdp", gradients=gradients)
    pmapped = jax.pmap(step, "i").lower(stacked(state), X, Y).compile()
    view = global_view(step, "i", shardings="fsdp").lower(state, X, Y).compile()
    assert _memory(view) <= 0.5 * _memory(pmapped)
    assert _gathered(view.as_text()) == _WEIGHTS


def test_a_branch_with_nothing_in_parts_is_left_alone():
    view = global_view(_step(_skips), "i", shardings=lambda path, leaf: P())
    text = view.lower(_state(), X, Y).compile().as_text()
    assert "all-gather" not in text
