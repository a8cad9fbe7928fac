"""The step of each rule by itself: of the blocks of four devices, it makes those of the result.

The devices are a vmap. A state is told by the dimensions that are gathered, and `None` is a value
that all devices hold whole.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.gather_rules import step_of
from jax_dist._rewrite.gather_states import EmittedCollective, Gathered, Refuse, Spread, Whole

pytestmark = pytest.mark.rewriting

_I = Spread(("i",), None, 4)
_SITE = (0,)


def _state(dims, spread=_I):
    if dims is None:
        return Whole(frozenset({"i"}))
    return Gathered(tuple((dim, spread) for dim in dims), (_SITE,))


def _numbers(*shape, dtype=np.float32):
    return ((np.arange(np.prod(shape)) * 7) % 11 - 4).reshape(shape).astype(dtype)


def _eqn(function, operands):
    """The last equation that a function makes; its operands are those of the function."""
    jaxpr = jax.make_jaxpr(function, axis_env=[("j", 2), ("i", 4)])(*operands)
    eqn = jaxpr.eqns[-1]
    assert list(eqn.invars) == list(jaxpr.jaxpr.invars)
    return eqn


def _blocks(value, dims):
    """By device, along a new first dimension."""
    return value if dims is None else np.stack(np.split(value, 4, *dims))


def _stepped(function, shapes, states):
    operands = [_numbers(*shape) if isinstance(shape, tuple) else shape for shape in shapes]
    eqn = _eqn(function, operands)
    step = step_of(eqn, [_state(dims) for dims in states])
    blocks = [_blocks(value, dims) for value, dims in zip(operands, states, strict=True)]
    axes = [None if dims is None else 0 for dims in states]
    on_devices = jax.vmap(
        lambda *values: tuple(step.emit(eqn, values)), in_axes=axes, axis_name="i", axis_size=4
    )
    wanted = jax.tree.leaves(function(*operands))
    for found, state, whole in zip(on_devices(*blocks), step.results, wanted, strict=True):
        if state is None:
            np.testing.assert_array_equal(found, np.stack([whole] * 4))
            assert found.dtype == whole.dtype
        else:
            ((dim, spread),) = state.spreads
            assert (spread, state.sites) == (_I, (_SITE,))
            np.testing.assert_array_equal(np.concatenate(found, dim), whole)
    return step


# By the function, the shapes of its operands, which dimensions are gathered, and which are then.
_STAYS = {
    "sin": (jnp.sin, [(4, 3)], [[0]], [0]),
    "add": (lax.add, [(4, 3), (4, 3)], [[0], [0]], [0]),
    "add of a whole one": (lax.add, [(3, 4), (3, 4)], [[1], None], [1]),
    "a whole one first": (lax.sub, [(8, 3), (8, 3)], [None, [0]], [0]),
    "times one row": (lax.mul, [(4, 3), (1, 3)], [[0], None], [0]),
    "one column times": (lax.mul, [(4, 1), (4, 3)], [None, [0]], [0]),
    "clamp by numbers": (lax.clamp, [(), (4, 3), ()], [None, [0], None], [0]),
    "broadcast": (
        lambda x: lax.broadcast_in_dim(x, (5, 4, 2, 8), (1, 3)), [(4, 8)], [[1]], [3],
    ),
    "broadcast in front": (
        lambda x: lax.broadcast_in_dim(x, (5, 4, 2, 8), (1, 3)), [(4, 8)], [[0]], [1],
    ),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(4, 2, 3)], [[0]], [1]),
    "transpose back": (lambda x: lax.transpose(x, (1, 2, 0)), [(4, 2, 3)], [[0]], [2]),
    "squeeze before": (lambda x: lax.squeeze(x, (0, 2)), [(1, 4, 1, 3)], [[1]], [0]),
    "squeeze after": (lambda x: lax.squeeze(x, (1,)), [(4, 1, 3)], [[0]], [0]),
    "reshape of others": (lambda x: lax.reshape(x, (4, 3, 2)), [(4, 2, 3)], [[0]], [0]),
    "reshape that merges": (lambda x: lax.reshape(x, (24,)), [(4, 2, 3)], [[0]], [0]),
    "reshape below": (lambda x: lax.reshape(x, (2, 3, 4, 5)), [(6, 4, 5)], [[1]], [2]),
    "reshape of several blocks": (lambda x: lax.reshape(x, (4, 2, 3)), [(8, 3)], [[0]], [0]),
    "reshape behind ones": (lambda x: lax.reshape(x, (1, 4, 3)), [(4, 3)], [[0]], [1]),
    "slice": (lambda x: lax.slice(x, (0, 1), (4, 5), (1, 2)), [(4, 6)], [[0]], [0]),
    "slice by one": (lambda x: lax.slice(x, (1, 0), (3, 4)), [(6, 4)], [[1]], [1]),
    "dynamic slice": (
        lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(4, 2)),
        [(4, 6), np.int32(0), np.int32(3)], [[0], None, None], [0],
    ),
    "pad": (lambda x, v: lax.pad(x, v, [(0, 0, 0), (1, 2, 1)]), [(4, 3), ()], [[0], None], [0]),
    "stack": (lambda *xs: jnp.stack(xs, 0), [(4, 3), (4, 3)], [[0], None], [1]),
    "stack behind": (lambda *xs: jnp.stack(xs, 2), [(4, 3), (4, 3)], [[0], [0]], [0]),
    "unstack": (lambda x: jnp.unstack(x), [(3, 4)], [[1]], [0]),
    "unstack behind": (lambda x: jnp.unstack(x, axis=1), [(4, 3)], [[0]], [0]),
    "flip": (lambda x: lax.rev(x, (1,)), [(4, 3)], [[0]], [0]),
    "split": (lambda x: lax.split(x, (1, 2), 1), [(4, 3)], [[0]], [0]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [(4, 3)], [[0]], [0]),
    "cummax": (lambda x: lax.cummax(x, 0), [(3, 4)], [[1]], [1]),
    "concatenate": (
        lambda x, y: lax.concatenate([x, y], 1), [(4, 3), (4, 2)], [[0], None], [0],
    ),
    "sort": (lambda x: lax.sort(x, dimension=1), [(4, 5)], [[0]], [0]),
    "sort by another": (
        lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), [(4, 5), (4, 5)], [[0], [0]], [0],
    ),
    "windows": (
        lambda x, v: lax.reduce_window(
            x, v, lambda a, b: a * b + 1, (1, 2), (1, 1), "VALID"
        ), [(4, 5), ()], [[0], None], [0],
    ),
    "windows of a function that is called": (
        lambda x, v: lax.reduce_window(
            x, v, lambda a, b: jax.jit(lambda a, b: a * b + 1)(a, b), (1, 2), (1, 1), "VALID"
        ), [(4, 5), ()], [[0], None], [0],
    ),
    "largest of windows": (
        lambda x: lax.reduce_window_max_p.bind(
            x, window_dimensions=(1, 2), window_strides=(1, 1), padding=((0, 0), (0, 0)),
            base_dilation=(1, 1), window_dilation=(1, 1),
        ), [(4, 5)], [[0]], [0],
    ),
    "sum of a row": (lambda x: lax.reduce_sum(x, (1,)), [(4, 3)], [[0]], [0]),
    "sum before": (lambda x: lax.reduce_sum(x, (0, 2)), [(3, 4, 2)], [[1]], [0]),
    "max of a row": (lambda x: lax.reduce_max(x, (1,)), [(4, 3)], [[0]], [0]),
    "product before": (lambda x: lax.reduce_prod(x, (0,)), [(3, 4)], [[1]], [0]),
    "argmax of a row": (lambda x: lax.argmax(x, 1, np.int32), [(4, 3)], [[0]], [0]),
    "free on the left": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(4, 3), (3, 5)], [[0], None], [0],
    ),
    "free on the right": (
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        [(2, 3), (4, 3)], [None, [0]], [1],
    ),
    "free behind a batch": (
        lambda x, y: lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,)))),
        [(5, 2, 3), (5, 4, 3)], [None, [1]], [2],
    ),
    "batch": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        [(4, 2, 3), (4, 3, 5)], [[0], [0]], [0],
    ),
    "batch of a whole one": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (2,)))),
        [(4, 2, 3), (5, 3, 4)], [[0], None], [0],
    ),
    "batch of a whole one first": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (2,)))),
        [(8, 2, 3), (5, 3, 8)], [None, [2]], [0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _STAYS)
def test_what_stays_gathered(name):
    function, shapes, states, then = _STAYS[name]
    step = _stepped(function, shapes, states)

    assert {each.dimensions for each in step.results} == {tuple(then)}
    assert step.collectives == ()


_REDUCED = {
    "sum": (lambda x: lax.reduce_sum(x, (0,)), [(4, 3)], [[0]], ("reduce_sum", "psum", 12)),
    "sum of all": (lambda x: lax.reduce_sum(x, (0, 1)), [(4, 3)], [[0]], ("reduce_sum", "psum", 4)),
    "sum of integers": (
        lambda x: lax.reduce_sum(x, (1,)), [_numbers(3, 4, dtype=np.int16)], [[1]],
        ("reduce_sum", "psum", 6),
    ),
    "max": (lambda x: lax.reduce_max(x, (0,)), [(8, 3)], [[0]], ("reduce_max", "pmax", 12)),
    "min": (lambda x: lax.reduce_min(x, (0, 1)), [(2, 4, 3)], [[1]], ("reduce_min", "pmin", 12)),
    "contracted": (
        lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
        [(4, 3), (4, 2)], [[0], [0]], ("dot_general", "psum", 24),
    ),
    "contracted with a whole one": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(2, 4), (4, 3)], [None, [0]], ("dot_general", "psum", 24),
    ),
    "contracted with a whole one behind": (
        lambda x, y: lax.dot_general(x, y, (((0,), (1,)), ((), ()))),
        [(8, 2), (3, 8)], [[0], None], ("dot_general", "psum", 24),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _REDUCED)
def test_what_is_reduced_over_devices(name):
    function, shapes, states, (primitive, collective, size) = _REDUCED[name]
    step = _stepped(function, shapes, states)

    assert step.results == (None,)
    assert step.collectives == (EmittedCollective(primitive, collective, "all-reduce", size, 4),)


def test_a_sum_in_bfloat16_of_products_counts_as_float32():
    x = jnp.ones((4, 3), jnp.bfloat16)
    largest = step_of(_eqn(lambda x: lax.reduce_max(x, (0,)), [x]), [_state([0])])
    assert [each.bytes for each in largest.collectives] == [6]
    short = step_of(_eqn(lambda x: lax.reduce_sum(x, (0,)), [x.astype(np.int16)]), [_state([0])])
    assert [each.bytes for each in short.collectives] == [6]

    product = lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    step = step_of(_eqn(product, [x, x]), [_state([0])] * 2)

    assert [each.bytes for each in step.collectives] == [36]


# ---- two gathered dimensions


_J = Spread(("j",), None, 2)
_BOTH = Gathered(((0, _I), (1, _J)), (_SITE, (1,)))


def test_what_one_sum_leaves_gathered_over_another_axis():
    shape = np.zeros((4, 8, 3), np.float32)
    step = step_of(_eqn(lambda x: lax.reduce_sum(x, (0,)), [shape]), [_BOTH])
    assert step.results == (Gathered(((0, _J),), (_SITE, (1,))),)
    assert step.collectives == (EmittedCollective("reduce_sum", "psum", "all-reduce", 48, 4),)

    step = step_of(_eqn(lambda x: lax.reduce_sum(x, (1,)), [shape]), [_BOTH])
    assert step.results == (Gathered(((0, _I),), (_SITE, (1,))),)
    assert step.collectives == (EmittedCollective("reduce_sum", "psum", "all-reduce", 12, 2),)

    step = step_of(_eqn(lambda x: lax.reduce_sum(x, (0, 1)), [shape]), [_BOTH])
    assert step.results == (None,)
    assert step.collectives == (EmittedCollective("reduce_sum", "psum", "all-reduce", 12, 8),)


_WHOLE = (4, 8, 3)


@pytest.mark.parametrize(
    ("function", "others"),
    [
        (lambda x: lax.slice(x, (0, 0, 0), (4, 4, 3)), []),
        (lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(4, 4, 3)), [np.int32(0)] * 3),
        (lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(2, 8, 3)), [np.int32(0)] * 3),
        (lambda x, v: lax.pad(x, v, [(0, 0, 0), (0, 1, 0), (0, 0, 0)]), [np.float32(0)]),
        (lambda x: lax.rev(x, (1,)), []),
        (lambda x: lax.cumsum(x, 1), []),
    ],
)
def test_each_gathered_dimension_counts(function, others):
    eqn = _eqn(function, [np.zeros(_WHOLE, np.float32), *others])
    everywhere = Whole(frozenset({"i", "j"}))
    with pytest.raises(Refuse, match="of the gathered dimension"):
        step_of(eqn, [_BOTH, *[everywhere] * len(others)])


def test_all_pairs_of_a_product_have_to_be_spread_alike():
    product = lambda x, y: lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ())))
    eqn = _eqn(product, [np.zeros((4, 8), np.float32)] * 2)

    assert step_of(eqn, [_BOTH, _BOTH]).collectives[0].size == 8
    for states in ([_BOTH, _state([0])], [_state([0]), _BOTH]):
        with pytest.raises(Refuse, match="pairs a gathered dimension with one that is not"):
            step_of(eqn, states)


def test_what_is_gathered_over_another_axis_may_meet_only_what_is_too():
    """Of the other operand, nobody knows whether it is the same along that axis."""
    shapes = [np.zeros((4, 8), np.float32)] * 2
    eqn = _eqn(lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))), shapes)
    for states in ([_BOTH, _state([0])], [_state([0]), _BOTH]):
        with pytest.raises(Refuse, match="outer product of two gathered operands"):
            step_of(eqn, states)


def test_products_of_whole_numbers_are_summed_as_such():
    """In float32, 2 ** 24 + 1 is 2 ** 24."""
    product = lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    _stepped(product, [np.full((4, 3), 2**24 + 1), np.ones((4, 2), int)], [[0], [0]])


def test_an_algorithm_for_float32_is_kept():
    single = [np.zeros((4, 3), np.float32)] * 2
    algorithm = {"precision": lax.DotAlgorithmPreset.F32_F32_F32}
    eqn = _eqn(lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())), **algorithm), single)

    assert [each.name for each in step_of(eqn, [_state([0])] * 2).collectives] == ["psum"]


def test_an_algorithm_is_kept_where_nothing_is_summed_over_devices():
    halves = [np.zeros((4, 3), np.float16), np.zeros((3, 2), np.float16)]
    algorithm = {"precision": lax.DotAlgorithmPreset.F16_F16_F32}
    eqn = _eqn(lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ())), **algorithm), halves)

    assert step_of(eqn, [_state([0]), _state(None)]).results == (_state([0]),)


def test_of_no_elements_two_dimensions_may_begin_at_one_place():
    eqn = _eqn(lambda x: lax.reshape(x, (0, 4, 8, 1)), [np.zeros((0, 4, 8), np.float32)])
    with pytest.raises(Refuse, match="reshape merges"):
        step_of(eqn, [Gathered(((1, _I), (2, _J)), (_SITE,))])


def test_collectives_over_another_axis_go_block_by_block():
    x = np.zeros((4, 2, 3), np.float32)
    for collective in (lax.psum, lax.pmax, lax.pmin):
        step = step_of(_eqn(lambda x, c=collective: c(x, "j"), [x]), [_state([0])])
        assert step.results == (_state([0]),)
    total = _eqn(lambda x: lax.psum(x, "j"), [x])  # of some versions of jax, of several values
    assert step_of(total, [_state([0]), _state(None)]).results == (_state([0]), None)
    turned = _eqn(lambda x: lax.ppermute(x, "j", [(0, 1)]), [x])
    assert step_of(turned, [_state([2])]).results == (_state([2]),)

    gather = lambda **options: _eqn(lambda x: lax.all_gather(x, "j", **options), [x])
    assert step_of(gather(axis=0), [_state([0])]).results == (_state([1]),)
    assert step_of(gather(axis=1), [_state([0])]).results == (_state([0]),)
    assert step_of(gather(axis=1, tiled=True), [_state([0])]).results == (_state([0]),)
    with pytest.raises(Refuse, match="all_gather of the gathered dimension has no matching"):
        step_of(gather(axis=0, tiled=True), [_state([0])])


# ---- refusals


_MIXED = "mixes the gathered value with one that may differ between the devices of 'i'"
_NO_COLLECTIVE = "of the gathered dimension has no matching collective"
_WINDOW = ((1, 1), (1, 1), "VALID")
_APART = "apart"  # a whole value, of which each device may hold its own


def _windowed(dims, strides=(1, 1), padding="VALID", **dilations):
    return lambda x, v: lax.reduce_window(
        x, v, lambda a, b: a * b + 1, dims, strides, padding, **dilations
    )


_REFUSED = {
    "another way": (lax.add, [(4, 4), (4, 4)], [[0], [1]], "add mixes values that are gathered in"),
    "one apart": (lax.add, [(4, 3), (4, 3)], [[0], _APART], f"add {_MIXED}"),
    "a number apart": (lax.clamp, [(), (4, 3), ()], [_APART, [0], None], f"clamp {_MIXED}"),
    "no rule": (lambda x: lax.top_k(x, 1), [(4, 3)], [[0]], "top_k needs the whole gathered value"),
    "reshape with an order": (
        lambda x: lax.reshape(x, (3, 4), dimensions=(1, 0)), [(4, 3)], [[0]],
        "reshape moves the gathered dimension",
    ),
    "reshape under another": (
        lambda x: lax.reshape(x, (12,)), [(3, 4)], [[1]], "reshape merges the gathered dimension",
    ),
    "reshape of a part of a block": (
        lambda x: lax.reshape(x, (2, 4, 3)), [(8, 3)], [[0]], "reshape merges the gathered",
    ),
    "slice from one": (lambda x: x[1:], [(4, 3)], [[0]], "slice of the gathered dimension"),
    "slice to the last": (
        lambda x: lax.slice(x, (0, 0), (3, 3)), [(4, 3)], [[0]], "slice of the gathered",
    ),
    "every second": (
        lambda x: lax.slice(x, (0, 0), (4, 3), (2, 1)), [(4, 3)], [[0]], "slice of the gathered",
    ),
    "dynamic slice": (
        lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(2, 6)),
        [(4, 6), np.int32(0), np.int32(3)], [[0], None, None],
        "dynamic_slice of the gathered dimension",
    ),
    "dynamic slice apart": (
        lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(4, 2)),
        [(4, 6), np.int32(0), np.int32(3)], [[0], None, _APART], f"dynamic_slice {_MIXED}",
    ),
    "dynamic slice at a gathered index": (
        lambda *x: lax.dynamic_slice_p.bind(*x, slice_sizes=(4, 2)),
        [(4, 6), np.int32(0), np.int32(3)], [[0], None, []], "dynamic_slice at a gathered index",
    ),
    "pad along it": (
        lambda x, v: lax.pad(x, v, [(1, 0, 0), (0, 0, 0)]), [(4, 3), ()], [[0], None],
        "pad of the gathered dimension",
    ),
    "pad apart": (
        lambda x, v: lax.pad(x, v, [(0, 0, 0), (1, 0, 0)]), [(4, 3), ()], [[0], _APART],
        f"pad {_MIXED}",
    ),
    "pad with a gathered value": (
        lambda x, v: lax.pad(x, v, [(0, 0, 0), (1, 0, 0)]), [(4, 3), ()], [[0], []],
        "pad with a gathered value",
    ),
    "pad of a whole one": (
        lambda x, v: lax.pad(x, v, [(0, 0, 0), (1, 0, 0)]), [(4, 3), ()], [None, []],
        "pad with a gathered value",
    ),
    "unstack": (lambda x: jnp.unstack(x), [(4, 3)], [[0]], f"unstack {_NO_COLLECTIVE}"),
    "flip": (lambda x: lax.rev(x, (0, 1)), [(4, 3)], [[0]], f"rev {_NO_COLLECTIVE}"),
    "flip of both": (lambda x: lax.rev(x, (0, 1)), [(3, 4)], [[1]], f"rev {_NO_COLLECTIVE}"),
    "split": (lambda x: lax.split(x, (1, 3), 0), [(4, 3)], [[0]], f"split {_NO_COLLECTIVE}"),
    "cumsum": (lambda x: lax.cumsum(x, 0), [(4, 3)], [[0]], f"cumsum {_NO_COLLECTIVE}"),
    "concatenate": (
        lambda x, y: lax.concatenate([x, y], 0), [(4, 3), (4, 3)], [[0], [0]],
        f"concatenate {_NO_COLLECTIVE}",
    ),
    "sort": (lambda x: lax.sort(x, dimension=0), [(4, 5)], [[0]], f"sort {_NO_COLLECTIVE}"),
    "sort by one apart": (
        lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), [(4, 5), (4, 5)], [[0], _APART],
        f"sort {_MIXED}",
    ),
    "windows along it": (
        _windowed((2, 1)), [(4, 5), ()], [[0], None], f"reduce_window {_NO_COLLECTIVE}",
    ),
    "windows with strides": (
        _windowed((1, 1), (2, 1)), [(4, 5), ()], [[0], None], f"reduce_window {_NO_COLLECTIVE}",
    ),
    "padded windows": (
        _windowed((1, 1), padding=[(0, 1), (0, 0)]), [(4, 5), ()], [[0], None],
        f"reduce_window {_NO_COLLECTIVE}",
    ),
    "windows padded before": (
        _windowed((1, 1), padding=[(1, 0), (0, 0)]), [(4, 5), ()], [[0], None],
        f"reduce_window {_NO_COLLECTIVE}",
    ),
    "dilated windows": (
        _windowed((1, 1), base_dilation=(2, 1)), [(4, 5), ()], [[0], None],
        f"reduce_window {_NO_COLLECTIVE}",
    ),
    "windows with gaps": (
        _windowed((1, 2), window_dilation=(2, 1)), [(4, 5), ()], [[0], None],
        f"reduce_window {_NO_COLLECTIVE}",
    ),
    "windows from one apart": (
        _windowed((1, 2)), [(4, 5), ()], [[0], _APART], f"reduce_window {_MIXED}",
    ),
    "windows of two arrays": (
        lambda x, y, v, w: lax.reduce_window(
            (x, y), (v, w), lambda a, b: (a[0] * b[0], a[1] + b[1]), (1, 2), (1, 1), "VALID"
        ),
        [(4, 5), (4, 5), (), ()], [[0], None, None, None], f"reduce_window {_NO_COLLECTIVE}",
    ),
    "windows of what each device makes": (
        lambda x, v: lax.reduce_window(
            x, v, lambda a, b: a * b + lax.axis_index("j"), (1, 2), (1, 1), "VALID"
        ),
        [(4, 5), ()], [[0], None], "reduce_window has a function of which nothing is known",
    ),
    "windows from a gathered value": (
        _windowed((1, 2)), [(4, 5), ()], [[0], []], f"reduce_window {_NO_COLLECTIVE}",
    ),
    "product": (
        lambda x: lax.reduce_prod(x, (0,)), [(4, 3)], [[0]], f"reduce_prod {_NO_COLLECTIVE}",
    ),
    "argmax": (lambda x: lax.argmax(x, 0, np.int32), [(4, 3)], [[0]], f"argmax {_NO_COLLECTIVE}"),
    "psum over it": (lambda x: lax.psum(x, "i"), [(4, 3)], [[0]], "psum over 'i' of what was"),
    "psum over both": (
        lambda x: lax.psum(x, ("j", "i")), [(4, 3)], [[0]], r"psum over \('j', 'i'\) of what was",
    ),
    "gather over it": (lambda x: lax.all_gather(x, "i"), [(4, 3)], [[0]], "all_gather over 'i' of"),
    "complex maximum": (
        lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None),
        [_numbers(4, 3, dtype=np.complex64)], [[0]], "reduce_max over devices has no order for",
    ),
    "sum of halves": (
        lambda x: lax.reduce_sum(x, (0,)), [_numbers(4, 3, dtype=np.float16)], [[0]],
        "a sum in float16 depends on the order of its terms",
    ),
    "sum of two bits": (
        lambda x: lax.reduce_sum(x, (0,)), [_numbers(4, 3, dtype=jnp.int2)], [[0]],
        "XLA has no reduction over devices for int2",
    ),
    "product apart": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(4, 3), (3, 5)], [[0], _APART], f"dot_general {_MIXED}",
    ),
    "product apart on the left": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(2, 4), (4, 5)], [_APART, [0]], f"dot_general {_MIXED}",
    ),
    "unlike pairs": (
        lambda x, y: lax.dot_general(x, y, (((0, 1), (0, 1)), ((), ()))),
        [(4, 4), (4, 4)], [[0], [1]], "dot_general pairs a gathered dimension with one that is not",
    ),
    "one of a pair": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        [(4, 4), (4, 4)], [[0], [0]], "dot_general pairs a gathered dimension with one that is not",
    ),
    "outer product": (
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        [(4, 3), (4, 3)], [[0], [0]], "dot_general is an outer product of two gathered operands",
    ),
    "halves by an algorithm": (
        lambda x, y: lax.dot_general(
            x, y, (((0,), (0,)), ((), ())), precision=lax.DotAlgorithmPreset.F16_F16_F32,
        ),
        [_numbers(4, 3, dtype=np.float16)] * 2, [[0], [0]], "float16 by an algorithm of its own",
    ),
}  # fmt: skip


def _refused(function, shapes, states, spread=_I):
    operands = [_numbers(*shape) if isinstance(shape, tuple) else shape for shape in shapes]
    apart = Whole(frozenset({"j"}))
    found = [apart if dims is _APART else _state(dims, spread) for dims in states]
    with pytest.raises(Refuse) as refused:
        step_of(_eqn(function, operands), found)
    return str(refused.value)


@pytest.mark.parametrize("name", _REFUSED)
def test_what_needs_the_whole_value(name):
    *program, why = _REFUSED[name]
    assert re.search(why, _refused(*program))


def test_what_has_groups():
    groups = Spread(("i",), ((0, 1), (2, 3)), 2)
    assert "add mixes what is gathered in groups with a whole value" in _refused(
        lax.add, [(4, 3), (4, 3)], [[0], None], groups
    )
    both = Gathered(((0, groups), (1, _J)), (_SITE,))
    add = _eqn(lax.add, [np.zeros((4, 8), np.float32)] * 2)
    with pytest.raises(Refuse, match="add mixes what is gathered in groups with a whole value"):
        step_of(add, [both, Whole(frozenset({"i", "j"}))])
    total = _eqn(lambda x: lax.reduce_sum(x, (0, 1)), [np.zeros((2, 2), np.float32)])
    with pytest.raises(Refuse, match="reduce_sum over two gathered dimensions, one of them in gro"):
        step_of(total, [both])
    alone = step_of(total, [Gathered(((0, groups),), (_SITE,))])
    assert [each.size for each in alone.collectives] == [2]
    product = lambda x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    step = step_of(
        _eqn(product, [np.zeros((4, 3), np.float32)] * 2), [Gathered(((0, groups),), (_SITE,))] * 2
    )
    assert [each.size for each in step.collectives] == [2]
    # A number is the same for every block.
    clamp = _eqn(lax.clamp, [np.float32(0), np.zeros((4, 3), np.float32), np.float32(1)])
    some = Gathered(((0, groups),), (_SITE,))
    assert step_of(clamp, [_state(None), some, _state(None)]).results == (some,)


def test_a_weak_type_would_be_lost():
    eqn = _eqn(lambda x: lax.reduce_sum(x, (0,)), [np.zeros((4, 3), np.float32)])
    weak = jax.make_jaxpr(lambda x: lax.reduce_sum(lax.full((4, 3), 2.0) * x, (0,)))(2.0).eqns[-1]
    assert weak.outvars[0].aval.weak_type
    with pytest.raises(Refuse, match="the result has a weak type"):
        step_of(weak, [_state([0])])
    assert step_of(eqn, [_state([0])]).results == (None,)


@pytest.mark.parametrize(
    ("function", "name", "shapes"),
    [
        (lambda x: lax.broadcast_in_dim(x, (4, 3, 2), (0, 1)), "sharding", [(4, 3)]),
        (lambda x: lax.reshape(x, (4, 1, 3)), "sharding", [(4, 3)]),
        (lambda x: lax.reduce_sum(x, (0,)), "out_sharding", [(4, 3)]),
        (lambda x: lax.reduce_max(x, (0,)), "out_sharding", [(4, 3)]),
        (lambda x: lax.dot_general(x, x, (((0,), (0,)), ((), ()))), "out_sharding", [(4, 3)]),
        (lambda x: lax.convert_element_type(x, np.int32), "sharding", [(4, 3)]),
    ],
    ids=["broadcast", "reshape", "sum", "max", "product", "elementwise"],
)
def test_a_sharding_is_one_of_the_whole_value(function, name, shapes):
    jaxpr = jax.make_jaxpr(function)(*[_numbers(*shape) for shape in shapes])
    eqn = jaxpr.eqns[-1]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("j",))
    states = [_state([0])] * len(eqn.invars)
    rank = len(eqn.outvars[0].aval.shape)
    for parts in [(), (None,) * rank, ("j",), (None,) * (rank - 1) + ("j",)]:
        asks = eqn.replace(params={**eqn.params, name: NamedSharding(mesh, P(*parts))})
        if any(parts):
            with pytest.raises(Refuse, match="asks for a sharding"):
                step_of(asks, states)
        else:
            assert step_of(asks, states)
