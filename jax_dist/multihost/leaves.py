"""The leaves of a state as a checkpoint holds them: arrays, under the names of their paths."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.errors import CheckpointError, message

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
        sizes = ",".join(map(str, self.given.shape))
        if self._is_key:
            return f"key<{jax.random.key_impl(self.given)}>[{sizes}]"
        return f"{self.given.dtype}[{sizes}]"

    @property
    def is_storable(self) -> bool:
        if isinstance(self.given, np.ndarray | np.generic):
            return self.given.dtype.kind in "biufcV" and self.given.dtype.names is None
        if isinstance(self.given, int):
            return -(2**63) <= self.given < 2**63
        return isinstance(self.given, jax.Array | float | complex)

    @property
    def is_stored(self) -> bool:
        """Whether a file is needed: Orbax refuses arrays without elements."""
        return np.size(self.given) > 0

    @property
    def is_whole(self) -> bool:
        """Whether it is an array of all processes; each of them writes its own part."""
        return isinstance(self.given, jax.Array) and not self.given.is_fully_addressable

    def value(self) -> Any:
        """What Orbax is to write."""
        data = self._data
        if isinstance(data, jax.Array) and (self.is_whole or jax.process_count() == 1):
            return data
        return np.asarray(data)

    def like(self) -> Any:
        """What tells Orbax how to read it."""
        data = self._data
        if self._is_placed_by_orbax:
            return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=data.sharding)
        return np.empty(np.shape(data), np.asarray(data).dtype)

    def like_copies(self, number: int, saved: str) -> np.ndarray:
        """The same for an array that holds so many copies of it, saved as one of this type."""
        is_number = isinstance(self.given, NUMBERS)
        dtype = jnp.dtype(saved.partition("[")[0]) if is_number else self._data.dtype
        return np.empty((number, *np.shape(self._data)), dtype)

    def restored(self, stored: Any) -> Any:
        """What was read, as the state has it there; None where nothing is stored."""
        if stored is None:
            return self.given
        if isinstance(self.given, NUMBERS):
            return type(self.given)(np.asarray(stored).item())
        if isinstance(self.given, np.generic):
            return self.given.dtype.type(stored)
        if isinstance(self.given, np.ndarray):
            return np.asarray(stored)
        if isinstance(stored, np.ndarray) or not self._is_placed_by_orbax:
            stored = _placed_like(np.asarray(stored), self._data)
        if self._is_key:
            return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(self.given))
        return stored

    @property
    def _is_key(self) -> bool:
        return jnp.issubdtype(self.given.dtype, jax.dtypes.prng_key)

    @property
    def _data(self) -> Any:
        if isinstance(self.given, jax.Array) and self._is_key:
            return jax.random.key_data(self.given)
        return self.given

    @property
    def _is_placed_by_orbax(self) -> bool:
        """Arrays of this process alone are not, with others; nor those that lie anywhere."""
        if not isinstance(self.given, jax.Array):
            return False
        return self.is_whole or (jax.process_count() == 1 and self._data.committed)


def leaves_of(state: Any) -> list[TypedLeaf]:
    """In the order of the tree.

    Raises:
      CheckpointError: some cannot be stored.
    """
    paths = jax.tree_util.tree_leaves_with_path(state)
    leaves = [TypedLeaf(jax.tree_util.keystr(path) or "the state", given) for path, given in paths]
    refused = [leaf for leaf in leaves if not leaf.is_storable]
    if refused:
        raise _not_storable(refused)
    return leaves


def with_leaves(state: Any, leaves: Sequence[Any]) -> Any:
    """The same tree with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _placed_like(value: np.ndarray, array: jax.Array) -> jax.Array:
    if not array.committed:
        return jnp.asarray(value)
    return jax.make_array_from_callback(value.shape, array.sharding, lambda place: value[place])


def _not_storable(leaves: Sequence[TypedLeaf]) -> CheckpointError:
    return CheckpointError(
        message(
            what="a checkpoint cannot hold all of the state",
            which=[f"{leaf.path} is a {type(leaf.given).__name__}" for leaf in leaves],
            why="only arrays of JAX and NumPy, numbers of 64 bits, and random keys are written",
            do="Leave these out of the state, and make them again when the program starts.",
        )
    )
