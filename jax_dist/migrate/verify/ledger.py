"""What a verification found: data, and the table that people read.

Shapes: `N` is the size of the device axis, which `jax.pmap` puts first and a migration may drop;
`*s` is the rest.
"""

import dataclasses
import enum
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

_WIDTH = 32
_APART = {
    "overlay": "an overlay of all files",
    "locked copy": "a copy of the project; nothing may write elsewhere",
    "copy": "a copy of the project; Python code may not write elsewhere, native code may",
}


# --- what two runs of a command, before and after a migration, computed

How: TypeAlias = Literal[
    "as is",  # [*s] and [*s]
    "one of equal copies",  # [N, *s], all rows alike, and [*s]
    "device axis merged",  # [N, b, *s] and [N * b, *s]
]


Key: TypeAlias = tuple[str, str]  # what differs, such as "result[0]", and the kind: "value", "type"


class MigrationVerdict(enum.StrEnum):
    """What the two runs say of the migration."""

    SAME = "same"  # all that was mapped was called, and is equal, on as many devices
    DIFFERENT = "different"
    UNPROVEN = "unproven"  # nothing differs, but not all could be compared


@dataclass(frozen=True, slots=True)
class SiteComparison:
    """One mapped function before and after."""

    file: str
    line: int  # before
    function: str
    calls_before: int
    calls_after: int
    compared: int  # calls whose arrays were compared
    raised: int  # calls that raised in both runs
    devices_before: int  # the fewest that hold a result
    devices_after: int
    absolute: float  # the largest difference between two results
    relative: float  # the same, relative to the largest value of its array
    how: tuple[How, ...]  # results were compared
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    equal: int = 0  # calls in which nothing differs
    differing: frozenset[Key] = frozenset()  # what the problems are about
    same_form: bool = True  # all arrays are as they were, and where they were
    unsteady: bool = False  # it differs from run to run, and what does so was left out
    signatures: tuple[Mapping[str, Any], ...] = ()  # of its programs, as `slices.proof` takes them
    unproved: str = ""  # why its calls have no such signature
    site: Any = None  # the record of the function before

    @property
    def drifted(self) -> bool:
        """Whether all that differs is what it is given: something before it differs."""
        of_arguments = all(what[:8] == "argument" and k == "value" for what, k in self.differing)
        return bool(self.differing) and of_arguments

    def to_dict(self) -> dict[str, Any]:
        largest = {name: f"largest_{name}_difference" for name in ("absolute", "relative")}
        shown = _fields(self, "differing", "signatures", "unproved", "site")
        return {largest.get(name, name): value for name, value in shown.items()}


@dataclass(frozen=True, slots=True)
class Ending:
    """How one run of the command ended."""

    exit_code: int | None  # negative: the signal that ended it; None: it ran out of time
    functions: int  # mapped functions that were called
    calls: int  # of these
    devices: int  # the fewest that hold a result of a mapped function
    output: str  # the last lines

    def __str__(self) -> str:
        if self.exit_code is None:
            return "no end in time"
        if self.exit_code < 0:
            return f"signal {-self.exit_code}"
        return f"exit {self.exit_code}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class MigrationVerification:
    """A command run before and after a migration, and what its mapped functions computed."""

    command: tuple[str, ...]
    verdict: MigrationVerdict
    before: Ending
    after: Ending
    sites: tuple[SiteComparison, ...]
    problems: tuple[str, ...] = ()  # why the verdict is "different", besides those of the sites
    unproven: tuple[str, ...] = ()  # what could not be compared, and why
    notes: tuple[str, ...] = ()
    is_complete: bool = True  # or one of the runs could not write down all that it did

    @property
    def differs(self) -> bool:
        """Whether something is not the same."""
        return self.verdict is MigrationVerdict.DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """For machines, in JSON's types; an infinite difference is None."""
        return _fields(self)


# --- place by place


class Rung(enum.IntEnum):
    """How sure a place is, the surest last; people read the names."""

    DIFFERENT = 0
    NEVER_RAN = 1
    RAISED = 2
    RAN = 3
    SAME_IN_TWO_RUNS = 4
    REPLAYED = 5
    EQUAL_BY_RULES = 6
    SAME_PROGRAM = 7

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


# Why a place stays as it was, and what to do about it.
_LEFT = {
    Rung.DIFFERENT: (
        "--verify saw it compute something else",
        "Compare the two forms at the call that is named: --keep writes it all the same.",
    ),
    Rung.NEVER_RAN: ("--verify never saw it run", "Run a command that reaches it and calls it."),
    Rung.RAISED: (
        "--verify saw it raise an error in both forms",
        "Run a command that calls it with what it accepts: a call that raises shows nothing.",
    ),
    Rung.RAN: (
        "--verify saw it run, and could not compare it",
        "Compare by hand what it gives: --require ran writes it.",
    ),
}
_UNPROVED = (
    "--verify saw the same results, and could not show that the programs are the same",
    "--require replayed writes it.",
)


# "replayed" takes two equal runs too: what cannot be merged has nothing better.
REQUIREMENTS = {"proved": Rung.EQUAL_BY_RULES, "replayed": Rung.SAME_IN_TWO_RUNS, "ran": Rung.RAN}


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One place."""

    path: str  # as the migration was given it
    line: int  # before
    what: str
    rung: Rung
    calls: int = 0  # or values, where it is no function
    equal: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    put_back: bool = False
    attempts: tuple[str, ...] = ()  # what each came to, where they differ
    rules: tuple[str, ...] = ()  # by which its programs are equal
    signatures: tuple[Mapping[str, Any], ...] = ()  # their texts, where these prove it

    def to_dict(self) -> dict[str, Any]:
        more = {"path": os.path.relpath(self.path), "next": self.remedy if self.put_back else ""}
        return _fields(self, "signatures") | more

    @property
    def reason(self) -> str:
        """Why it stays as it was, in words that are the same for all such places."""
        return _LEFT.get(self.rung, _UNPROVED)[0]

    @property
    def remedy(self) -> str:
        """What to do where it stays as it was."""
        return _LEFT.get(self.rung, _UNPROVED)[1]

    @property
    def key(self) -> tuple[str, int, str]:
        """What it has in each attempt."""
        return self.path, self.line, self.what

    @property
    def where(self) -> str:
        """Its file and line."""
        return f"{os.path.relpath(self.path)}:{self.line}"

    @property
    def shown(self) -> str:
        """Its rung, with the calls that were compared."""
        if self.rung is Rung.REPLAYED:
            return f"replayed {self.equal} of {self.calls}"
        if self.rung is Rung.EQUAL_BY_RULES:
            return f"{self.rung} {', '.join(self.rules)}"
        return str(self.rung)


@dataclass(frozen=True, slots=True)
class Ledger:
    """A command, and what its run says of each place."""

    command: tuple[str, ...]
    entries: tuple[LedgerEntry, ...]
    kept_apart: str  # a key of _APART
    exit_code: int | None = 0
    output: str = ""  # its end, where the command failed
    runs: MigrationVerification | None = None  # before and after, where that was needed
    problems: tuple[str, ...] = ()  # of all places together
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Rung:
        """Of all places; of none, nothing is known."""
        if self.problems:
            return Rung.DIFFERENT
        return min((entry.rung for entry in self.entries), default=Rung.NEVER_RAN)

    def below(self, required: Rung) -> tuple[LedgerEntry, ...]:
        """The places that are not as sure as that."""
        return tuple(entry for entry in self.entries if entry.rung < required)

    def with_put_back(self, entries: Iterable[LedgerEntry]) -> "Ledger":
        """The same, with the places that stay as they were, and how sure they had been."""
        back = (dataclasses.replace(each, put_back=True) for each in entries)
        found = sorted((*self.entries, *back), key=lambda each: (each.path, each.line))
        return dataclasses.replace(self, entries=tuple(found))

    def with_attempts(self, attempts: Sequence[tuple[str, "Ledger"]]) -> "Ledger":
        """The same, and what each attempt came to at a place.

        Args:
          attempts: in order, what each was, and what it found.
        """
        told: dict[tuple[str, int, str], dict[str, str]] = {}
        for how, ledger in attempts:
            worst: dict[tuple[str, int, str], LedgerEntry] = {}
            for each in sorted(ledger.entries, key=lambda each: each.rung):
                worst.setdefault(each.key, each)
            for key, each in worst.items():
                said = ": ".join([each.shown, *(*each.problems, *each.notes)[:1]])
                told.setdefault(key, {}).setdefault(said, f"{how}: {said}")
        found = []
        for each in self.entries:
            said = tuple(told.get(each.key, {}).values())
            found.append(dataclasses.replace(each, attempts=said if len(said) > 1 else ()))
        return dataclasses.replace(self, entries=tuple(found))

    def only(self, entries: Iterable[LedgerEntry]) -> "Ledger":
        """The same, of these places alone."""
        return dataclasses.replace(self, entries=tuple(entries))

    @property
    def headline(self) -> str:
        """One sentence, which says the worst."""
        calls = 0 if self.runs is None else self.runs.before.calls
        return ", ".join(_counts(self.entries, calls)) + "."

    def to_dict(self) -> dict[str, Any]:
        """For machines, in JSON's types."""
        return {
            "command": list(self.command),
            "headline": self.headline,
            "worst": str(self.worst),
            "places": [entry.to_dict() for entry in self.entries],
            "kept_apart": self.kept_apart,
            "exit_code": self.exit_code,
            "runs": None if self.runs is None else self.runs.to_dict(),
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _counts(entries: Sequence[LedgerEntry], calls_of_runs: int) -> Iterator[str]:
    groups: dict[Rung, list[LedgerEntry]] = {rung: [] for rung in Rung}
    for entry in entries:
        groups[entry.rung].append(entry)
    proved = len(groups[Rung.SAME_PROGRAM]) + len(groups[Rung.EQUAL_BY_RULES])
    yield f"{proved} of {len(entries)} {'place' if len(entries) == 1 else 'places'} proved"
    if replayed := groups[Rung.REPLAYED]:
        equal, calls = sum(e.equal for e in replayed), sum(e.calls for e in replayed)
        yield f"{len(replayed)} replayed {equal} of {calls} calls"
    if same := groups[Rung.SAME_IN_TWO_RUNS]:
        yield f"{len(same)} the same in two runs of {calls_of_runs} calls"
    for rung in (Rung.RAN, Rung.RAISED, Rung.NEVER_RAN):
        if groups[rung]:
            yield f"{len(groups[rung])} {rung}: {_where(groups[rung])}"
    if different := groups[Rung.DIFFERENT]:
        verb = "differs" if len(different) == 1 else "differ"
        yield f"{len(different)} {verb}: {_where(different)}"


def _where(entries: Sequence[LedgerEntry]) -> str:
    first = [entry.where for entry in entries[:3]]
    more = [f"and {len(entries) - 3} more"] if len(entries) > 3 else []
    return ", ".join([*first, *more])


def _lines(ledger: Ledger) -> Iterator[str]:
    yield ledger.headline[0].upper() + ledger.headline[1:]
    yield f"  command: {shlex.join(ledger.command)}"
    yield f"  how:     two runs, before and after, in {_APART[ledger.kept_apart]}"
    if ledger.entries:
        yield ""
        yield from _table(ledger.entries)
    for title, texts in (("Different:", ledger.problems), ("Also:", ledger.notes)):
        if texts:
            yield ""
            yield title
            yield from (f"  * {text}" for text in texts)
    if ledger.output:
        yield ""
        yield "The output ended with:"
        yield from (f"    {line}" for line in ledger.output.splitlines())


def _table(entries: Sequence[LedgerEntry]) -> Iterator[str]:
    rows = [("place", "what", "proof", "")]
    for each in entries:
        what = each.what.partition("\n")[0]
        what = what if len(what) <= _WIDTH else what[: _WIDTH - 3] + "..."
        rows.append((each.where, what, each.shown, "put back" if each.put_back else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, entry in zip(rows, (None, *entries), strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()
        if entry is not None:
            yield from (f"      different: {problem}" for problem in entry.problems)
            yield from (f"      {note}" for note in entry.notes)
            yield from (f"      {attempt}" for attempt in entry.attempts)
            if entry.put_back:
                yield f"      next: {entry.remedy}"


def _fields(record: Any, *left_out: str) -> dict[str, Any]:
    """Those of a dataclass, in JSON's types; an infinite number is None."""
    names = (each.name for each in dataclasses.fields(record) if each.name not in left_out)
    return {name: _plain(getattr(record, name)) for name in names}


def _plain(value: Any) -> Any:
    match value:
        case tuple():
            return [_plain(each) for each in value]
        case enum.Enum():
            return str(value)
        case float() if not math.isfinite(value):
            return None
        case Ending() | SiteComparison():
            return value.to_dict()
    return value
