"""The ways in which compiled programs name groups of devices."""

import pytest

from jax_dist.machines import cost

pytestmark = pytest.mark.rewriting

_WRITTEN = {
    "replica_groups={{0,5},{2,3}}, use_global": ((0, 5), (2, 3)),
    "source_target_pairs={{0,1},{1,2}}": ((0, 1), (1, 2)),
    "source_target_pairs={}": (),
    "replica_groups={}": ((0, 1, 2, 3, 4, 5),),
    "channel_id=1": ((0, 1, 2, 3, 4, 5),),
    "replica_groups=[2,3]<=[6]": ((0, 1, 2), (3, 4, 5)),
    "replica_groups=[3,2]<=[2,3]T(1,0)": ((0, 3), (1, 4), (2, 5)),
    "replica_groups=mesh['i'=3,'j'=2] {'i'}": ((0, 2, 4), (1, 3, 5)),
    "replica_groups=mesh['i'=3,'j'=2] {'j','i'}": ((0, 2, 4, 1, 3, 5),),
    "replica_groups=mesh['i'=3,'j'=2] {}": ((0,), (1,), (2,), (3,), (4,), (5,)),
    "replica_groups=mesh[i=3,j=2] {j}": ((0, 1), (2, 3), (4, 5)),
    "replica_groups=mesh['a b.c-d'=6] {'a b.c-d':(1)2}": ((0, 3), (1, 4), (2, 5)),
    "replica_groups=mesh['i'=6] {'i':(2)3}": ((0, 1, 2), (3, 4, 5)),
    "replica_groups=mesh['i'=8] {'i':(4)2,'i':(1)2}": ((0, 4, 1, 5), (2, 6, 3, 7)),
    "replica_groups=mesh['i'=4,'j'=6] {'i':(2)2,'j':(1)3}": (
        (0, 2, 4, 6, 8, 10),
        (1, 3, 5, 7, 9, 11),
        (12, 14, 16, 18, 20, 22),
        (13, 15, 17, 19, 21, 23),
    ),
    "replica_groups=mesh['i'=4], device_ids=(3,1,2,0) {'i':(1)2}, x": ((3, 2), (1, 0)),
    "replica_groups=mesh['i'=4], device_ids=([3,1,2,0]) {'i':(2)2}, x": ((3, 1), (2, 0)),
    "replica_groups=mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'a'}": ((0, 1, 2), (3, 4, 5)),
    "replica_groups=mesh['a'=3,'b'=2], device_ids=([3,2]<=[2,3]T(1,0)) {'a'}": (
        (0, 1, 2),
        (3, 4, 5),
    ),
}


@pytest.mark.parametrize("written", _WRITTEN)
def test_groups_are_read(written):
    assert cost.groups_of(written, 6) == _WRITTEN[written]


_SIZES = {"i": 3, "j": 2, "k": 1}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 2, 4), (1, 3, 5)), ("i",)),
        (((3, 1, 5), (4, 2, 0)), ("i",)),
        (((0, 1), (2, 3), (4, 5)), ("j",)),
        (((0, 1, 2, 3, 4, 5),), ("i", "j")),
        (((0,), (1,), (2,), (3,), (4,), (5,)), ("k",)),
        (((0, 1, 2), (3, 4, 5)), ()),
        (((0, 2, 4),), ()),  # and the others?
        (((0, 1, 2, 3, 4, 5, 6, 7),), ()),  # of a larger mesh
    ],
)
def test_axes_of_groups(groups, axes):
    assert cost.axes_joined(groups, _SIZES) == axes


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        (((0, 2), (2, 4), (4, 0)), ("i",)),
        (((0, 1),), ("j",)),
        (((0, 1), (0, 2)), ("i", "j")),
        (((0, 3),), ("i", "j")),
        ((), ()),
        (((5, 6),), ()),  # of a larger mesh
    ],
)
def test_axes_of_pairs(pairs, axes):
    assert cost.axes_crossed(pairs, _SIZES) == axes
