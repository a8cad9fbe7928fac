"""The file that makes a folder of Orbax's a checkpoint: its leaves, and the checksums of its files.

Orbax notices a file that is missing or cut short, but not always one with other bytes.
"""

import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_dist import _notes
from jax_dist.multihost.leaves import TypedLeaf

NAME = "jax_dist.json"
_LONGEST = 1 << 26  # bytes
_PIECE = 1 << 20  # bytes read at a time


class Manifest(NamedTuple):
    leaves: dict[str, str]  # path to type, as in {"['w']": "float32[3]"}
    files: dict[str, tuple[int, int]]  # path in the folder to bytes and CRC-32
    digest: str  # of the two


def write(folder: pathlib.Path, leaves: Sequence[TypedLeaf]) -> None:
    """After all other files, and before the folder gets its name."""
    types = {leaf.path: leaf.type for leaf in leaves}
    files = {str(path.relative_to(folder)): _checksum(path) for path in _files(folder)}
    manifest = Manifest(types, files, _digest(types, files))
    (folder / NAME).write_text(json.dumps(manifest._asdict(), indent=1))


def read(folder: pathlib.Path) -> Manifest | None:
    """None where there is none that was written whole."""
    found = _notes.load(folder / NAME, Manifest, limit=_LONGEST)
    return found if found and found.digest == _digest(found.leaves, found.files) else None


def damages(folder: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """What is not as it was written, as in "d/73068e7c has 100 bytes instead of 374"."""
    for name, (size, checksum) in sorted(manifest.files.items()):
        path = folder / name
        try:
            if not path.is_file():
                yield f"{name} is not there"
            elif path.stat().st_size != size:
                yield f"{name} has {path.stat().st_size} bytes instead of {size}"
            elif _checksum(path)[1] != checksum:
                yield f"{name} has other bytes than were written"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)


def _digest(leaves: dict[str, str], files: dict[str, tuple[int, int]]) -> str:
    return hashlib.sha256(json.dumps([leaves, files], sort_keys=True).encode()).hexdigest()


def _checksum(path: pathlib.Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size += len(piece)
            checksum = zlib.crc32(piece, checksum)
    return size, checksum
