"""Checkpoints on the disk: the leaves of a state, and the folders they lie in, one a step.

Leaves are arrays, under the names of their paths. In a state of pmap's programs each leaf holds the
copies of all `N` devices along its first dimension, `[N, *s]`. Such a state is read into a program
without that dimension only if its copies are equal to the bit, or if the caller says what to take
where they differ.

A folder comes by one rename, and goes by one. What is being written or removed lies in
`.unfinished` meanwhile. So a process that is killed leaves each step whole or not at all, and
nothing that has to be judged.

A folder of Orbax's is a checkpoint if it has a manifest: its leaves, and the checksums of its
files. Orbax notices a file that is missing or cut short, but not always one with other bytes.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist import _notes
from jax_dist.errors import CheckpointError, refusal

_NUMBERS = (bool, int, float, complex)
_CHOICES = ("mean", "first")
_TYPE = re.compile(r"(.+)\[([\d,]+)\]")  # as in "float32[8,3]"
_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}  # of numbers that pmap made into arrays


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
        if isinstance(self.given, _NUMBERS):
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
        is_number = isinstance(self.given, _NUMBERS)
        dtype = jnp.dtype(saved.partition("[")[0]) if is_number else self._data.dtype
        return np.empty((number, *np.shape(self._data)), dtype)

    def restored(self, stored: Any) -> Any:
        """What was read, as the state has it there; None where nothing is stored."""
        if stored is None:
            return self.given
        if isinstance(self.given, _NUMBERS):
            return type(self.given)(np.asarray(stored).item())
        if isinstance(self.given, np.generic):
            return self.given.dtype.type(stored)
        if isinstance(self.given, np.ndarray):
            return np.asarray(stored)
        if isinstance(stored, np.ndarray) or not self._is_placed_by_orbax:
            value, like = np.asarray(stored), self._data
            if like.committed:
                stored = jax.make_array_from_callback(
                    value.shape, like.sharding, lambda place: value[place]
                )
            else:
                stored = jnp.asarray(value)
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

    def copies_in(self, saved: str) -> int:
        """How many copies of it were saved; 0 if what was saved is no array of copies of it."""
        found = _TYPE.fullmatch(saved)
        if found is None or saved == self.type:
            return 0
        first, _, rest = found[2].partition(",")
        if isinstance(self.given, _NUMBERS):  # a step counter that `replicate` made into an array
            kind = "" if found[1].startswith("key<") else jnp.dtype(found[1]).kind
            fits = rest == "" and kind in _KINDS[type(self.given)] and kind != ""
        else:
            fits = f"{found[1]}[{rest}]" == self.type
        return int(first) if fits else 0


def leaves_of(state: Any) -> list[TypedLeaf]:
    """In the order of the tree.

    Raises:
      CheckpointError: some cannot be stored.
    """
    paths = jax.tree_util.tree_leaves_with_path(state)
    leaves = [TypedLeaf(jax.tree_util.keystr(path) or "the state", given) for path, given in paths]
    refused = [leaf for leaf in leaves if not leaf.is_storable]
    if refused:
        raise refusal(
            CheckpointError,
            what="a checkpoint cannot hold all of the state",
            which=[f"{leaf.path} is a {type(leaf.given).__name__}" for leaf in refused],
            why="only arrays of JAX and NumPy, numbers of 64 bits, and random keys are written",
            do="Leave these out of the state, and make them again when the program starts.",
        )
    return leaves


def choices_of(given: str | Mapping[str, str] | None) -> dict[str, str]:
    """What to take of leaves that differ, by a part of their path; the first that fits counts.

    >>> choices_of("mean")
    {'': 'mean'}

    Raises:
      ValueError: there is no such choice.
    """
    choices = {"": given} if isinstance(given, str) else dict(given or {})
    for choice in choices.values():
        if choice not in _CHOICES:
            known = ", ".join(map(repr, _CHOICES))
            raise ValueError(f"differing: there is no choice {choice!r}; there are {known}.")
    return choices


def check_named(choices: Iterable[str], paths: Collection[str]) -> None:
    """Raises ValueError where a choice names no leaf: it may be misspelt."""
    for part in choices:
        if not any(part in path for path in paths):
            raise ValueError(f"no leaf with a device axis has {part!r} in its path.")


def one_of_each(
    copies: Mapping[str, np.ndarray], choices: Mapping[str, str], *, where: str, option: str
) -> dict[str, np.ndarray]:
    """`[N, *s] -> [*s]`, for each leaf.

    Args:
      copies: path to copies.
      choices: what to take where they differ, from `choices_of`.
      where: the checkpoint, for the error.
      option: how the caller gives such a choice, for the error.

    Raises:
      CheckpointError: the copies of some leaves differ, and nothing was chosen for them, or their
        mean does not exist. All of them are named.
    """
    taken, refused = {}, []
    for path, array in copies.items():
        taken[path] = array[0]
        # By their bits: a NaN is like the same NaN.
        rows = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
        differing = sum(not np.array_equal(row, rows[0]) for row in rows[1:])
        if not differing:
            continue
        choice = next((choice for part, choice in choices.items() if part in path), None)
        has_mean = jnp.issubdtype(array.dtype, jnp.inexact)
        if choice is None or (choice == "mean" and not has_mean):
            refused.append(f"{path}: {differing} of {len(array)} copies are not like the first")
        elif choice == "mean":
            wide = np.complex128 if array.dtype.kind == "c" else np.float64
            taken[path] = np.asarray(array.astype(wide).mean(axis=0).astype(array.dtype))
    if refused:
        raise refusal(
            CheckpointError,
            what=f"the copies in {where} differ between devices",
            which=refused,
            why="the program kept one value for each device, such as batch statistics that were "
            "never averaged, or a random key; one of them alone is another state",
            do=f"Choose by {option}: mean is the average of the copies (not for integers and "
            "keys), first is the copy of the first device.",
        )
    return taken


# --- the folders, one a step


_UNFINISHED = ".unfinished"
_DAMAGED = ".damaged"  # behind the number of a step that is set aside
NAME = "jax_dist.json"
_LONGEST = 1 << 26  # bytes
_PIECE = 1 << 20  # bytes read at a time


class _Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, tuple[int, int]]  # path in the folder to bytes and CRC-32
    digest: str  # of the two


class StepFolders:
    """The steps in a folder. In several processes, rank 0 alone changes anything."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._unfinished = folder / _UNFINISHED

    def clean(self) -> None:
        """Makes the folder, and removes what an earlier run has begun."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(parents=True)
        shutil.rmtree(self._unfinished, ignore_errors=True)  # also where the disk is read-only

    def steps(self) -> list[int]:
        """The numbers, ascending."""
        try:
            names = [path.name for path in self._folder.iterdir() if path.is_dir()]
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal())

    def path(self, step: int) -> pathlib.Path:
        return self._folder / str(step)

    def unfinished(self, step: int) -> pathlib.Path:
        """Where to write a step."""
        return self._unfinished / str(step)

    def begin(self, step: int) -> None:
        """Makes an empty folder there."""
        self.abandon(step)
        self.unfinished(step).mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Removes what was written there so far."""
        shutil.rmtree(self.unfinished(step), ignore_errors=True)

    def write_manifest(self, step: int, leaves: Sequence[TypedLeaf]) -> None:
        """Notes what was written: after all other files, and before the folder gets its name."""
        folder = self.unfinished(step)
        types = {leaf.path: leaf.type for leaf in leaves}
        paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
        files = {str(path.relative_to(folder)): _checksum(path) for path in paths}
        manifest = _Manifest(types, files, _digest(types, files))
        (folder / NAME).write_text(json.dumps(manifest._asdict(), indent=1))

    def commit(self, step: int) -> None:
        """What was written is there from now on, also after the machine has lost its power."""
        sync_tree(self.unfinished(step))
        self.unfinished(step).rename(self.path(step))
        sync(self._folder)
        self._tidy()

    def examine(self, step: int) -> tuple[dict[str, str], list[str]]:
        """The leaves of a step, path to type; and what is not as it was written.

        As in "d/73068e7c has 100 bytes instead of 374".
        """
        folder = self.path(step)
        manifest = _notes.load(folder / NAME, _Manifest, limit=_LONGEST)
        if manifest is None or manifest.digest != _digest(manifest.leaves, manifest.files):
            return {}, [f"it has no {NAME} that can be read"]
        found = []
        for name, (size, checksum) in sorted(manifest.files.items()):
            path = folder / name
            try:
                if not path.is_file():
                    found.append(f"{name} is not there")
                elif path.stat().st_size != size:
                    found.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
                elif _checksum(path)[1] != checksum:
                    found.append(f"{name} has other bytes than were written")
            except OSError as error:
                found.append(f"{name} cannot be read: {error.strerror}")
        return manifest.leaves, found

    def keep(self, count: int) -> None:
        """Removes all but the newest."""
        for step in self.steps()[:-count]:
            going = self._unfinished / f"{step}.old"
            with contextlib.suppress(OSError):  # it stays, and is tried again at the next step
                self._unfinished.mkdir(exist_ok=True)
                self.path(step).rename(going)
                shutil.rmtree(going)
        self._tidy()

    def set_aside(self, step: int) -> None:
        """Takes a damaged step out of the way; nothing of it is lost."""
        aside = self._folder / f"{step}{_DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):  # something is left in it
            self._unfinished.rmdir()


def sync_tree(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk."""
    for folder, _, files in os.walk(path):
        for name in files:
            sync(os.path.join(folder, name))
        sync(folder)
    if path.is_file():
        sync(path)


def sync(path: str | pathlib.Path) -> None:
    """The same for one file, or for the names in one folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(leaves: dict[str, str], files: dict[str, tuple[int, int]]) -> str:
    return hashlib.sha256(json.dumps([leaves, files], sort_keys=True).encode()).hexdigest()


def _checksum(path: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum
