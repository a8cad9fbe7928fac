"""Checkpoint files of pmap's programs, written again without the device axis: Orbax and Flax.

The result gets its name, which must be free, when all of it is on the disk.
"""

import collections
import contextlib
import functools
import importlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_dist.errors import CheckpointError, message, refusal
from jax_dist.multihost.state_leaves import NUMBERS, TypedLeaf

_CHOICES = ("mean", "first")
_COPIES = re.compile(r"(.+)\[(\d+),?([\d,]*)\]")  # as in "float32[8,3]"
_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}  # of numbers that pmap made into arrays
MANIFEST = "jax_dist.json"  # in each checkpoint of ours
ORBAX_MARK = "_METADATA"  # the file that makes a folder a tree of Orbax's


class _Converted(NamedTuple):
    """What became of a checkpoint, or of one tree in it."""

    devices: int
    dropped: tuple[str, ...]  # the paths of leaves that lost their device axis
    kept: tuple[str, ...]  # of those that had none


_Drop: TypeAlias = Callable[[Any, pathlib.Path], tuple[Any, _Converted]]


def convert(
    source: pathlib.Path, target: pathlib.Path, *, choices: Mapping[str, str], option: str
) -> _Converted:
    """Writes a checkpoint again, with one copy of each leaf.

    Args:
      source: a file that Flax wrote, or a folder that Orbax wrote: a tree, a step, or all steps.
      target: where to write; there must be nothing.
      choices: what to do with leaves that differ, by a part of their path: `mean`, `first` or
        `keep`, which leaves them as they are.
      option: how the user gives such a choice, for errors.

    Raises:
      CheckpointError: it is no such checkpoint, its leaves have no common device axis, or copies
        differ.
      FileExistsError: there is something at `target`.
      FileNotFoundError: there is nothing at `source`.
      ImportError: Flax or Orbax is not installed.
      ValueError: a choice names no leaf, or `target` is in `source`.
    """
    source, target = source.absolute(), target.absolute()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; nothing is overwritten. Give another name.")
    if not source.exists():
        raise FileNotFoundError(f"there is no checkpoint {source}.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} is in {source}, which stays as it is. Give a place outside.")
    drop = functools.partial(_without_device_axis, choices=choices, option=option)
    with _written(target) as unfinished:
        convert_it = _convert_file if source.is_file() else _convert_folder
        converted = convert_it(source, unfinished, drop)
        check_named(choices, converted.dropped + converted.kept)
    return converted


def like_copies(leaves: Sequence[TypedLeaf], saved: Mapping[str, str]) -> dict[str, np.ndarray]:
    """What tells Orbax how to read the leaves that were saved as copies; path to type is saved."""
    copies = {}
    for leaf in leaves:
        found = _COPIES.fullmatch(saved.get(leaf.path, ""))
        if found is None or found[0] == leaf.type:
            continue
        kind, number, rest = found.groups()
        if not isinstance(leaf.given, NUMBERS):
            fits, dtype = f"{kind}[{rest}]" == leaf.type, leaf.data.dtype
        else:  # a step counter that `replicate` made into an array
            dtype = jnp.dtype(bool if "<" in kind else kind)  # no key is a number
            fits = f"{dtype}[]" == f"{kind}[{rest}]"
            fits = fits and dtype.kind in _KINDS.get(type(leaf.given), "")
        if fits:
            copies[leaf.path] = np.empty((int(number), *np.shape(leaf.data)), dtype)
    return copies


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


def _without_device_axis(
    tree: Any, where: pathlib.Path, *, choices: Mapping[str, str], option: str
) -> tuple[Any, _Converted]:
    paths, structure = jax.tree.flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    keep = [part for part, choice in choices.items() if choice == "keep"]
    copies = {
        path: leaf
        for path, leaf in leaves.items()
        if isinstance(leaf, np.ndarray) and leaf.ndim and not any(part in path for part in keep)
    }
    sizes = collections.Counter(map(len, copies.values()))
    if len(sizes) != 1:
        most = max(sizes, key=sizes.__getitem__, default=0)
        others = [f"{path}{list(leaf.shape)}" for path, leaf in copies.items() if len(leaf) != most]
        raise refusal(
            CheckpointError,
            what=f"the leaves of {where} have no common device axis",
            which=others or ["it holds no array"],
            why=f"most leaves have a first dimension of {most}, and these have not"
            if others
            else "there is nothing to drop",
            do=f"Leave such leaves as they are by {option} with keep, or convert another file.",
        )
    given = {part: choice for part, choice in choices.items() if choice != "keep"}
    one = one_of_each(copies, given, where=str(where), option=option)
    kept = tuple(path for path in leaves if path not in one)
    converted = _Converted(next(iter(sizes)), tuple(one), kept)
    return structure.unflatten({**leaves, **one}.values()), converted


def _convert_file(source: pathlib.Path, target: pathlib.Path, drop: _Drop) -> _Converted:
    serialization = imported("flax.serialization", "flax", "Flax wrote the file")
    try:
        tree = serialization.msgpack_restore(source.read_bytes())
    except Exception as error:  # of msgpack, whatever the bytes lead to
        raise _unknown(source, "it is no file of flax.serialization.msgpack_serialize") from error
    tree, converted = drop(tree, source)
    target.write_bytes(serialization.msgpack_serialize(tree))
    return converted


def _convert_folder(source: pathlib.Path, target: pathlib.Path, drop: _Drop) -> _Converted:
    trees = sorted(path.parent for path in source.rglob(ORBAX_MARK) if path.is_file())
    if not trees:
        raise _unknown(source, f"no folder in it has Orbax's file {ORBAX_MARK}")
    if any(source.rglob(MANIFEST)):
        raise refusal(
            CheckpointError,
            what=f"{source} is not converted",
            which=[f"it has the file {MANIFEST}: jax_dist.multihost.Checkpoints wrote it"],
            why="Checkpoints reads such a state without conversion",
            do="Call restore(state, from_pmap=True), with a state that has no device axis.",
        )
    if source not in trees:
        shutil.copytree(
            source,
            target,
            symlinks=True,
            ignore=lambda folder, names: [
                name for name in names if pathlib.Path(folder, name) in trees
            ],
        )
    results = [_convert_tree(tree, target / tree.relative_to(source), drop) for tree in trees]
    return _Converted(
        max(each.devices for each in results),
        tuple(path for each in results for path in each.dropped),
        tuple(path for each in results for path in each.kept),
    )


def _convert_tree(source: pathlib.Path, target: pathlib.Path, drop: _Drop) -> _Converted:
    orbax = imported("orbax.checkpoint", "orbax-checkpoint", "Orbax wrote the folder")
    handler = orbax.PyTreeCheckpointHandler()
    metadata = handler.metadata(source)
    how = jax.tree.map(
        lambda _: orbax.RestoreArgs(restore_type=np.ndarray), getattr(metadata, "tree", metadata)
    )
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore(source, args=orbax.args.PyTreeRestore(restore_args=how))
        tree, converted = drop(tree, source)
        checkpointer.save(target, args=orbax.args.PyTreeSave(tree))
    return converted


@contextlib.contextmanager
def _written(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path beside the target to write to; it gets the target's name at the end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    unfinished = folder / target.name
    try:
        yield unfinished
        sync_tree(unfinished)
        if unfinished.is_file():
            os.link(unfinished, target)  # fails where something has come meanwhile
        else:
            unfinished.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_tree(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk."""
    for each in (*path.rglob("*"), path):
        sync(each)


def sync(path: str | pathlib.Path) -> None:
    """The same for one file, or for the names in one folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def imported(module: str, package: str, why: str, what: str = "converting this checkpoint") -> Any:
    """The module.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        text = message(
            what=f"{what} needs a package that is not installed",
            which=[re.split("[<>=]", package)[0]],
            why=why,
            do=f'Run: pip install "{package}"',
        )
        raise ImportError(text, name=module.partition(".")[0]) from None


def _unknown(path: pathlib.Path, which: str) -> CheckpointError:
    return refusal(
        CheckpointError,
        what=f"{path} cannot be converted",
        which=[which],
        why="only files of Flax's msgpack and folders of Orbax are known",
        do="Give such a file or folder, or read it in your program and save it with Orbax.",
    )
