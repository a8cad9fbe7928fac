"""Which equations run outside, and which on the devices: the plan of a body, as text.

Of each stage: what runs outside, then the island in braces, with the number of values that it reads
and makes. A loop that is entered shows the plans of its bodies in brackets. `w` is shared, and `x`
is the device's own.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.primitive_facts import record_of
from jax_dist.errors import UnsupportedError
from jax_dist.global_view import islands
from jax_dist.global_view.uniformity import SharedAxis
from jax_dist.primitives import record

pytestmark = pytest.mark.rewriting

W, X = np.ones((8, 4), np.float32), np.ones((8, 4), np.float32)
psum = functools.partial(lax.psum, axis_name="i")


def planned(
    fun, *args, ins=(True, False), wanted=None, gradients="reduce", regathers=False, tied=False
):
    """The plan of a function of a shared value and of one of the device's own."""
    args = args or (W, X)
    jaxpr = jax.make_jaxpr(fun, axis_env=[("i", 4), ("j", 2)])(*args)
    wanted = wanted or [None] * len(jaxpr.jaxpr.outvars)
    axis = SharedAxis("i", {"i": 4})
    return islands.plan(axis, jaxpr, ins, wanted, islands.Choices(gradients, regathers, tied))


def _name(eqn):
    name = eqn.primitive.name
    return "call" if record(name).call == "inline" else name.removesuffix("_invariant")


def text(plan):
    stages = []
    for stage in plan.stages:
        steps = [
            _name(step.eqn) + "".join(f"[{text(each)}]" for each in step.inner)
            for step in stage.outside
        ]
        if stage.island is not None:
            found = stage.island
            names = " ".join(map(_name, found.eqns))
            steps.append(f"{{{names}: {len(found.reads)}, {len(found.makes)}}}")
        stages.append(" ".join(steps))
    return " | ".join(stages)


def step(w, x):
    return w - psum(lax.sin(x))


def _summed(w, x):
    return lax.scan(lambda c, _: (c - psum(x), None), w, None, length=2)[0]


def _effects(w, x):
    """One on the devices, two in loops that are entered, one on the devices."""

    def turn(c, _):
        jax.debug.callback(lambda _: None, x)
        return c - psum(x), None

    jax.debug.callback(lambda _: None, x)
    one, two = lax.scan(turn, w, None, length=2)[0], lax.scan(turn, W, None, length=2)[0]
    jax.debug.callback(lambda _: None, x)
    return one, two


def _first_effect_in_a_loop(w, x):
    def turn(c, _):
        jax.debug.callback(lambda _: None, x)
        return c - psum(x), None

    w = lax.scan(turn, w, None, length=2)[0]
    jax.debug.callback(lambda _: None, x)
    return w


def _while(again, body):
    return lambda w, x: lax.while_loop(lambda c: again(c, w, x), lambda c: body(c, w, x), w)


def _cheap():
    numbers = lax.convert_element_type(lax.iota(np.int32, 8), np.float32)
    return lax.squeeze(lax.broadcast_in_dim(lax.reshape(numbers, (8, 1)), (8, 1, 4), (0, 1)), [1])


_PLANS = {
    "one sum": (step, "{sin psum: 1, 1} | sub"),
    "one island for two leaves": (
        lambda w, x: (w - psum(lax.sin(x)), w * psum(lax.cos(x))),
        "{sin psum cos psum: 1, 2} | sub mul",
    ),
    "a sum that is read where it is made": (
        lambda w, x: psum(x - psum(x)),
        "{psum sub psum: 1, 1}",
    ),
    "a sum that is read outside, and that on the devices": (
        lambda w, x: psum(x * lax.exp(psum(x))),
        "{psum: 1, 1} | exp {mul psum: 2, 1}",
    ),
    "three stages, and operands of all": (
        lambda w, x: psum(x * lax.exp(psum(x * lax.exp(psum(x))))) + psum(lax.cos(x)),
        "{psum cos psum: 1, 2} | exp {mul psum: 2, 1} | exp {mul psum: 2, 1} | add",
    ),
    "a jit": (jax.jit(step), "{sin psum: 1, 1} | sub"),
    "a jit in a jit": (jax.jit(lambda w, x: jax.jit(step)(w, x)), "{sin psum: 1, 1} | sub"),
    "a jit of both kinds": (jax.jit(lambda w, x: (lax.sin(w), lax.cos(x))), "sin {cos: 1, 1}"),
    "a jit of its own": (
        lambda w, x: (jax.jit(lax.sin)(w), jax.jit(lax.cos)(x)),
        "call {call: 1, 1}",
    ),
    "a jit over the axis": (jax.jit(lambda w, x: psum(lax.sin(x))), "{sin psum: 1, 1}"),
    "a jit in one that is written out": (
        lambda w, x: jax.jit(lambda w, x: (lax.sin(x), jax.jit(lax.cos)(w)))(w, x),
        "cos {sin: 1, 1}",
    ),
    "what is cheap is made in the island": (
        lambda w, x: x + _cheap(),
        "iota convert_element_type reshape broadcast_in_dim squeeze "
        "{iota convert_element_type reshape broadcast_in_dim squeeze add: 1, 1}",
    ),
    "what is made of a parameter is not cheap": (
        lambda w, x: x * lax.broadcast_in_dim(w, (2, 8, 4), (1, 2))[0],
        "broadcast_in_dim slice squeeze {mul: 2, 1}",
    ),
    "what is made of what is cheap may not be": (
        lambda w, x: x * lax.exp(lax.full((8, 4), np.float32(2))),
        "broadcast_in_dim exp {mul: 2, 1}",
    ),
    "an extreme of what is cheap is not made in the island": (
        lambda w, x: x * lax.reduce_max_p.bind(_cheap(), axes=(0,), out_sharding=None),
        "iota convert_element_type reshape broadcast_in_dim squeeze reduce_max broadcast_in_dim "
        "{mul: 2, 1}",
    ),
    "a scan with a sum": (_summed, "scan[{psum: 1, 1} | sub]"),
    "a scan without one": (
        lambda w, x: lax.scan(lambda c, _: (c - lax.sin(w), None), w, None, length=2)[0],
        "scan",
    ),
    "a scan that makes something shared": (
        lambda w, x: lax.scan(lambda c, _: ((c[0] - psum(x), c[1] * 2), None), (w, x), length=2)[0],
        "scan[{psum mul: 2, 2} | sub]",
    ),
    "a scan that makes nothing shared": (
        lambda w, x: lax.scan(lambda c, _: (c - psum(x) * x, None), w, None, length=2)[0],
        "{scan: 2, 1}",
    ),
    "a branch on what is shared": (
        lambda w, x: lax.switch(
            lax.convert_element_type(w[0, 0], int), [lambda: psum(x), lambda: w]
        ),
        "slice squeeze convert_element_type clamp cond[{psum: 1, 1}][]",
    ),
    "a branch on what varies": (
        lambda w, x: lax.switch(
            lax.convert_element_type(x[0, 0], int), [lambda: psum(x), lambda: w]
        ),
        "{slice squeeze convert_element_type clamp cond: 2, 1}",
    ),
    "a loop while something shared lasts": (
        _while(lambda c, w, x: lax.lt(c[0, 0], 3.0), lambda c, w, x: c + psum(x)),
        "while[slice squeeze lt][{psum: 1, 1} | add]",
    ),
    "a loop while something of the device's own lasts": (
        _while(lambda c, w, x: lax.lt(x[0, 0], 3.0), lambda c, w, x: c + psum(x)),
        "{while: 2, 1}",
    ),
    "a loop whose condition has many elements": (
        lambda w, x: jax.vmap(
            _while(lambda c, w, x: lax.lt(c[0], 3.0), lambda c, w, x: c + psum(x)), (0, None)
        )(w, x[0]),
        "{slice squeeze while: 2, 1}",
    ),
    "effects keep their order": (
        _effects,
        "{debug_callback: 1, 0} | scan[{debug_callback psum: 1, 1} | sub] "
        "scan[{debug_callback psum: 1, 1} | sub] {debug_callback: 1, 0}",
    ),
    "an effect after one that is outside": (
        _first_effect_in_a_loop,
        "scan[{debug_callback psum: 1, 1} | sub] {debug_callback: 1, 0}",
    ),
    "effects in a row": (
        lambda w, x: [jax.debug.callback(lambda _: None, each) for each in (x, x)],
        "{debug_callback debug_callback: 1, 0}",
    ),
    "an effect of what is shared runs on the devices": (
        lambda w, x: jax.debug.callback(lambda _: None, w),
        "{debug_callback: 1, 0}",
    ),
    "another axis": (lambda w, x: lax.psum(w, "j") - w, "psum sub"),
}


@pytest.mark.parametrize("name", _PLANS)
def test_what_runs_where(name):
    fun, expected = _PLANS[name]
    assert text(planned(fun)) == expected


@pytest.mark.parametrize(
    ("tied", "expected"),
    [(False, "call cos {psum: 1, 1} | add add"), (True, "cos {call psum: 2, 2} | add add")],
)
def test_what_cannot_be_bound_again_runs_on_the_devices_where_types_name_the_mesh(
    monkeypatch, tied, expected
):
    tied_sine = dataclasses.replace(record("sin"), tied=True)  # in a call, too
    known = lambda eqn: tied_sine if eqn.primitive is lax.sin_p else record_of(eqn)
    monkeypatch.setattr(islands, "record_of", known)
    plan = planned(lambda w, x: jax.jit(lax.sin)(w) + (lax.cos(w) + psum(x)), tied=tied)
    assert text(plan) == expected


def test_a_linear_solve_is_not_bound_again():
    solved = lambda w: lax.custom_linear_solve(lambda v: 2 * v, w, lambda _, b: b / 2)
    plan = planned(lambda w, x: solved(w) + psum(x), tied=True)
    assert "custom_linear_solve" not in [_name(e.eqn) for s in plan.stages for e in s.outside]


def _all_alike(w, x):
    return jax.jit(lambda w: jax.jit(lax.sin)(w).T.T)(w), w


def _some_whole(w, x):
    return jax.jit(lambda w: lax.sin(w - w.sum(0)))(w), w


@pytest.mark.parametrize(
    ("fun", "wanted", "expected"),
    [
        (_all_alike, [P("i"), None], "call"),
        (_some_whole, [P("i"), None], "reduce_sum broadcast_in_dim sub sin"),
        (_some_whole, [None, P("i")], "reduce_sum broadcast_in_dim sub sin"),
        (_some_whole, [None, None], "call"),
    ],
)
def test_calls_are_written_out_where_some_of_it_is_needed_whole(fun, wanted, expected):
    assert text(planned(fun, wanted=wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"), [([P("i"), None], "scan[sin sub mul]"), ([None, None], "scan")]
)
def test_a_loop_is_entered_for_what_is_wanted_in_parts(wanted, expected):
    turn = lambda c, w: ((c[0] - lax.sin(w), c[1] * 2), None)
    fun = lambda w, x: lax.scan(lambda c, _: turn(c, w), (w, w), None, length=2)[0]
    assert text(planned(fun, wanted=wanted)) == expected


def test_what_is_said_of_results():
    plan = planned(lambda w, x: (w, x, 1.0, psum(x)))
    assert plan.ins == (True, False)
    assert plan.outs == [True, False, True, True]


@pytest.mark.parametrize("wrapped", [lambda fun: fun, jax.jit])
def test_constants_are_inputs(wrapped):
    plan = planned(wrapped(lambda w, x: w + psum(x) + jax.numpy.asarray(W)))
    assert [const.shape for const in plan.consts] == [W.shape]
    assert plan.ins == (True, False)
    assert len(plan.body.invars) == 3
    assert text(plan) == "{psum: 1, 1} | add add"


def _read_on_the_devices_too(w, x):
    slope = psum(lax.sin(x))
    return w - slope, x * slope


def _read_in_a_later_island(w, x):
    slope = psum(lax.sin(x))
    return w - slope, psum(x * lax.exp(psum(lax.cos(x) * slope)))


def _a_part_is_read(w, x):
    slope = psum(lax.sin(x))
    return w - slope, x * lax.cos(slope)


_ROWS = P("i")
# Of each island, along which dimensions sums are scattered, and shared values are read in parts.
_CUTS = {
    "rows": (step, [_ROWS], [([0], [])]),
    "columns": (step, [P(None, "i")], [([1], [])]),
    "rows over another axis": (step, [P("j")], [([], [])]),
    "rows over two axes": (step, [P(("i", "j"))], [([], [])]),
    "columns, and rows over another axis": (step, [P("j", "i")], [([1], [])]),
    "nowhere": (step, [None], [([], [])]),
    "in a jit": (jax.jit(step), [_ROWS], [([0], [])]),
    "in a scan": (_summed, [_ROWS], [([0], [])]),
    "read on the devices": (_read_on_the_devices_too, [_ROWS, None], [([], [])]),
    "read in parts later": (_a_part_is_read, [_ROWS, None], [([0], []), ([], [0])]),
    "over two axes": (lambda w, x: w - lax.psum(x, ("i", "j")), [_ROWS], [([], [])]),
    "in groups": (
        lambda w, x: w - lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
        [_ROWS],
        [([], [])],
    ),
    "a maximum": (lambda w, x: w - lax.pmax(x, "i"), [_ROWS], [([], [])]),
    "a parameter is read": (lambda w, x: w - psum(lax.sin(w * x)), [_ROWS], [([0], [0])]),
    "a parameter is summed": (lambda w, x: w - psum(w), [_ROWS], [([0], [])]),
}


@pytest.mark.parametrize("name", _CUTS)
def test_what_is_scattered_and_read_in_parts(name):
    fun, wanted, expected = _CUTS[name]
    plan = planned(fun, wanted=wanted, gradients="scatter", regathers=True)
    assert [
        (sorted(e.scatters.values()), sorted(e.parts.values())) for e in plan.islands()
    ] == expected
    # Without scattering, nothing is scattered, and more may be read in parts.
    plan = planned(fun, wanted=wanted, gradients="reduce", regathers=True)
    assert [sorted(each.scatters) for each in plan.islands()] == [[] for _ in expected]
    if name == "a parameter is summed":
        (island,) = plan.islands()
        assert list(island.parts.values()) == [0]
    plan = planned(fun, wanted=wanted, gradients="reduce")
    assert [each.parts for each in plan.islands()] == [{} for _ in expected]


_NARROW = {
    "widened": (lambda x: x.astype(np.float32), [np.float16]),
    "as it comes in": (lambda x: x, []),
    "computed": (lambda x: lax.sin(x.astype(np.float32)), []),
    "whole numbers": (lambda x: x.astype(np.int16).astype(np.float32), []),
    "rounded": (lambda x: x.astype(np.float32).astype(np.float16), []),
}


@pytest.mark.parametrize("name", _NARROW)
def test_which_sums_are_narrow(name):
    term, expected = _NARROW[name]
    for gradients in ("narrow", "scatter"):
        fun, x = lambda w, x: w - psum(term(x)), X.astype(np.float16)
        (island,) = planned(fun, W, x, wanted=[_ROWS], gradients=gradients).islands()
        assert len(island.scatters) == 1
        assert [*island.narrow.values()] == (expected if gradients == "narrow" else [])


def _by_layers(total: Callable) -> Callable:
    """Sums what a scan over layers makes, `[4, 8, 4]`."""

    def fun(w, x):
        make = lambda count, layer: (count + 1, (x * layer).astype(np.float16))
        return total(w, lax.scan(make, 0, w)[1])

    return fun


_COLUMNS = P(None, "i")
# How the first result is wanted, and what a turn does with what it makes, if it sums it.
_BY_TURNS = {
    "as it is": (lambda w, made: [w - psum(made)], _COLUMNS, ["psum"]),
    "in another precision": (
        lambda w, made: [w - psum(made.astype(np.float32) / 2)],
        _COLUMNS,
        ["convert_element_type", "div", "psum"],
    ),
    "cut along the turns": (lambda w, made: [w - psum(made)], _ROWS, None),
    "read on the devices, too": (lambda w, made: [w - psum(made), made.sum()], _COLUMNS, None),
    "a result, too": (lambda w, made: [w - psum(made), made], _COLUMNS, None),
    "read twice": (lambda w, made: [w - psum(made * made)], _COLUMNS, None),
    "with another": (lambda w, made: [w - psum(made + w)], _COLUMNS, None),
    "moved": (lambda w, made: [w - psum(made[::-1])], _COLUMNS, None),
    "not cut": (lambda w, made: [w - psum(made)], None, None),
}


@pytest.mark.parametrize("name", _BY_TURNS)
def test_which_results_of_a_scan_are_summed_in_its_turns(name):
    total, spec, expected = _BY_TURNS[name]
    fun, layers = _by_layers(total), np.ones((4, 8, 4), np.float32)
    wanted = [spec, None] if "too" in name else [spec]
    plan = planned(fun, layers, X, wanted=wanted, gradients="scatter")

    (island,) = plan.islands()
    found = [[*[_name(eqn) for eqn in eqns], "psum"] for _, eqns in island.by_turns.values()]
    assert found == ([] if expected is None else [expected])


def test_what_is_widened_after_its_sum_is_not_widened_in_the_turns():
    fun = _by_layers(lambda w, made: [w - psum((made / 2).astype(np.float32))])
    layers = np.ones((4, 8, 4), np.float32)
    for gradients, expected in (("scatter", ["div", "convert_element_type"]), ("narrow", ["div"])):
        plan = planned(fun, layers, X, wanted=[_COLUMNS], gradients=gradients)
        (island,) = plan.islands()
        ((_, between),) = island.by_turns.values()
        assert [_name(eqn) for eqn in between] == expected


def test_six_rows_are_not_scattered_over_four_devices():
    plan = planned(step, W[:6], X[:6], wanted=[_ROWS], gradients="scatter")
    assert [each.scatters for each in plan.islands()] == [{}]


def test_a_reference_stays_in_its_island():
    def fun(w, x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * lax.exp(psum(ref[...]))
        return psum(ref[...])

    with pytest.raises(UnsupportedError, match="lives across a sum") as raised:
        planned(fun)
    line = fun.__code__.co_firstlineno + 1
    assert f"test_islands.py:{line} on" in str(raised.value)
