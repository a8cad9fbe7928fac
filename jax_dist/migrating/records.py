"""Reads what one run of a program has written down about its mapped functions."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Array:
    """One argument or result of a call."""

    path: str  # in the arguments or the result, such as "[0].params['w']"
    dtype: str
    shape: tuple[int, ...]
    devices: int  # that held it; 0 for an array of numpy
    archive: Path | None  # where its values are; None for a large one, of which there are digests
    key: str = ""
    digest: str = ""
    rows: tuple[str, ...] = ()  # the digest of each row
    mean: float | None = None

    def values(self) -> np.ndarray:
        """From the disk, each time: a record may be larger than the memory."""
        assert self.archive is not None
        with np.load(self.archive) as archive:
            return archive[self.key]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a mapped function."""

    given: tuple[Array, ...]
    returned: tuple[Array, ...]
    raised: str | None  # the class of the error, where it raised one


@dataclass(frozen=True, slots=True)
class Mapped:
    """A function that is mapped, or a jit around one, and its calls."""

    process: int  # of the program, in the order in which they imported jax
    file: str
    line: int
    within: tuple[str, ...]  # the functions that were running when it was mapped, innermost first
    function: str
    calls: tuple[Call, ...]  # the first ones
    count: int  # of all calls


@dataclass(frozen=True, slots=True)
class Record:
    """What one run did."""

    mapped: tuple[Mapped, ...] = ()  # those called, in the order of their first calls
    jitted: tuple[Mapped, ...] = ()  # called too, with nothing mapped inside
    hidden: tuple[Mapped, ...] = ()  # only traced, inside something that is not recorded
    idle: tuple[Mapped, ...] = ()  # mapped, and never called
    problems: tuple[str, ...] = ()  # of the recording itself

    @property
    def count(self) -> int:
        """Of all calls of mapped functions."""
        return sum(mapped.count for mapped in self.mapped)


def read(folder: Path) -> Record:
    """Reads a record.

    Args:
      folder: that was given to the recording, with one folder for each process of the program.
    """
    parts = [_Part(process, path) for process, path in enumerate(_processes(folder))]
    return Record(
        mapped=_all(part.mapped() for part in parts),
        jitted=_all(part.jitted() for part in parts),
        hidden=_all(part.hidden() for part in parts),
        idle=_all(part.idle() for part in parts),
        problems=_all(part.problems for part in parts),
    )


def _processes(folder: Path) -> list[Path]:
    return sorted(folder.glob("process-*"), key=lambda path: int(path.name.partition("-")[2]))


def _all(parts: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(each for part in parts for each in part)


@dataclass
class _Site:
    """What the events say of one place."""

    event: Mapping[str, Any]
    calls: list[Call] = field(default_factory=list)
    count: int = 0
    first: float = math.inf  # the number of the event of its first call
    inside: bool = False  # traced as a part of something else
    hidden: bool = False  # of something that is not recorded
    holds_mapped: bool = False  # a jit around mapped functions


class _Part:
    """What one process wrote."""

    def __init__(self, process: int, folder: Path):
        self.process = process
        self.problems: list[str] = []
        self._folder = folder
        self._sites: dict[int, _Site] = {}
        for number, event in enumerate(_events(folder / "calls.jsonl")):
            self._take(number, event)

    def mapped(self) -> list[Mapped]:
        return self._those(lambda site: site.count > 0 and _is_mapped(site))

    def jitted(self) -> list[Mapped]:
        return self._those(lambda site: site.count > 0 and not _is_mapped(site))

    def hidden(self) -> list[Mapped]:
        return self._those(lambda site: site.hidden and not site.count and _is_mapped(site))

    def idle(self) -> list[Mapped]:
        return self._those(lambda site: not (site.inside or site.count) and _is_mapped(site))

    def _take(self, number: int, event: Mapping[str, Any]) -> None:
        if event["event"] == "site":
            self._sites[event["site"]] = _Site(event)
            return
        site = self._sites[event["site"]]
        match event["event"]:
            case "call":
                site.calls.append(self._call(event))
                site.count = max(site.count, event["call"] + 1)
                site.first = min(site.first, number)
            case "total":
                site.count = max(site.count, event["calls"])
            case "inside":
                site.inside = True
                cover = event["cover"]
                if cover is None:
                    site.hidden = True
                elif site.event["kind"] != "jit":
                    self._sites[cover].holds_mapped = True
            case "problem":
                self.problems.append(f"{site.event['function']}: {event['problem']}")

    def _those(self, wanted: Any) -> list[Mapped]:
        found = sorted(filter(wanted, self._sites.values()), key=lambda site: site.first)
        return [
            Mapped(
                process=self.process,
                file=site.event["file"],
                line=site.event["line"],
                within=tuple(site.event["within"]),
                function=site.event["function"],
                calls=tuple(site.calls),
                count=site.count,
            )
            for site in found
        ]

    def _call(self, event: Mapping[str, Any]) -> Call:
        archive = self._folder / event["arrays"]
        return Call(
            given=tuple(_array(each, archive) for each in event["given"]),
            returned=tuple(_array(each, archive) for each in event["returned"]),
            raised=event["raised"],
        )


def _is_mapped(site: _Site) -> bool:
    return site.holds_mapped or site.event["kind"] != "jit"


def _array(event: Mapping[str, Any], archive: Path) -> Array:
    return Array(
        path=event["path"],
        dtype=event["dtype"],
        shape=tuple(event["shape"]),
        devices=event["devices"],
        archive=archive if "key" in event else None,
        key=event.get("key", ""),
        digest=event.get("digest", ""),
        rows=tuple(event.get("rows", ())),
        mean=event.get("mean"),
    )


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Up to the line at which the process may have been killed."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
