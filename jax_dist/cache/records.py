"""What a run compiles, as data: the programs, what is in their keys, and what became of each.

The key under which JAX looks for a program is one hash over eight components; the program is found
again if all eight are the same. A record holds the key, the settings beside the program, and its
operations, so two records of two runs can be compared; see `jax_dist.cache.diff`. No jax here.
"""

import dataclasses
import enum
import json
import os
from pathlib import Path
from typing import Any, TypeAlias

from jax_dist import _notes
from jax_dist.cache.store import replace

_FORMAT = 1

Settings: TypeAlias = dict[str, str]  # by name, in words that can be shown

DEBUG_OPTION = "debug option "
COMPILER_OPTION = "compiler option "
DIRECTORY = "cache directory"
DEVICES = "devices"
FLAGS = "XLA flags"
METADATA = "metadata in key"
# Through jax 0.10.2 the cache's directory is also the place of these, and part of the key.
DIRECTORY_OPTIONS = ("xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_kernel_cache_file")

CONSTANT = "stablehlo.constant"
COMPONENTS = (  # in JAX's words and order
    "computation",
    "jax_lib version",
    "backend version",
    "XLA flags",
    "compile_options",
    "accelerator_config",
    "compression",
    "custom_hook",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a program."""

    kind: str  # such as "stablehlo.add"
    attributes: dict[str, str]  # and "types", those of its results: "tensor<4xf32>, tensor<i32>"
    operands: tuple[int | str, ...]  # the numbers of the values
    results: tuple[int | str, ...]
    line: str  # of the user: "train.py:12", or ""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """The key of one program, and the hash of each of its components."""

    function: str  # such as "jit_step"
    name: str  # "jit_step-" and the hash of all; the entry's file has "-cache" behind it
    components: dict[str, str]  # component to hash, in hexadecimal

    def differing(self, other: "Key") -> tuple[str, ...]:
        """The components that are not the same in both keys, those that JAX names first."""
        one, two = self.components, other.components
        names = dict.fromkeys((*COMPONENTS, *one, *two))
        return tuple(name for name in names if one.get(name) != two.get(name))

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, self.components))
        lines = (f"  {name:{width}}  {hash_[:16]}" for name, hash_ in self.components.items())
        return "\n".join((self.name, *lines))


class CacheOutcome(enum.StrEnum):
    """What became of a program."""

    HIT = "hit"
    WRITTEN = "written"
    UNWRITTEN = "not written"


@dataclasses.dataclass(frozen=True, slots=True)
class Compile:
    """One program that JAX was asked to compile."""

    key: Key
    outcome: CacheOutcome
    reason: str | None  # why it was not written: the name of a cause
    seconds: float  # to compile it, or to load it
    process: int  # jax.process_index()
    settings: Settings
    operations: tuple[Operation, ...]

    @property
    def fate(self) -> str:
        """What became of it, and why it was not written."""
        return f"{self.outcome} ({self.reason})" if self.reason else self.outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What one run compiled, in order."""

    compiles: tuple[Compile, ...] = ()

    def save(self, path: Path) -> None:
        """Writes it in one step: a reader sees all of it, or none."""
        content = {"format": _FORMAT, "compiles": self.compiles}
        replace(path, json.dumps(content, default=_fields, separators=(",", ":")).encode())

    def __str__(self) -> str:
        lines = [f"{each.key.name[:60]:60}  {each.fate}" for each in self.compiles]
        return "\n".join(lines) or "nothing was compiled"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Record":
        """Reads a record, or all those of a folder as one.

        Args:
          path: what was given to `jax_dist.cache.record`.

        Returns:
          What was compiled.

        Raises:
          ValueError: it is not a record.
          OSError: it cannot be read.
        """
        path = Path(path)
        files = sorted(path.glob("[!.]*.json")) if path.is_dir() else [path]
        return cls(tuple(compiled for file in files for compiled in _read(file)))


def _fields(part: Any) -> dict[str, object]:
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


def _read(file: Path) -> tuple[Compile, ...]:
    problem = "its fields are others"
    try:
        content = _notes.decode(file.read_bytes())
        if content["format"] != _FORMAT:
            problem = f"its format is {content['format']}, and this version reads {_FORMAT}"
        elif (found := _notes.read(content["compiles"], tuple[Compile, ...])) is not None:
            return found
    except (ValueError, TypeError, LookupError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ValueError(f"{file} is not a record of jax_dist.cache.record: {problem}")
