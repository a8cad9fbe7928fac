"""What a process says of a tree: a short text of each leaf, and one hash of all."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.multihost.ranks import do

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_FEW = 4  # elements that are shown, not only hashed
_LONG = 80  # characters of a repr


class Fingerprint(NamedTuple):
    """A tree in words that can be compared and sent."""

    containers: str  # their types, as in `dict(tuple(*,*))`
    leaves: dict[str, str]  # path to what stands there, as in `{"['x']": "float32[2,4]"}`

    def digest(self) -> str:
        return hashlib.sha256(self.dump()).hexdigest()

    def dump(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def load(cls, dumped: bytes) -> "Fingerprint":
        return cls(*json.loads(dumped))


def fingerprint(tree: Any, *, values: bool = False) -> Fingerprint:
    """What has to be the same in all processes.

    Args:
      tree: of arrays, or of whatever stands for them (`jax.ShapeDtypeStruct`, tracers). Other
        leaves (numbers, strings) are taken by value: they end up in programs as they are.
      values: whether the values of arrays count too, bit for bit.

    >>> fingerprint({"x": np.zeros((2, 4)), "seed": 7}).leaves
    {"['seed']": 'int 7', "['x']": 'float64[2,4]'}
    """
    flat, structure = jax.tree.flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    leaves = {jax.tree_util.keystr(path): describe(leaf, values=values) for path, leaf in flat}
    return Fingerprint(containers(structure), leaves)


def containers(structure: Any) -> str:
    """The types of the containers of a tree.

    Not `str(structure)`: that of a container with functions or sets differs between processes.

    The keys are in the paths.
    """
    node = structure.node_data()
    if node is None:
        return "*" if structure.num_leaves else "None"
    inside = ",".join(containers(child) for child in structure.children())
    return f"{node[0].__name__}({inside})"


def describe(leaf: Any, *, values: bool = False) -> str:
    """A leaf in few words: `float32[2,4]`, `int 7`."""
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        text = _ADDRESS.sub("", repr(leaf))
        if len(text) > _LONG:
            text = f"{text[:_LONG]}... {_short(hashlib.sha256(text.encode()))}"
        return text if leaf is None else f"{type(leaf).__name__} {text}"
    weak = " weak" if getattr(leaf, "weak_type", False) else ""
    text = f"{dtype}[{','.join(map(str, shape))}]{weak}"
    return f"{text} {_value(leaf)}" if values else text


def _value(leaf: Any) -> str:
    """The values in few words. Of an array cut over processes, each holds other ones."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                return "cut over processes"
            leaf = leaf.addressable_data(0)
    elif not isinstance(leaf, np.ndarray | np.generic):
        return "without values"  # jax.ShapeDtypeStruct
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        return _ADDRESS.sub("", repr(array.tolist()))
    hashed = _short(hashlib.sha256(array.tobytes()))
    return f"= {array.tolist()} ({hashed})" if array.size <= _FEW else f"({hashed})"


def _short(hashed: Any) -> str:
    return f"sha256 {hashed.hexdigest()[:16]}"


def differences(groups: Sequence[tuple[Sequence[int], Fingerprint]]) -> list[str]:
    """Where the fingerprints differ, path by path.

    Args:
      groups: which ranks have which, as in `[([0], ...), ([1, 2, 3], ...)]`.
    """
    paths = dict.fromkeys(path for _, each in groups for path in each.leaves)
    found = []
    for path in paths:
        held: dict[str, list[int]] = {}
        for ranks, each in groups:
            held.setdefault(each.leaves.get(path, "nothing"), []).extend(ranks)
        if len(held) > 1:
            found.append(f"{path or 'the value'}: {_sides(held)}")
    if not found:
        held = {}
        for ranks, each in groups:
            held.setdefault(each.containers, []).extend(ranks)
        found.append(f"the containers: {_sides(held)}")
    return found


def _sides(held: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{do(ranks, 'has', 'have')} {text}" for text, ranks in held.items())
