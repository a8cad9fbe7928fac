"""The file that makes a folder of Orbax's a checkpoint: its leaves, and the checksums of its files.

Orbax notices a file that is missing or cut short, but not always one with other bytes.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax_dist.multihost.leaves import Leaf

_NAME = "jax_dist.json"
_PIECE = 1 << 20  # bytes read at a time


class Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, list[int]]  # path in the folder to [bytes, CRC-32]


def write(folder: pathlib.Path, leaves: Sequence[Leaf]) -> None:
    """At once or not at all; after all other files."""
    files = {str(path.relative_to(folder)): _checksum(path) for path in _files(folder)}
    manifest = Manifest({leaf.path: leaf.type for leaf in leaves}, files)
    unfinished = folder / f"{_NAME}.unfinished"
    with unfinished.open("w") as file:
        json.dump(manifest._asdict(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(folder / _NAME)


def read(folder: pathlib.Path) -> Manifest | None:
    """None where there is none: the checkpoint was not written to its end."""
    try:
        found = json.loads((folder / _NAME).read_text())
        return Manifest(found["leaves"], found["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def damages(folder: pathlib.Path, files: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """What is not as it was written, as in "d/73068e7c has 100 bytes instead of 374"."""
    for name, (size, checksum) in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            yield f"{name} is not there"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes instead of {size}"
        elif _checksum(path)[1] != checksum:
            yield f"{name} has other bytes than were written"


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    every = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in every if not path.name.startswith(_NAME))


def _checksum(path: pathlib.Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return [size, checksum]
