"""Checkpoint files of pmap's programs, written again without the device axis: Orbax and Flax.

The result gets its name, which must be free, when all of it is on the disk.
"""

import collections
import contextlib
import functools
import importlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jax_dist.errors import CheckpointError, MissingPackageError, message, refusal
from jax_dist.multihost import step_folders
from jax_dist.multihost.step_folders import check_named, one_of_each, sync, sync_tree

_ORBAX_MARK = "_METADATA"  # the file that makes a folder a tree of Orbax's


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
      MissingPackageError: Flax or Orbax is not installed.
      ValueError: a choice names no leaf.
    """
    source, target = source.absolute(), target.absolute()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists; nothing is overwritten. Give another name.")
    if not source.exists():
        raise FileNotFoundError(f"there is no checkpoint {source}.")
    drop = functools.partial(_without_device_axis, choices=choices, option=option)
    with _written(target) as unfinished:
        convert_it = _convert_file if source.is_file() else _convert_folder
        converted = convert_it(source, unfinished, drop)
        check_named(choices, converted.dropped + converted.kept)
    return converted


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
    serialization = _imported("flax.serialization", "flax", "Flax wrote the file")
    try:
        tree = serialization.msgpack_restore(source.read_bytes())
    except Exception as error:  # of msgpack, whatever the bytes lead to
        raise _unknown(source, "it is no file of flax.serialization.msgpack_serialize") from error
    tree, converted = drop(tree, source)
    target.write_bytes(serialization.msgpack_serialize(tree))
    return converted


def _convert_folder(source: pathlib.Path, target: pathlib.Path, drop: _Drop) -> _Converted:
    trees = sorted(path.parent for path in source.rglob(_ORBAX_MARK) if path.is_file())
    if not trees:
        raise _unknown(source, f"no folder in it has Orbax's file {_ORBAX_MARK}")
    if any(source.rglob(step_folders.NAME)):
        raise refusal(
            CheckpointError,
            what=f"{source} is not converted",
            which=[f"it has the file {step_folders.NAME}: jax_dist.multihost.Checkpoints wrote it"],
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
    orbax = _imported("orbax.checkpoint", "orbax-checkpoint", "Orbax wrote the folder")
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


def _imported(module: str, package: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        text = message(
            what="converting this checkpoint needs a package that is not installed",
            which=[package],
            why=why,
            do=f"Run: pip install {package}",
        )
        raise MissingPackageError(text, name=error.name) from None


def _unknown(path: pathlib.Path, which: str) -> CheckpointError:
    return refusal(
        CheckpointError,
        what=f"{path} cannot be converted",
        which=[which],
        why="only files of Flax's msgpack and folders of Orbax are known",
        do="Give such a file or folder, or read it in your program and save it with Orbax.",
    )
