"""What runs have written down, and how sure a spot of the merged program is by it.

The calls of mapped functions lie in one folder for each process of the program; what happened at
spots, in one file for each.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_dist.codemod.results import PlaceResult
from jax_dist.codemod.verify import slices
from jax_dist.codemod.verify.equivalence import NotProvedError
from jax_dist.codemod.verify.ledger import LedgerEntry, Rung
from jax_dist.codemod.verify.program_text import Spot

_SHOWN = 3  # problems of one place
_TAIL_LINES = 12  # of a program's output
_WHERE = re.compile(r" \(line [^)]*\)")  # of the program that ran, not of the user's
_IDLE = ("it was made, and never called",)
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


@dataclass(slots=True)
class SiteRecord:
    """A place where functions are mapped or jitted, and the calls of what was made there."""

    process: int  # of the program, in the order in which they imported jax
    file: str
    line: int
    within: tuple[str, ...]  # the functions that were running when it was made, innermost first
    function: str
    is_mapped: bool  # or a jit in whose trace something is mapped
    inside: bool = False  # was traced as a part of something else
    hidden: bool = False  # of something that is not recorded
    calls: list[CallRecord] = field(default_factory=list)  # the first ones
    count: int = 0  # of all calls
    number: int = 0  # in its process


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What one run did."""

    sites: tuple[SiteRecord, ...] = ()  # process by process, in the order in which they were made
    problems: tuple[str, ...] = ()  # of the recording itself
    hosts: tuple[SiteRecord, ...] = ()  # host edits, with their numbers for functions
    flows: tuple[Mapping[str, Any], ...] = ()  # what `recording.flow` wrote, of some processes

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


@dataclass
class Evidence:
    """What happened at one spot."""

    ran: bool = False
    calls: int = 0  # or values
    problems: list[tuple[str, str]] = field(default_factory=list)  # kind, and what is said
    sides: Counter[str] = field(default_factory=Counter)  # "old", "new", "": inside of a trace
    outer: set[int] = field(default_factory=set)  # the spots whose programs it is part of
    texts: list[Mapping[str, Any]] = field(default_factory=list)  # one for each signature
    uses: set[int] = field(default_factory=set)  # the places that go through it
    raised: Counter[str] = field(default_factory=Counter)  # calls that raise in both forms
    made: set[str] = field(default_factory=set)  # of which functions
    called: set[str] = field(default_factory=set)  # which of these


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended, and what it mapped."""

    exit_code: int | None  # negative: the signal that ended it; None: it was stopped, being late
    output: str  # standard output and error
    record: RunRecord
    ran: Mapping[int, Evidence] = field(default_factory=dict)  # by the numbers of spots
    refused: tuple[str, ...] = ()  # the files that it tried to write to, and may not

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])


def read(exit_code: int | None, output: str, folder: Path) -> Run:
    """A run, with what all of its processes wrote.

    Args:
      exit_code, output: as `Run` has them.
      folder: that was given to the recording.
    """
    refused = (each for path in sorted(folder.glob("refused-*.jsonl")) for each in _events(path))
    files = tuple(dict.fromkeys(map(str, refused)))
    return Run(exit_code, output, _read_calls(folder), _read_spots(folder), files)


def _read_calls(folder: Path) -> RunRecord:
    sites: list[SiteRecord] = []
    problems: list[str] = []
    hosts: list[SiteRecord] = []
    folders = sorted(folder.glob("process-*"), key=lambda path: int(path.name.partition("-")[2]))
    for process, path in enumerate(folders):
        known: dict[int, SiteRecord] = {}  # by number, and so in the order of making
        kinds: dict[int, str] = {}
        texts: dict[int | None, Mapping[str, Any]] = {}  # by number
        for event in _events(path / "calls.jsonl"):
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
            site = known[number]
            match event["event"]:
                case "text":
                    texts[event["number"]] = event
                case "call":
                    given, returned = (
                        tuple(_array(each, path / event["arrays"]) for each in event[side])
                        for side in ("given", "returned")
                    )
                    text = texts.get(event["text"])
                    site.calls.append(CallRecord(given, returned, event["raised"], text))
                    site.count = max(site.count, event["call"] + 1)
                case "total":
                    site.count = max(site.count, event["calls"])
                case "inside":
                    site.inside = True
                    if event["cover"] is None:
                        site.hidden = True
                    elif kinds[number] not in _MAPS_NOTHING:
                        known[event["cover"]].is_mapped = True
                case "problem":
                    problems.append(f"{site.function}: {event['problem']}")
    found = [json.loads(path.read_text()) for path in folder.glob("process-*/flow.json")]
    return RunRecord(tuple(sites), tuple(problems), tuple(hosts), tuple(found))


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


# --- spots


def _read_spots(folder: Path) -> dict[int, Evidence]:
    found: dict[int, Evidence] = {}
    for path in sorted(folder.glob("places-*.jsonl")):
        for event in _events(path):
            evidence = found.setdefault(event["place"], Evidence())
            match event["event"]:
                case "ran":
                    evidence.ran = True
                case "call" | "value":
                    evidence.calls += 1
                    number = f"{event['event']} {evidence.calls}"
                    evidence.problems += [(k, f"{number}: {said}") for k, said in event["problems"]]
                case "inside":
                    evidence.sides[event["side"]] += 1
                    if event["of"] is not None:
                        evidence.outer.add(event["of"])
                case "text":
                    evidence.texts.append(event)
                case "use":
                    evidence.uses.add(event["by"])
                case "raised":
                    evidence.raised[event["what"]] += 1
                case "made" | "called":
                    getattr(evidence, event["event"]).add(event["what"])
    return found


@dataclass(frozen=True)
class Judgement:
    """How sure a spot is, and why."""

    rung: Rung
    calls: int = 0
    equal: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()  # by which its programs are equal
    signatures: tuple[Mapping[str, Any], ...] = ()  # the texts of these, where they prove it

    def proved(self, signatures: Iterable[Mapping[str, Any]]) -> "Judgement":
        """More than that all calls were equal, where the texts of the programs show it.

        Args:
          signatures: the texts, as `slices.proof` takes them.
        """
        signatures = tuple(signatures)
        rules: set[str] = set()
        try:
            for each in signatures:
                rules |= set(slices.proof(each))
        except NotProvedError as reason:
            return replace(self, notes=(*self.notes, f"its programs differ: {reason}"))
        notes = list(self.notes)
        for name, form in (("before", "old"), ("after", "new")):
            sizes = [size for each in signatures for size in each["sizes"].items()]
            alone = sorted({size for size, texts in sizes if [*texts] == [name]})
            if name == "before" and len(alone) == len({size for size, _ in sizes}) > 0:
                notes.append("it takes a slice for each of all devices, and no fewer")
            elif alone:
                notes.append(f"on {', '.join(alone)} of the devices only the {form} form runs")
        return replace(
            self,
            rung=Rung.EQUAL_BY_RULES if rules else Rung.SAME_PROGRAM,
            rules=tuple(sorted(rules)),
            signatures=signatures,
            notes=tuple(notes),
        )


def judged(
    spot: Spot,
    found: Mapping[int, Evidence],
    spots: Mapping[int, Spot],
    *,
    lenient: bool = False,
) -> Judgement:
    """How sure a spot is.

    Args:
      spot: the place.
      found: what happened at all of them.
      spots: all, by number.
      lenient: whether its results may lie elsewhere than before: what puts them on devices.
    """
    evidence = found.get(spot.number)
    if evidence is None or not evidence.ran:
        return Judgement(Rung.NEVER_RAN)
    allowed = ("placement",) if lenient else ()
    problems = [said for kind, said in evidence.problems if kind not in (*allowed, "unknown")]
    notes = [said for kind, said in evidence.problems if kind in allowed]
    unknown = [said for kind, said in evidence.problems if kind == "unknown"]
    notes += [_said_of_raised(name, n) for name, n in evidence.raised.items()]
    equal = evidence.calls - len({said.partition(":")[0] for said in problems})
    if problems:
        return Judgement(
            Rung.DIFFERENT, evidence.calls, equal, first_few(problems), first_few(notes)
        )
    if unknown:
        return Judgement(Rung.RAN, evidence.calls, equal, notes=first_few(unknown))
    if evidence.raised and not evidence.calls:
        return Judgement(Rung.RAISED, notes=first_few(notes))
    others = {number: each for number, each in spots.items() if number != spot.number}
    uses = [judged(others[n], found, others) for n in sorted(evidence.uses & {*others})]
    if uses and not (evidence.calls or evidence.sides):
        return _together(uses)
    if idle := sorted(evidence.made - evidence.called):
        named = dict.fromkeys(_WHERE.sub("", each) for each in idle)
        notes = (f"never called: {', '.join(named)}",) if evidence.called else _IDLE
        return Judgement(Rung.NEVER_RAN, evidence.calls, equal, notes=notes)
    inside = _inside(evidence, found, others)
    if not evidence.calls:
        return inside or Judgement(Rung.NEVER_RAN, notes=_IDLE)
    if inside is not None and inside.rung < Rung.REPLAYED:
        return Judgement(inside.rung, evidence.calls, equal, notes=inside.notes)
    replayed = Judgement(Rung.REPLAYED, evidence.calls, equal, notes=first_few(notes))
    moved = any(kind in allowed for kind, _ in evidence.problems)
    return replayed if moved else _by_text(replayed, evidence)


def _said_of_raised(name: str, number: int) -> str:
    calls = "1 call" if number == 1 else f"{number} calls"
    return f"{calls} raised {name} in both forms, and so showed nothing"


def _by_text(replayed: Judgement, evidence: Evidence) -> Judgement:
    """More than that its calls were equal, where the texts of its programs show it."""
    if not evidence.texts or any("why" in text for text in evidence.texts):
        return replayed
    different = {json.dumps(text, sort_keys=True): text for text in evidence.texts}
    return replayed.proved(different.values())


def _inside(
    evidence: Evidence, found: Mapping[int, Evidence], spots: Mapping[int, Spot]
) -> Judgement | None:
    """What is known of a place inside of traced programs; None where it is not inside of any."""
    if not evidence.sides:
        return None
    if times := evidence.sides[""]:  # what a traced call computes is its text, and nothing else
        notes = ("it ran only inside a larger traced function",)
        proof = _by_text(Judgement(Rung.REPLAYED, times, times, notes=notes), evidence)
        if proof.rung > Rung.REPLAYED:
            return proof
        return Judgement(Rung.RAN, notes=proof.notes)
    if not (evidence.sides["old"] and evidence.sides["new"]):
        said = "JAX used one trace for both forms, so that they could not be told apart"
        return Judgement(Rung.RAN, notes=(said,))
    around = [spots[number] for number in sorted(evidence.outer & {*spots})]
    lines = ", ".join(str(line) for line in sorted({each.line for each in around}))
    notes = (f"checked as part of line {lines}",)
    least = _together([judged(each, found, spots) for each in around])
    return (
        Judgement(Rung.RAN, notes=notes)
        if least.rung < Rung.REPLAYED
        else replace(least, notes=notes)
    )


def entry(place: PlaceResult, judgements: Sequence[Judgement]) -> LedgerEntry:
    """A place is as sure as the least sure of its spots."""
    return LedgerEntry(place.path, place.line, place.what, **vars(_together(judgements)))


def _together(judgements: Sequence[Judgement]) -> Judgement:
    return Judgement(
        rung=min(each.rung for each in judgements),
        calls=sum(each.calls for each in judgements),
        equal=sum(each.equal for each in judgements),
        problems=tuple(dict.fromkeys(said for each in judgements for said in each.problems)),
        notes=tuple(dict.fromkeys(said for each in judgements for said in each.notes)),
        rules=tuple(sorted({rule for each in judgements for rule in each.rules})),
        signatures=tuple(text for each in judgements for text in each.signatures),
    )


def first_few(texts: Iterable[str]) -> tuple[str, ...]:
    """Without repetition, and not too many."""
    different = list(dict.fromkeys(texts))
    more = len(different) - _SHOWN
    return tuple(different[:_SHOWN]) + ((f"and {more} more",) if more > 0 else ())
