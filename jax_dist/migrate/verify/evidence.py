"""What runs have written down.

The calls of mapped functions lie in one folder for each process of the program; which places ran,
in one file for each.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_dist.migrate.verify.recording import lost

_TAIL_LINES = 12  # of a program's output
_MAPS_NOTHING = ("jit", "host")  # kinds of sites, but for a jit that has something mapped inside


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
    weak: bool = False  # its type is
    placed: str = ""  # which device holds which part: equal where that is the same

    def without_values(self) -> "Array":
        """The same, with digests of its rows in place of its values."""
        if self.archive is None or not self.shape:
            return self
        rows = (hashlib.sha256(row.tobytes()).hexdigest() for row in self.values())
        return replace(self, archive=None, rows=tuple(rows))

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
    structure: str | None = ""  # of its result; None where that cannot be told
    donated: tuple[int, ...] = ()  # the numbers of the arguments that it used up


@dataclass(slots=True, eq=False)
class SiteRecord:
    """A place where functions are mapped or jitted, and the calls of what was made there."""

    process: int  # of the program: by rank, then by when they imported jax, forks after parents
    file: str
    line: int
    within: tuple[str, ...]  # the functions that were running when it was made, innermost first
    function: str
    is_mapped: bool  # or a jit in whose trace something is mapped
    inside: bool = False  # was traced as a part of something else
    hidden: bool = False  # of something that is not recorded
    calls: list[CallRecord] = field(default_factory=list)
    count: int = 0  # of all calls, also those that were not written down
    places: set[int] = field(default_factory=set)  # that it was made at, or handed on through
    around: set[int] = field(default_factory=set)  # places that ran within its calls
    made: set[str] = field(default_factory=set)  # of which functions
    told: set[str] = field(default_factory=set)  # which of these were called
    covers: list["SiteRecord"] = field(default_factory=list)  # that it was traced as a part of
    traced: list[Mapping[str, Any]] = field(default_factory=list)  # its texts as a part, as `text`
    number: int = 0  # in its process


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run did."""

    sites: tuple[SiteRecord, ...] = ()  # process by process, in the order in which they were made
    problems: tuple[str, ...] = ()  # of the recording itself
    hosts: tuple[SiteRecord, ...] = ()  # host edits, with their numbers for functions
    flows: tuple[Mapping[str, Any], ...] = ()  # what `recording.flow` wrote, of some processes
    is_complete: bool = True  # or something was not written down, and nobody knows what
    left: tuple[str, ...] = ()  # the commands that still ran at its end, and were ended

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
        return tuple(s for s in self.sites if s.is_mapped and s.hidden and not s.count)


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended, and what it mapped."""

    exit_code: int | None  # negative: the signal that ended it; None: it was stopped, being late
    output: str  # standard output and error
    record: RunRecord
    ran: frozenset[int] = frozenset()  # the numbers of the places that did
    alone: frozenset[int] = frozenset()  # of those that gave what nobody records
    refused: tuple[str, ...] = ()  # the files that it tried to write to, and may not

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])


def read(exit_code: int | None, output: str, folder: Path, left: Sequence[str] = ()) -> Run:
    """A run, with what all of its processes wrote.

    Args:
      exit_code, output: as `Run` has them.
      folder: that was given to the recording.
      left: as `RunRecord` has it.
    """
    refused = (each for path in sorted(folder.glob("refused-*.jsonl")) for each in _events(path))
    files = tuple(dict.fromkeys(map(str, refused)))
    lists = (path.read_text().splitlines() for path in folder.glob("places-*.txt"))
    told = [line.partition(" ") for lines in lists for line in lines]
    ran = frozenset(int(number) for number, _, _ in told)
    alone = frozenset(int(number) for number, _, is_alone in told if is_alone)
    return Run(exit_code, output, _read_calls(folder, left), ran, alone, files)


def _read_calls(folder: Path, left: Sequence[str]) -> RunRecord:
    sites: list[SiteRecord] = []
    problems: list[str] = []
    is_complete = _nothing_lost(folder) and not left
    hosts: list[SiteRecord] = []
    for process, (path, events) in enumerate(_processes(folder)):
        known: dict[int, SiteRecord] = {}  # by number, and so in the order of making
        kinds: dict[int, str] = {}
        texts: dict[int | None, Mapping[str, Any]] = {}  # by number
        for event in events:
            if event["event"] == "forked":
                _forget(known.values())
                continue
            number = event["site"]
            if event["event"] == "site":
                kind = kinds[number] = event["kind"]
                within, is_mapped = tuple(event["within"]), kind not in _MAPS_NOTHING
                known[number] = SiteRecord(
                    process, event["file"], event["line"], within, event["function"], is_mapped
                )
                known[number].number = number
                (hosts if kind == "host" else sites).append(known[number])
                continue
            site, cover = known.get(number), event.get("cover")
            if site is None or (cover is not None and cover not in known):
                is_complete = False  # what made it known could not be written
                continue
            match event["event"]:
                case "text":
                    texts[event["number"]] = event
                case "call":
                    given, returned = (
                        tuple(_array(each, path / event["arrays"]) for each in event[side])
                        for side in ("given", "returned")
                    )
                    text, donated = texts.get(event["text"]), tuple(event["donated"])
                    more = text, event["structure"], donated
                    site.calls.append(CallRecord(given, returned, event["raised"], *more))
                    site.count = max(site.count, event["call"] + 1)
                case "total":
                    site.count = max(site.count, event["calls"])
                case "inside":
                    site.inside = True
                    site.traced.append(texts.get(event["text"], {"why": "it has no text"}))
                    if event["cover"] is None:
                        site.hidden = True
                    else:
                        site.covers.append(known[event["cover"]])
                        is_mapped = kinds[number] not in _MAPS_NOTHING
                        known[event["cover"]].is_mapped |= is_mapped
                case "place":
                    site.places.add(event["place"])
                case "around":
                    site.around.add(event["place"])
                    site.is_mapped = True  # or else it would not be compared
                case "made":
                    site.made.add(event["what"])
                case "called":
                    site.told.add(event["what"])
                case "problem":
                    problems.append(f"{site.function}: {event['problem']}")
                    if "call" in event:
                        site.count = max(site.count, event["call"] + 1)
    # One that was not written as a whole is no line.
    flows = tuple(flow for path in folder.glob("process-*/flow.json") for flow in _events(path))
    return RunRecord(tuple(sites), tuple(problems), tuple(hosts), flows, is_complete, tuple(left))


def _nothing_lost(folder: Path) -> bool:
    """Whether all could be written down; where nothing tells it, that is not known."""
    told = folder / lost.NAME
    return told.exists() and told.read_bytes() == bytes(1)


def _forget(sites: Iterable[SiteRecord]) -> None:
    """What the parent of a fork traced, it tells itself; here only which functions it found."""
    for site in sites:
        site.hidden = False
        for each in (site.covers, site.traced, site.around):
            each.clear()


def _processes(folder: Path) -> list[tuple[Path, list[Any]]]:
    """The folder of each process, and what is in it: in the same order in all runs.

    Which rank of a job is the first to import jax may differ from run to run.
    """
    numbers = lambda path: [int(each) for each in path.name.split("-")[1:]]
    folders = sorted(folder.glob("process-*"), key=numbers)
    found = [(path, [*_events(path / "calls.jsonl")]) for path in folders]
    rank = lambda events: next((each["rank"] for each in events if "rank" in each), 0)
    return sorted(found, key=lambda each: rank(each[1]))


def _array(event: Mapping[str, Any], archive: Path) -> Array:
    """With its values, or with digests of them."""
    rows, shape = tuple(event.get("rows", ())), tuple(event["shape"])
    kept = archive if "key" in event else None
    return Array(**{**event, "shape": shape, "rows": rows, "archive": kept})


def _events(path: Path) -> Iterator[Any]:
    """Up to the line at which the process may have been killed."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return
