"""Which devices a collective joins, and along which mesh axes that is.

A compiled program numbers its devices in the order of the mesh, and writes groups of them in four
ways: as lists, as a reshaped count, by the axes of a mesh of its own, or as pairs.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

Groups: TypeAlias = tuple[tuple[int, ...], ...]


def groups_of(attributes: str, devices: int) -> Groups:
    """The groups that the attributes of an instruction name.

    Args:
      attributes: those of a collective, as compiled programs write them.
      devices: how many the program runs on; all of them are one group where none is named.

    Raises:
      ValueError: the groups are written in a way that this does not know.
    """
    lists = re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if lists and (lists[1] or "source_target_pairs" in lists[0]):
        return tuple(map(_numbers, re.findall(r"\{([\d,]*)\}", lists[1])))
    counted = re.search(rf"replica_groups={_COUNTED}", attributes)
    if counted:
        return _rows(_counted(counted))
    mesh = _MESH.search(attributes)
    if mesh:
        return _along_axes(mesh)
    named = re.search(r"(?:replica_groups|source_target_pairs)=.{,60}", attributes)
    if named and not lists:
        raise ValueError(f"cannot read which devices a collective joins: {named[0]}")
    return (tuple(range(devices)),)


def axes_joined(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which every group runs, in mesh order; () if they are no axes' groups.

    Args:
      groups: of a reduction, a gather or an exchange: the order within each is ignored.
      sizes: of the mesh axes, by name.
    """
    wanted = {frozenset(group) for group in groups}
    for axes in _choices(sizes, math.prod(sizes.values()), groups):
        if wanted == {frozenset(group) for group in _groups_along(axes, sizes)}:
            return axes
    return ()


def axes_crossed(pairs: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which every (source, target) pair runs; () if there are none.

    Args:
      pairs: of a permutation.
      sizes: of the mesh axes, by name.
    """
    for axes in _choices(sizes, math.prod(sizes.values()), pairs):
        group_of = {
            device: place
            for place, group in enumerate(_groups_along(axes, sizes))
            for device in group
        }
        if all(group_of[source] == group_of[target] for source, target in pairs):
            return axes
    return ()


def _choices(sizes: Mapping[str, int], devices: int, groups: Groups) -> list[tuple[str, ...]]:
    """The sets of axes, the small ones first; none if the groups are not of this mesh."""
    if max(itertools.chain(*groups), default=devices) >= devices:
        return []
    counts = range(1, len(sizes) + 1)
    return [axes for count in counts for axes in itertools.combinations(sizes, count)]


def _groups_along(axes: Sequence[str], sizes: Mapping[str, int]) -> Groups:
    names = tuple(sizes)
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    return _rows(_last(numbers, [names.index(axis) for axis in axes]))


def _last(numbers: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    """`[groups, devices of a group]`: along the given dimensions, in their order."""
    others = [place for place in range(numbers.ndim) if place not in dimensions]
    size = math.prod(numbers.shape[place] for place in dimensions)
    return numbers.transpose([*others, *dimensions]).reshape(-1, size)


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _counted(found: re.Match[str]) -> np.ndarray:
    """ "[2,4]<=[4,2]T(1,0)": 0 to 7 as [4, 2], transposed, then as [2, 4] if that is said."""
    start = np.arange(math.prod(_numbers(found["reshape"]))).reshape(_numbers(found["reshape"]))
    moved = start.transpose(_numbers(found["order"])) if found["order"] else start
    return moved.reshape(_numbers(found["shape"])) if found["shape"] else moved


def _along_axes(found: re.Match[str]) -> Groups:
    """ "mesh['i'=4,'j'=2] {'j'}", also along a part of an axis: "{'i':(2)2}"."""
    sizes = dict(_MESH_AXIS.findall(found["axes"]))
    numbers = _assigned(found["devices"], [int(size) for size in sizes.values()])
    shape: list[int] = []
    starts: dict[str, int] = {}  # of each axis, among the dimensions of `shape`
    cuts: dict[str, list[int]] = {name: _cuts(name, found["joined"]) for name in sizes}
    for name, size in sizes.items():
        starts[name] = len(shape)
        edges = [1, *cuts[name], int(size)]
        shape += [after // before for before, after in itertools.pairwise(edges)]
    joined = [
        starts[name] + [1, *cuts[name]].index(int(before or 1))
        for name, before, _ in _JOINED_AXIS.findall(found["joined"])
    ]
    return _rows(_last(numbers.reshape(shape), joined))


def _cuts(name: str, joined: str) -> list[int]:
    """Where parts of an axis begin and end, as products of the sizes before, without its ends."""
    edges = {
        edge
        for axis, before, size in _JOINED_AXIS.findall(joined)
        if axis == name and before
        for edge in (int(before), int(before) * int(size))
    }
    return sorted(edges - {1})


def _assigned(text: str | None, shape: Sequence[int]) -> np.ndarray:
    if not text:
        return np.arange(math.prod(shape)).reshape(shape)
    counted = re.fullmatch(_COUNTED, text) or re.fullmatch(_TRANSPOSED, text)
    numbers = _counted(counted) if counted else np.array(_numbers(re.sub(r"[\[\]]", "", text)))
    return numbers.reshape(shape)


_COUNTED = r"\[(?P<shape>[\d,]+)\]<=\[(?P<reshape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
# Without a shape, as jax 0.10.2 prints the devices of a mesh: "[4,2]T(1,0)".
_TRANSPOSED = r"(?P<shape>)\[(?P<reshape>[\d,]+)\]T\((?P<order>[\d,]+)\)"
_NAME = r"'?([^',={}\[\]:]+)'?"
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>[^)]*(?:\([^)]*\))?)\))?"
    r" \{(?P<joined>[^}]*)\}"
)
_MESH_AXIS = re.compile(rf"{_NAME}=(\d+)")
_JOINED_AXIS = re.compile(rf"{_NAME}(?::\((\d+)\)(\d+))?")
