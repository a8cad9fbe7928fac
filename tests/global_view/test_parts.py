"""With `regather`, parts are gathered where they are read, each time; no number changes."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from against_pmap import compare
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import global_view

pytestmark = pytest.mark.rewriting

LAYERS = 3
_random = np.random.default_rng(0)
LAYERED = _random.normal(size=(LAYERS, 64, 64)).astype(np.float32) / 8
X = _random.normal(size=(8, 4, 64)).astype(np.float32)


def _trained(loss: Callable) -> Callable:
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.25 * lax.pmean(gradient, "i"), lax.pmean(value, "i")

    return step


def _one_by_one(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return jnp.sum(x * x)


def _in_a_scan(w, x):
    return jnp.sum(lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0] ** 2)


def _in_checkpoints(w, x):
    return jax.checkpoint(_one_by_one)(w, x)


def _in_a_call(w, x):
    return jax.jit(lambda w, x: jnp.tanh(x @ w[0]) @ w[1])(w, x).sum()


def _in_half_precision(w, x):
    half, rows = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return jnp.sum(jnp.tanh(jnp.tanh(rows @ half[0]) @ half[1]).astype(np.float32))


def _read_in_each_turn(w, x):
    return jnp.sum(lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w[0]), x) ** 2)


def _walked_along_the_cut(w, x):
    return jnp.sum(lax.scan(lambda x, row: (jnp.tanh(x + row), None), x, w[0])[0] ** 2)


def _given_back_by_a_body(w, x):
    x, rows = lax.scan(lambda x, layer: (jnp.tanh(x @ layer), layer), x, w)
    return jnp.sum(x * x) + jnp.sum(rows * rows)


LOSSES = [
    *(_one_by_one, _in_a_scan, _in_checkpoints, _in_a_call, _in_half_precision),
    *(_read_in_each_turn, _walked_along_the_cut, _given_back_by_a_body),
]


def _gathers(view, *args) -> list[tuple[int, ...]]:
    """The shapes that are gathered where the islands say so."""
    text = view.lower(*args).as_text()
    found = re.findall(r"stablehlo\.all_gather.*?-> tensor<([\dx]+)x(?:f32|bf16)>", text, re.DOTALL)
    return sorted(tuple(map(int, shape.split("x"))) for shape in found)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_number_changes(loss):
    compare(_trained(loss), LAYERED, X, shardings="fsdp", gradients="reduce", regather=True)


# Of eight layers, of which each device holds one.
@pytest.mark.thorough
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss is not _in_checkpoints])
def test_no_number_changes_where_layers_are_cut(loss):
    w = LAYERED[:2].repeat(4, 0)
    cut = lambda path, leaf: P("i") if leaf.ndim else P()

    compare(_trained(loss), w, X, shardings=cut, gradients="reduce", regather=True)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES)
def test_no_number_changes_where_types_name_a_mesh(loss):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    step = _trained(loss)

    with jax.set_mesh(mesh):
        once, again = [
            global_view(step, "i", mesh=mesh, shardings="fsdp", regather=regather)(LAYERED, X)
            for regather in (False, True)
        ]

    assert (np.asarray(once[0]) == np.asarray(again[0])).all()


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [_one_by_one, _in_a_scan, _in_checkpoints])
def test_derivatives_from_outside_are_the_same(loss):
    def of_state(*, regather: bool) -> jax.Array:
        view = global_view(_trained(loss), "i", shardings="fsdp", regather=regather)
        return jax.grad(lambda w: jnp.sum(view(w, X)[1]))(LAYERED)

    once, again = np.asarray(of_state(regather=False)), np.asarray(of_state(regather=True))
    assert (once == again).all()
    assert np.any(once)


def test_what_is_read_in_both_passes_is_gathered_twice():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]))

    def step(w, x):
        gradient = lax.pmean(jax.grad(loss)(w, x), "i")
        return jax.tree.map(lambda old, new: old - 0.25 * new, w, gradient)

    w = {"a": LAYERED[0], "b": LAYERED[1]}
    view = global_view(step, "i", shardings="fsdp", regather=True)

    # By "b", x has a gradient that "a" wants; by "a" nobody wants one.
    assert _gathers(view, w, X) == [(1, 64, 64), (64, 64), (64, 64)]
    assert view.lower(w, X).compile().as_text().count(" all-gather(") == 3
    once = global_view(step, "i", shardings="fsdp")
    assert _gathers(once, w, X) == []  # XLA puts them before the shard_map
    assert once.lower(w, X).compile().as_text().count(" all-gather(") == 2


def test_a_checkpoint_stays_a_computation_of_its_own():
    def barriers(loss: Callable) -> int:
        view = global_view(_trained(loss), "i", shardings="fsdp", regather=True)
        return view.lower(LAYERED, X).as_text().count("optimization_barrier")

    # One for each time that it runs, forward and again backward; else XLA keeps what it gathered.
    assert barriers(_in_checkpoints) == barriers(_one_by_one) + 2


def test_a_scan_over_layers_gathers_one_in_each_turn():
    view = global_view(_trained(_in_a_scan), "i", shardings="fsdp", regather=True)

    assert set(_gathers(view, LAYERED, X)) == {(64, 64)}
    text = view.lower(LAYERED, X).compile().as_text()
    places = re.findall(r'all-gather\(.*op_name="([^"]*)"', text)
    assert len([place for place in places if "while" in place]) == 2


def test_what_all_turns_read_is_gathered_before_a_scan():
    view = global_view(_trained(_read_in_each_turn), "i", shardings="fsdp", regather=True)

    places = re.findall(
        r'all-gather\(.*op_name="([^"]*)"', view.lower(LAYERED, X).compile().as_text()
    )
    assert places
    assert not [place for place in places if "while" in place]


def test_parameters_are_gathered_in_the_precision_that_is_read():
    view = global_view(_trained(_in_half_precision), "i", shardings="fsdp", regather=True)
    text = view.lower(LAYERED, X).as_text()

    kinds = re.findall(r"stablehlo\.all_gather.*?-> tensor<[\dx]+x(\w+)>", text, re.DOTALL)
    assert set(kinds) == {"bf16"}


def _scan_in_half_precision(w, x):
    half, rows = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    turn = lambda x, layer: (jnp.tanh(x @ layer), None)
    return jnp.sum(lax.scan(turn, rows, half)[0].astype(jnp.float32) ** 2)


@pytest.mark.thorough
@pytest.mark.parametrize("regather", [False, True])
def test_the_gradients_of_a_scan_over_layers_are_scattered_in_each_turn(regather):
    step = _trained(_scan_in_half_precision)
    view, _ = compare(step, LAYERED, X, shardings="fsdp", regather=regather)
    text = view.lower(LAYERED, X).compile().as_text()

    scattered = re.findall(r'= f32\[([\d,]+)\]\S* reduce-scatter\(.*op_name="([^"]*)"', text)
    assert [(shape, "while" in place) for shape, place in scattered] == [("8,64", True)]


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA's schedule for CPU drops barriers")
def test_a_step_takes_less_memory():
    def loss(w, x):
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.sum(x * x)

    def step(w, x):
        gradient = lax.pmean(jax.grad(loss)(w, x), "i")
        return jax.tree.map(lambda old, new: old - 0.25 * new, w, gradient)

    w = [np.ones((256, 256), np.float32)] * 6
    x = np.ones((8, 4, 256), np.float32)

    once, again = [
        global_view(step, "i", shardings="fsdp", regather=regather).lower(w, x).compile()
        for regather in (False, True)
    ]

    temporaries = [each.memory_analysis().temp_size_in_bytes for each in (once, again)]
    assert temporaries[1] < 0.6 * temporaries[0]
