"""Reads what one run of a program has written down about its mapped functions."""

import json
from collections.abc import Callable, Iterator, Mapping
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
    parts: int  # into which it was cut; 1 where each device held all of it
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
class CallRecord:
    """One call of a mapped function."""

    given: tuple[Array, ...]
    returned: tuple[Array, ...]
    raised: str | None  # the class of the error, where it raised one
    text: Mapping[str, Any] | None = None  # of its program: `text` and `paths`, or `why` none


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """A place where functions are mapped or jitted, and the calls of what was made there."""

    process: int  # of the program, in the order in which they imported jax
    file: str
    line: int
    within: tuple[str, ...]  # the functions that were running when it was made, innermost first
    function: str
    is_mapped: bool  # or a jit in whose trace something is mapped
    inside: bool  # was traced as a part of something else
    hidden: bool  # of something that is not recorded
    calls: tuple[CallRecord, ...]  # the first ones
    count: int  # of all calls


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run did."""

    sites: tuple[SiteRecord, ...] = ()  # process by process, in the order in which they were made
    problems: tuple[str, ...] = ()  # of the recording itself
    hosts: tuple[SiteRecord, ...] = ()  # host edits, with their numbers for functions

    @property
    def called(self) -> tuple[SiteRecord, ...]:
        """Where mapped functions were made that were called."""
        return tuple(site for site in self.sites if site.is_mapped and site.count)

    @property
    def idle(self) -> tuple[SiteRecord, ...]:
        """Where mapped functions were made that nobody called."""
        return tuple(
            site for site in self.sites if site.is_mapped and not (site.count or site.inside)
        )

    @property
    def hidden(self) -> tuple[SiteRecord, ...]:
        """Where mapped functions were made that were only traced."""
        return tuple(site for site in self.sites if site.hidden and not site.count)


def read(folder: Path) -> RunRecord:
    """Reads a record.

    Args:
      folder: that was given to the recording, with one folder for each process of the program.
    """
    parts = [_Part(process, path) for process, path in enumerate(_processes(folder))]
    return RunRecord(
        sites=tuple(site for part in parts for site in part.sites()),
        problems=tuple(problem for part in parts for problem in part.problems),
        hosts=tuple(host for part in parts for host in part.hosts()),
    )


def _processes(folder: Path) -> list[Path]:
    return sorted(folder.glob("process-*"), key=lambda path: int(path.name.partition("-")[2]))


@dataclass
class _Found:
    """What the events so far say of one site."""

    event: Mapping[str, Any]
    calls: list[CallRecord] = field(default_factory=list)
    count: int = 0
    inside: bool = False
    hidden: bool = False
    holds_mapped: bool = False
    texts: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by number


class _Part:
    """What one process wrote."""

    def __init__(self, process: int, folder: Path):
        self.problems: list[str] = []
        self._process = process
        self._folder = folder
        self._found: dict[int, _Found] = {}  # by number, and so in the order of making
        for event in _events(folder / "calls.jsonl"):
            self._take(event)

    def sites(self) -> Iterator[SiteRecord]:
        return self._of(lambda kind: kind != "host")

    def hosts(self) -> Iterator[SiteRecord]:
        return self._of(lambda kind: kind == "host")

    def _of(self, kinds: Callable[[str], bool]) -> Iterator[SiteRecord]:
        for found in self._found.values():
            if not kinds(found.event["kind"]):
                continue
            is_mapped = found.holds_mapped or found.event["kind"] not in ("jit", "host")
            yield SiteRecord(
                process=self._process,
                file=found.event["file"],
                line=found.event["line"],
                within=tuple(found.event["within"]),
                function=found.event["function"],
                is_mapped=is_mapped,
                inside=found.inside,
                hidden=found.hidden and is_mapped,
                calls=tuple(found.calls),
                count=found.count,
            )

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "site":
            self._found[event["site"]] = _Found(event)
            return
        found = self._found[event["site"]]
        match event["event"]:
            case "text":
                found.texts[event["number"]] = event
            case "call":
                found.calls.append(self._call(event, found.texts))
                found.count = max(found.count, event["call"] + 1)
            case "total":
                found.count = max(found.count, event["calls"])
            case "inside":
                found.inside = True
                found.hidden |= event["cover"] is None
                if event["cover"] is not None and found.event["kind"] not in ("jit", "host"):
                    self._found[event["cover"]].holds_mapped = True
            case "problem":
                self.problems.append(f"{found.event['function']}: {event['problem']}")

    def _call(self, event: Mapping[str, Any], texts: Mapping[int, Mapping[str, Any]]) -> CallRecord:
        archive = self._folder / event["arrays"]
        return CallRecord(
            given=tuple(_array(each, archive) for each in event["given"]),
            returned=tuple(_array(each, archive) for each in event["returned"]),
            raised=event["raised"],
            text=texts.get(event["text"]),
        )


def _array(event: Mapping[str, Any], archive: Path) -> Array:
    return Array(
        path=event["path"],
        dtype=event["dtype"],
        shape=tuple(event["shape"]),
        devices=event["devices"],
        parts=event["parts"],
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
