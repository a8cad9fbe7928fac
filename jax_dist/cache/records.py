"""What one run compiled, as data, and as a file."""

import dataclasses
import enum
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax_dist import _notes
from jax_dist.cache.keys import Key
from jax_dist.cache.operations import Operation
from jax_dist.cache.settings import Settings
from jax_dist.cache.store import replace
from jax_dist.errors import RecordError

_FORMAT = 1


class Outcome(enum.StrEnum):
    """What became of a program."""

    HIT = "hit"
    WRITTEN = "written"
    UNWRITTEN = "not written"


@dataclasses.dataclass(frozen=True, slots=True)
class Compile:
    """One program that JAX was asked to compile."""

    key: Key
    outcome: Outcome
    reason: str | None  # why it was not written: the name of a cause
    seconds: float  # to compile it, or to load it
    process: int  # jax.process_index()
    settings: Settings
    operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What one run compiled, in order."""

    compiles: tuple[Compile, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """For machines; each text stands there once."""
        return _Packer().packed(self)

    def __str__(self) -> str:
        return "\n".join(_line(compiled) for compiled in self.compiles) or "nothing was compiled"


def _line(compiled: Compile) -> str:
    why = f" ({compiled.reason})" if compiled.reason else ""
    return f"{compiled.key.name[:60]:60}  {compiled.outcome}{why}"


def save(record: Record, path: Path) -> None:
    """Writes a record in one step: a reader sees all of it, or none."""
    replace(path, json.dumps(record.to_dict(), separators=(",", ":")).encode())


def load(path: str | os.PathLike[str]) -> Record:
    """Reads a record, or all those of a folder as one.

    Args:
      path: what was given to `jax_dist.cache.record`.

    Returns:
      What was compiled.

    Raises:
      RecordError: it is not a record.
      OSError: it cannot be read.
    """
    path = Path(path)
    files = sorted(path.glob("[!.]*.json")) if path.is_dir() else [path]
    return Record(tuple(compiled for file in files for compiled in _read(file)))


def _read(file: Path) -> Iterable[Compile]:
    try:
        content = _notes.decode(file.read_bytes())
        if content["format"] == _FORMAT:
            return list(_unpacked(content))
        problem = f"its format is {content['format']}, and this version reads {_FORMAT}"
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise RecordError(f"{file} is not a record of jax_dist.cache.record: {problem}")


class _Packer:
    """Numbers the texts: ten thousand operations have few that differ."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}

    def packed(self, record: Record) -> dict[str, object]:
        compiles = [self._compile(compiled) for compiled in record.compiles]
        return {"format": _FORMAT, "compiles": compiles, "texts": list(self._texts)}

    def _compile(self, compiled: Compile) -> dict[str, object]:
        return {
            "key": compiled.key.to_dict(),
            "outcome": compiled.outcome.value,
            "reason": compiled.reason,
            "seconds": compiled.seconds,
            "process": compiled.process,
            "settings": [self._pair(pair) for pair in compiled.settings.items()],
            "operations": [self._operation(operation) for operation in compiled.operations],
        }

    def _operation(self, operation: Operation) -> list[Any]:
        return [
            self._text(operation.kind),
            [self._pair(pair) for pair in operation.attributes],
            self._text(operation.types),
            operation.operands,
            operation.results,
            self._text(operation.line),
        ]

    def _pair(self, pair: Sequence[str]) -> list[int]:
        return [self._text(text) for text in pair]

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))


def _unpacked(content: dict[str, Any]) -> Iterable[Compile]:
    texts = content["texts"]

    def pairs(numbers: list[list[int]]) -> tuple[tuple[str, str], ...]:
        return tuple((texts[name], texts[value]) for name, value in numbers)

    def operation(kind, attributes, types, operands, results, line) -> Operation:
        return Operation(
            kind=texts[kind],
            attributes=pairs(attributes),
            types=texts[types],
            operands=tuple(operands),
            results=tuple(results),
            line=texts[line],
        )

    for each in content["compiles"]:
        yield Compile(
            key=Key(**each["key"]),
            outcome=Outcome(each["outcome"]),
            reason=each["reason"],
            seconds=each["seconds"],
            process=each["process"],
            settings=dict(pairs(each["settings"])),
            operations=tuple(operation(*packed) for packed in each["operations"]),
        )
