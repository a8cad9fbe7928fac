"""The leaves of a state, as a checkpoint has them: arrays, under the names of their paths."""

import collections
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.errors import CheckpointError, refusal
from jax_dist.multihost.collectives import as_key_of, is_key, is_whole

NUMBERS = (bool, int, float, complex)


class TypedLeaf(NamedTuple):
    """One leaf of a state.

    >>> [leaf.type for leaf in leaves_of({"w": np.zeros((2, 3)), "key": jax.random.key(0)})]
    ['key<threefry2x32>[]', 'float64[2,3]']
    """

    path: str  # as in "['params'].w"
    given: Any  # what the state has there

    @property
    def type(self) -> str:
        """What must be the same in a checkpoint and in the state that it is read into."""
        if isinstance(self.given, NUMBERS):
            return type(self.given).__name__
        kind = f"key<{jax.random.key_impl(self.given)}>" if is_key(self.given) else self.given.dtype
        return f"{kind}[{','.join(map(str, self.given.shape))}]"

    @property
    def is_storable(self) -> bool:
        """Whether it comes back as it is: a subclass would lose what it adds, as a mask."""
        given = self.given
        if type(given) is np.ndarray or isinstance(given, np.generic):
            kind, size = given.dtype.kind, given.dtype.itemsize
            is_known = kind == "b" or (kind in "iufcV" and jnp.issubdtype(given.dtype, np.number))
            return is_known and given.dtype.isnative and size <= (16 if kind == "c" else 8)
        if isinstance(given, NUMBERS):
            is_long = isinstance(given, int) and not -(2**63) <= given < 2**63
            return not is_long and (type(given) in NUMBERS or isinstance(given, enum.Enum))
        return isinstance(given, jax.Array) and not given.is_deleted()

    def value(self) -> Any:
        """What Orbax is to write."""
        is_alone = isinstance(self.given, jax.Array) and jax.process_count() == 1
        return self.data if is_alone or is_whole(self.given) else np.asarray(self.data)

    def like(self) -> Any:
        """What tells Orbax how to read it: onto its devices if it is bound to some."""
        data = self.data
        is_bound = isinstance(data, jax.Array) and jax.process_count() == 1 and data.committed
        if is_bound or is_whole(data):
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding)
        return np.empty(np.shape(data), np.asarray(data).dtype)

    def restored(self, stored: Any) -> Any:
        """What was read, as the state has it there."""
        if isinstance(self.given, NUMBERS):
            return type(self.given)(np.asarray(stored).item())
        if not isinstance(self.given, jax.Array):
            return np.asarray(stored)[() if isinstance(self.given, np.generic) else ...]
        if not isinstance(stored, jax.Array):
            value, like = np.asarray(stored), self.data
            stored = jnp.asarray(value)
            if like.committed:
                part = value.__getitem__
                stored = jax.make_array_from_callback(value.shape, like.sharding, part)
        return as_key_of(stored, self.given) if is_key(self.given) else stored

    @property
    def data(self) -> Any:
        """What of it is numbers."""
        return jax.random.key_data(self.given) if is_key(self.given) else self.given


def leaves_of(state: Any) -> list[TypedLeaf]:
    """In the order of the tree; a CheckpointError where some cannot be stored."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    leaves = [TypedLeaf(jax.tree_util.keystr(path) or "the state", given) for path, given in paths]
    refused = [f"{leaf.path} is {_kind(leaf.given)}" for leaf in leaves if not leaf.is_storable]
    count = collections.Counter(leaf.path for leaf in leaves)
    refused += [f"{path} is the path of {many} leaves" for path, many in count.items() if many > 1]
    if refused:
        raise refusal(
            CheckpointError,
            what="a checkpoint cannot hold all of the state",
            which=refused,
            why="only arrays of JAX and NumPy, numbers of 64 bits, and random keys are written, "
            "each under a path of its own",
            do="Leave these out of the state, and make them again when the program starts. Of a "
            "step with donation, take what it returned.",
        )
    return leaves


def _kind(given: Any) -> str:
    if isinstance(given, jax.Array):
        return "an array that was donated or deleted"
    of = f" of {given.dtype}" if isinstance(given, np.ndarray) else ""
    return f"a {type(given).__name__}{of}"
