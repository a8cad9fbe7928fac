"""Compiled programs of the global view: what they gather, scatter and hold."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import steps
from against_pmap import compare, memory_of, stacked
from jax import lax
from jax.sharding import PartitionSpec as P
from steps import LAYERED, ROWS, UPDATES, X, Y, momentum, with_loss, with_update

from jax_dist import global_view
from jax_dist._hlo import HloModule

_WEIGHTS = 2 * 64 * 256 * 4  # bytes of what is sharded


def _sent(kind: str, compiled: Any) -> int:
    """Return the bytes that the collectives of a kind give to each device."""
    collectives = HloModule.parse(compiled.as_text()).collectives()
    return sum(each.count * each.result_bytes for each in collectives if each.kind == kind)


def _fsdp(step: Callable, *args: Any, **options: Any) -> Any:
    return global_view(step, "i", shardings="fsdp", **options).lower(*args).compile()


def _places(compiled: Any, kind: str = "all-gather") -> list[str]:
    return re.findall(rf'{kind}\(.*op_name="([^"]*)"', compiled.as_text())


@pytest.mark.parametrize(
    ("name", "share"),
    [(name, 0.55) for name in UPDATES]
    + [pytest.param(name, 0.5, marks=pytest.mark.thorough) for name in steps.WRAPPERS],
)
def test_the_state_stays_sharded_in_branches_loops_and_wrappers_of_optax(name, share):
    step, state, batch = steps.CASES[name]()
    pmapped = jax.pmap(step, "i").lower(stacked(state), *batch).compile()
    view = _fsdp(step, state, *batch)

    assert memory_of(view) <= share * memory_of(pmapped)
    assert _sent("all-gather", view) == _WEIGHTS  # for the forward and backward pass
    assert _sent("reduce-scatter", view) > 0


@pytest.mark.parametrize("gradients", ["scatter", "reduce"])
def test_what_is_sent_is_what_fsdp_by_hand_sends(gradients):
    view = _fsdp(steps.adam, steps.ADAM_STATE, X, Y, gradients=gradients)

    assert _sent("all-gather", view) == _WEIGHTS  # each parameter once
    scattered = gradients == "scatter"
    assert _sent("reduce-scatter", view) == (_WEIGHTS / 8 if scattered else 0)
    assert _sent("all-reduce", view) == 4 + (0 if scattered else _WEIGHTS)  # and the loss


def test_whole_numbers_are_summed_where_they_are():
    """In any order their sum is the same, so that "reduce" gathers none either."""

    def update(state, gradient):
        wrong = sum(jnp.sum(~jnp.isfinite(g)) for g in jax.tree.leaves(gradient))
        return lax.cond(wrong == 0, lambda: momentum(state, gradient), lambda: state)

    compare(with_update(update), steps.STATE, X, Y, shardings="fsdp", gradients="reduce")
    view = _fsdp(with_update(update), steps.STATE, X, Y, gradients="reduce")
    assert _sent("all-gather", view) == _WEIGHTS  # the parameters


def test_what_needs_whole_operands_in_a_branch_gathers_them_there():
    step, state, batch = steps.CASES["sort in a branch"]()
    view = _fsdp(step, state, *batch)
    assert _sent("all-gather", view) == 2 * _WEIGHTS  # the parameters, and the gradients


def test_what_all_turns_need_whole_is_gathered_before_a_loop():
    def update(state, gradient):
        def turn(_, state):
            more = jax.tree.map(lambda g, s: g + jnp.cumsum(s, -1) / 64, gradient, sums)
            return momentum(state, more)

        sums = state["sums"]
        return lax.fori_loop(0, 3, turn, state)

    places = _places(_fsdp(with_update(update), steps.STATE, X, Y))
    assert len(places) == 4
    assert not [place for place in places if "while" in place]


def test_a_branch_with_nothing_sharded_is_left_alone():
    view = global_view(with_update(steps.skips), "i", shardings=lambda path, leaf: P())
    assert "all-gather" not in view.lower(steps.STATE, X, Y).compile().as_text()


def _gathers(view: Any, *args: Any) -> list[str]:
    """Return the types that the regions gather, such as "64x64xf32"."""
    text = view.lower(*args).as_text()
    return re.findall(r"stablehlo\.all_gather.*?-> tensor<(\S+)>", text, re.DOTALL)


_regather = functools.partial(global_view, axis_name="i", shardings="fsdp", regather=True)


def test_what_is_read_in_both_passes_is_gathered_twice():
    def step(w, x):
        loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]))
        return jax.tree.map(lambda old, g: old - 0.25 * g, w, lax.pmean(jax.grad(loss)(w), "i"))

    w = {"a": LAYERED[0], "b": LAYERED[1]}
    view = _regather(step)

    # By "b", x has a gradient that "a" wants; by "a" nobody wants one.
    assert _gathers(view, w, ROWS) == ["64x64xf32"] * 3
    # XLA for CPU in jax 0.10 makes one of two equal gathers, whatever stands between.
    count = 3 if jax.__version_info__ >= (0, 12) else 2
    assert view.lower(w, ROWS).compile().as_text().count(" all-gather(") == count
    once = global_view(step, "i", shardings="fsdp")
    assert _gathers(once, w, ROWS) == []  # XLA puts them before the shard_map
    assert once.lower(w, ROWS).compile().as_text().count(" all-gather(") == 2


def test_a_checkpoint_stays_a_computation_of_its_own():
    def barriers(loss: Callable) -> int:
        text = _regather(with_loss(loss)).lower(LAYERED, ROWS).as_text()
        return text.count("optimization_barrier")

    # One for each time that it runs, forward and again backward; else XLA keeps what it gathered.
    assert barriers(steps.LOSSES["checkpoints"]) == barriers(steps.one_by_one) + 2


def test_a_scan_over_layers_gathers_one_in_each_turn():
    view = _regather(with_loss(steps.in_a_scan))

    assert set(_gathers(view, LAYERED, ROWS)) == {"64x64xf32"}
    places = _places(view.lower(LAYERED, ROWS).compile())
    assert len([place for place in places if "while" in place]) == 2


def test_what_all_turns_read_is_gathered_before_a_scan():
    places = _places(_regather(with_loss(steps.read_in_each_turn)).lower(LAYERED, ROWS).compile())
    assert places
    assert not [place for place in places if "while" in place]


def test_parameters_are_gathered_in_the_precision_that_is_read():
    types = _gathers(_regather(with_loss(steps.in_half_precision)), LAYERED, ROWS)
    assert {type_.rpartition("x")[2] for type_ in types} == {"bf16"}


@pytest.mark.parametrize("regather", [False, True])
def test_the_gradients_of_a_scan_over_layers_are_scattered_in_each_turn(regather):
    step = with_loss(steps.scan_in_half_precision)
    text = _fsdp(step, LAYERED, ROWS, regather=regather).as_text()

    scattered = re.findall(r'= f32\[([\d,]+)\]\S* reduce-scatter\(.*op_name="([^"]*)"', text)
    assert [(shape, "while" in place) for shape, place in scattered] == [("8,64", True)]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA's schedule for CPU drops barriers")
def test_a_step_takes_less_memory():
    def step(w, x):
        gradient = lax.pmean(jax.grad(steps.one_by_one)(w, x), "i")
        return jax.tree.map(lambda old, g: old - 0.25 * g, w, gradient)

    w, x = [np.ones((256, 256), np.float32)] * 6, np.ones((8, 4, 256), np.float32)
    once, again = [_fsdp(step, w, x, regather=regather) for regather in (False, True)]
    sizes = [each.memory_analysis().temp_size_in_bytes for each in (once, again)]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_loop_compiles_once_and_gives_up_its_memory():
    view = global_view(steps.adam, "i", shardings="fsdp", donate_argnums=0)
    state = view.place(steps.ADAM_STATE)

    for _ in range(3):
        before = state
        state, _ = view(state, X, Y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert view._programs.last.jitted._cache_size() == 1
    memory = view.lower(state, X, Y).compile().memory_analysis()
    assert memory.alias_size_in_bytes == view.report().bytes_per_device
    assert view.report().bytes_per_device < 0.15 * view.report().bytes_under_pmap


@pytest.mark.parametrize("shardings", ["replicated", "fsdp"])
def test_a_step_is_the_same_program_each_time(shardings):
    """Else no process finds it in the cache, and several wait for each other's collectives."""

    def text() -> str:
        view = global_view(steps.adam, "i", shardings=shardings)
        return view.lower(steps.ADAM_STATE, X, Y).as_text()

    assert len({text() for _ in range(4)}) == 1
