"""What a run compiles, as data: the programs, their keys, and what became of each.

The key under which JAX looks for a program is one hash over the program and all that it is compiled
with. So beside the key stands what can make it differ. No jax here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jax_dist import _notes
from jax_dist.cache.store import replace

HIT, WRITTEN = "hit", "written"
CONSTANT = "stablehlo.constant"


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program."""

    kind: str  # such as "stablehlo.add"
    attributes: dict[str, str]  # and "types", those of its results: "tensor<4xf32>, tensor<i32>"
    operands: tuple[int | str, ...]  # the numbers of the values
    results: tuple[int | str, ...]
    line: str  # of the user: "train.py:12", or ""


@dataclasses.dataclass(frozen=True, slots=True)
class Compile:
    """One program that JAX was asked to compile."""

    function: str  # such as "jit_step"
    key: str  # "jit_step-" and a hash; the entry's file has "-cache" behind it
    fate: str  # HIT, WRITTEN, or the name of the cause for which it was not written
    process: int  # jax.process_index()
    directory: str  # of the cache, as the program has set it
    flags: tuple[str, ...]  # of XLA
    options: tuple[str, ...]  # compiler_options
    devices: tuple[int, ...]
    operations: tuple[Operation, ...]

    def save(self, path: Path) -> None:
        """Writes it in one step: a reader sees all of it, or none."""
        replace(path, json.dumps(self, default=_fields, separators=(",", ":")).encode())


def load(folder: Path) -> tuple[Compile, ...]:
    """What all processes of a run compiled.

    Raises:
      ValueError: a file is not such a record.
      OSError: one cannot be read.
    """
    return tuple(map(_read, sorted(folder.glob("[!.]*.json"))))


def _fields(part: Any) -> dict[str, object]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _read(file: Path) -> Compile:
    found = _notes.parse(_notes.content(file), Compile)
    if found is None:  # written by the jax_dist that the program imports, which may be another one
        raise ValueError(f"{file} is not a record of this version of jax_dist")
    return found
