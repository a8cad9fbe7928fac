"""What stands for a gathered value, which gathers go together, and what they cost."""

import types

import jax
import numpy as np
import pytest
from gather_checks import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._rewrite import gather_states
from jax_dist._rewrite.gather_states import (
    EmittedCollective,
    Gather,
    Gathered,
    Groups,
    Refuse,
    Spread,
    Whole,
    ring_bytes,
    sites_of,
    why_not_worth,
)
from jax_dist._rewrite.interpreter import equations

pytestmark = pytest.mark.rewriting

_I, _J = Spread(("i",), None, 4), Spread(("j",), None, 2)
_HALVES = Spread(("i",), ((0, 1), (2, 3)), 2)
_NOWHERE = Whole(frozenset())


@pytest.mark.parametrize(
    ("kind", "sent", "alone"),
    [
        ("all-gather", 75.0, 0.0),
        ("all-reduce", 150.0, 0.0),
        ("all-to-all", 75.0, 0.0),
        ("collective-permute", 100.0, 0.0),
        ("reduce-scatter", 300.0, 0.0),
    ],
)
def test_the_bytes_on_a_ring(kind, sent, alone):
    assert ring_bytes(kind, 100, 4) == sent
    assert ring_bytes(kind, 100, 1) == alone
    assert ring_bytes(kind, 100, 2) > alone


def test_no_other_kind_is_sent():
    with pytest.raises(ValueError, match="no collective of the name 'gather'; there are all-gat"):
        ring_bytes("gather", 100, 4)


def test_a_block_of_what_is_gathered():
    state = Gathered(((0, _I), (2, Spread(("j", "i"), None, 3))), ((1,),))
    assert state.dimensions == (0, 2)
    assert state.names == ("i", "j")
    assert state.block((8, 5, 6, 7)) == (2, 5, 2, 7)
    assert state.at({3: _J, 1: _I}).spreads == ((1, _I), (3, _J))
    assert state.inserted(0).dimensions == (1, 3)
    assert state.inserted(2).dimensions == (0, 3)
    assert state.inserted(3).dimensions == (0, 2)
    assert state.without((1, 3)).dimensions == (0, 1)


def test_the_gathers_behind_values():
    states = [Gathered((), ((3,), (1, 2))), _NOWHERE, Gathered((), ((1, 2), (0,)))]
    assert sites_of(states) == ((0,), (1, 2), (3,))


def _gather(shape=(2, 3), name="i", **options) -> Gather:
    mesh, spec = mesh_of(i=4, j=2), P(("i", "j"))
    body = lambda x: jax.lax.all_gather(x, name, **options)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jaxpr = jax.make_jaxpr(mapped)(np.zeros((8 * shape[0], *shape[1:]), np.float32))
    (eqn,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "all_gather"]
    return Gather(eqn)


def test_what_a_gather_makes():
    gather = _gather()
    assert gather.bytes == 4 * 2 * 3 * 4
    assert gather.spread == _I
    assert gather.why_never() is None
    assert _gather(axis_index_groups=[[0, 1], [2, 3]]).spread == _HALVES
    assert _gather(axis_index_groups=[[0], [1], [2], [3]]).why_never() == ""


def _gather_of(groups=None, **aval) -> Gather:
    operand = types.SimpleNamespace(aval=types.SimpleNamespace(**aval))
    params = {"axis_size": 4, "axis_name": "i", "axis_index_groups": groups}
    eqn = types.SimpleNamespace(params=params, invars=[operand], primitive=lax.all_gather_p)
    return Gather(eqn)


def test_gathers_that_are_never_looked_at(monkeypatch):
    monkeypatch.setattr(_compat, "is_unreduced", lambda aval: aval.shape == (3, 2))
    assert _gather_of(shape=(2, 3)).why_never() is None
    assert _gather_of(shape=(3, 2)).why_never() == "the gathered value is of an unreduced type"
    unknown = "the gathered value has a dimension of unknown size"
    assert _gather_of(shape=(2, "b")).why_never() == unknown
    assert _gather_of(shape=("a", "b")).why_never() == unknown


def test_a_gather_in_groups_where_types_tell_what_varies(monkeypatch):
    monkeypatch.setattr(_compat, "is_unreduced", lambda aval: False)
    monkeypatch.setattr(_compat, "varying_axes", lambda aval: aval.varying)
    groups = ((0, 1), (2, 3))
    refused = "JAX has no reduction over groups of devices under check_vma=True"
    assert _gather_of(groups, shape=(2,), varying={"i"}).why_never() == refused
    assert _gather_of(groups, shape=(2,), varying=set()).why_never() is None
    assert _gather_of(shape=(2,), varying={"i"}).why_never() is None


def test_a_gather_of_what_is_whole():
    assert _gather().deferred(_NOWHERE, (5,)) == Gathered(((0, _I),), ((5,),))
    assert _gather(axis=1, tiled=True).deferred(_NOWHERE, (5,)) == Gathered(((1, _I),), ((5,),))


def test_a_gather_of_what_is_gathered():
    over_j = Gathered(((0, _J),), ((7,),))
    sites = ((5,), (7,))
    assert _gather().deferred(over_j, (5,)) == Gathered(((0, _I), (1, _J)), sites)
    assert _gather(axis=1).deferred(over_j, (5,)) == Gathered(((0, _J), (1, _I)), sites)
    both = Spread(("i", "j"), None, 8)
    assert _gather(tiled=True).deferred(over_j, (5,)) == Gathered(((0, both),), sites)
    assert _gather(axis=1, tiled=True).deferred(over_j, (5,)) == Gathered(((0, _J), (1, _I)), sites)


@pytest.mark.parametrize(
    ("options", "before", "why"),
    [
        ({}, _I, "all_gather over 'i' of what was gathered over it"),
        ({"name": ("i", "j")}, _J, r"all_gather over \('i', 'j'\) of what was gathered over it"),
        (
            {"name": "j", "tiled": True},
            _HALVES,
            "all_gather in groups along the gathered dimension",
        ),
        (
            {"tiled": True, "axis_index_groups": [[0, 1], [2, 3]]},
            _J,
            "all_gather in groups along the gathered dimension",
        ),
    ],
)
def test_gathers_of_gathers_that_are_refused(options, before, why):
    with pytest.raises(Refuse, match=f"^{why}$"):
        _gather(**options).deferred(Gathered(((0, before),), ((7,),)), (5,))


def _made(kind="all-reduce", size=4, result=100.0) -> EmittedCollective:
    return EmittedCollective("reduce_sum", "psum", kind, result, size)


def test_gathers_that_meet_are_one_group():
    groups, one, other = Groups(), _made(), _made(size=2)
    groups.meet([(4,)], ())
    groups.meet([(2,)], [one])
    groups.meet([(9,), (7,)], [other])
    groups.meet([(9,), (2,)], ())
    groups.meet([(7,)], [one])
    assert groups.all() == [(((2,), (7,), (9,)), (one, other, one)), (((4,),), ())]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ([], ""),
        ([_made(result=48.0)], ""),  # 72 bytes, as many as the gather sends
        ([_made(result=48.0 / 2)] * 2, "2 reductions would send 72 bytes from each device, one"),
        ([_made(result=47.0 / 2)] * 2, ""),
        ([_made(result=4800.0)], "one reduction would send 7,200 bytes from each device, one gath"),
    ],
)
def test_what_costs_more_is_not_worth_it(made, why):
    found = why_not_worth([_gather()], made)
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_a_reason_counts_all_gathers():
    assert why_not_worth([_gather(), _gather()], [_made(result=4800.0)]) == (
        "one reduction would send 7,200 bytes from each device, 2 gathers send 144"
    )
    assert "one gather sends 72" in why_not_worth([_gather()], [_made(result=4800.0)])


def test_the_shape_of_a_variable():
    assert gather_states.shape_of(_gather_of(shape=[2, 3]).eqn.invars[0]) == (2, 3)


def test_names_as_a_user_writes_them():
    assert gather_states.spelled(["i"]) == "'i'"
    assert gather_states.spelled(["i", "j"]) == "('i', 'j')"
