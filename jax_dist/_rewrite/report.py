"""What a rewriting did with a function, and what that changed: as data, as text, as a table.

Whether a fresh process finds a program in the persistent cache is judged by the program itself. The
key of the cache is a hash of the program's text, so whatever differs between two processes in that
text, differs in the key. Some of it shows in a single process: addresses of Python objects, in
operations or in names. Some does not: an order taken from a set, random names without a pattern.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

import jax

from jax_dist import _compat
from jax_dist._hlo import Collective, ProgramCost, Runs
from jax_dist._rewrite import rendering
from jax_dist._rewrite.pipeline import Outcome, PassFinding
from jax_dist._usage import counted, human_bytes

if TYPE_CHECKING:
    from jax_dist.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True)
class CacheVerdict:
    """Whether a fresh process would find this program in the persistent cache."""

    stable: bool  # as far as the program shows
    causes: tuple[str, ...] = ()  # why not, each with what to do

    @classmethod
    def of(cls, lowered: jax.stages.Lowered, captured: Sequence[str] = ()) -> "CacheVerdict":
        """Judges a lowered program.

        Args:
          lowered: what `jax.jit(fun).lower(*args)` returns.
          captured: the names of the arrays that are part of the program, to be told in the cause.
        """
        text = lowered.as_text()
        causes: list[str] = []
        if "@CustomSPMDPartitioning(" in text:
            causes.append(
                "A custom_partitioning operation holds the address of a Python object, another one "
                "in each process. Let rewrite route it through shard_map (partitioning='route')."
            )
        if not _compat.CACHES_HOST_CALLBACKS and _CALLBACK.search(text):
            causes.append(
                "It calls back into Python (debug.print, pure_callback, io_callback), and this "
                f"jax, {jax.__version__}, never writes such a program. Take the callback out, or "
                "use jax 0.12 or later."
            )
        for what, pattern in _NAMED.items():
            # The quoted names of a list, such as `"i"=4, "j"=2`; or the one name that was found.
            found = [re.findall(r'"([^"]*)"', each) or [each] for each in pattern.findall(text)]
            causes += [
                f"The name of {what}, {name!r}, looks made from an address, an id or a time, "
                "which differ in each process. Give it a fixed name."
                for name in dict.fromkeys(itertools.chain(*found))
                if _MADE_UP.search(name)
            ]
        if captured:
            causes.append(
                f"{', '.join(captured)} {'is' if len(captured) == 1 else 'are'} part of the "
                "program, so the key depends on the values: random ones differ in each process. "
                "Pass arrays as arguments, or let rewrite lift them (captures='lift')."
            )
        return cls(stable=not causes, causes=tuple(causes))


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedArray:
    """An array that the function takes from around it."""

    name: str  # as the user calls it: "W", "self.kernel"
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    captured_at: str  # "train.py:3", or "" if unknown
    used_at: str  # "" also if it is only returned
    action: str  # what became of it: "lifted", "kept"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Report(rendering.Printed):
    """What a rewriting did with a function. Printed, it fits a terminal of 80 columns."""

    name: str  # of the function
    before: ProgramCost
    after: ProgramCost
    cache_before: CacheVerdict
    cache_after: CacheVerdict
    findings: tuple[PassFinding, ...] = ()
    captured: tuple[CapturedArray, ...] = ()
    plan: "Plan | None" = None  # the strategies on a machine; None if not asked for

    @property
    def summary(self) -> str:
        """What was done, and the bytes moved between devices before and after."""
        outcomes = [finding.outcome for finding in self.findings]
        actions = [array.action for array in self.captured]
        done = [f"{outcomes.count(each)} {each}" for each in get_args(Outcome) if each in outcomes]
        done += [
            f"{counted(actions.count(each), 'array')} {each}" for each in dict.fromkeys(actions)
        ]
        before, after = self.before.moved_bytes, self.after.moved_bytes
        change = f"{human_bytes(before)} -> {human_bytes(after)} moved per step"
        if round(before) == round(after):
            moved = f"{human_bytes(after)} moved per step"
            change = moved if round(after) else "nothing moved between devices"
        return f"{', '.join(done) or 'nothing to rewrite'}; {change}"

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "summary": self.summary,
            "findings": rendering.plain(self.findings),
            "captured": rendering.plain(self.captured),
            "moved_bytes": {"before": self.before.moved_bytes, "after": self.after.moved_bytes},
            "before": rendering.plain(self.before),
            "after": rendering.plain(self.after),
            "cache_before": rendering.plain(self.cache_before),
            "cache_after": rendering.plain(self.cache_after),
            "plan": self.plan.to_dict() if self.plan else None,
        }

    @property
    def headline(self) -> str:
        return f"{self.name}: {self.summary}"

    def sections(self) -> Iterator[rendering.Section]:
        return _sections(self)


def _sections(report: Report) -> Iterator[rendering.Section]:
    """Where nothing was found, only what the user should still know."""
    found = bool(report.findings or report.captured)
    for outcome in get_args(Outcome):
        entries = tuple(
            rendering.ReportEntry(
                finding.code,
                finding.what,
                (
                    *([f"because {finding.why}"] if finding.why else []),
                    *([finding.where] if finding.where else []),
                ),
            )
            for finding in report.findings
            if finding.outcome == outcome
        )
        if entries:
            yield rendering.Section(outcome.capitalize(), entries)
    if report.captured:
        yield rendering.Section("Captured arrays", (_captured_table(report.captured),))
    if report.before.collectives or report.after.collectives:
        yield rendering.Section("Collectives, per step on one device", _collectives(report))
    if round(report.before.moved_bytes) != round(report.after.moved_bytes):
        amounts = (("before", report.before.moved_bytes), ("after", report.after.moved_bytes))
        bars = rendering.Bars(tuple((label, each, human_bytes(each)) for label, each in amounts))
        yield rendering.Section("Moved, per step from one device", (bars,))
    if found:
        yield rendering.Section("Program, on one device", (_program_table(report),))
    if found or not report.cache_after.stable:
        yield rendering.Section("Key in the persistent cache", _cache(report))
    if report.plan:
        yield rendering.Section("Plan", (_PlanText(report.plan),))


@dataclasses.dataclass(frozen=True, slots=True)
class _PlanText:
    plan: "Plan"

    def lines(self) -> Iterator[str]:
        return iter(self.plan.render(width=78).splitlines())


def _captured_table(arrays: tuple[CapturedArray, ...]) -> rendering.Table:
    notes = []
    for array in arrays:
        lines = (("captured at", array.captured_at), ("used at", array.used_at))
        notes.append(", ".join(f"{what} {line}" for what, line in lines if line))
    return rendering.Table(
        header=("name", "type", "now", "bytes"),
        rows=tuple(
            (
                array.name,
                f"{array.dtype}[{','.join(map(str, array.shape))}]",
                array.action,
                human_bytes(array.bytes),
            )
            for array in arrays
        ),
        numbers=1,
        notes=tuple(notes),
    )


def _collectives(report: Report) -> tuple[rendering.Part, ...]:
    before, after = report.before, report.after
    header = ("kind", "axes", "devices", "count", "result", "moved")
    rows = tuple(map(_cells, after.collectives))
    if before.collectives != after.collectives:
        header = ("", *header)
        rows = (
            *(("before", *_cells(each)) for each in before.collectives),
            *(("after", *row) for row in rows),
        )
    table = rendering.Table(header, rows, numbers=4)
    seen = {each.runs for each in (*before.collectives, *after.collectives)}
    notes = [
        rendering.ReportEntry(_MARKS[runs], note) for runs, note in _NOTES.items() if runs in seen
    ]
    return (table, *notes)


def _cells(each: Collective) -> tuple[str, ...]:
    return (
        each.kind,
        ", ".join(each.axes) or "none of the mesh",
        str(each.size),
        f"{each.count}{_MARKS[each.runs]}",
        human_bytes(each.result_bytes),
        human_bytes(each.count * each.moved_bytes),
    )


_MARKS: dict[Runs, str] = {"always": "", "in a branch": "*", "in a loop of unknown length": "?"}
_NOTES: dict[Runs, str] = {
    "in a branch": "in a branch that may not be taken; counted as if it is",
    "in a loop of unknown length": "in a loop of unknown length; counted once",
}


def _program_table(report: Report) -> rendering.Table:
    sizes = (
        ("StableHLO text", "stablehlo_bytes"),
        ("constants in it", "constants_bytes"),
        ("arguments", "argument_bytes"),
        ("results", "output_bytes"),
        ("peak of temporary memory", "temp_bytes"),
    )
    return rendering.Table(
        header=("", "before", "after"),
        rows=tuple(
            (what, *("unknown" if size is None else human_bytes(size) for size in known))
            for what, field in sizes
            for known in ((getattr(report.before, field), getattr(report.after, field)),)
        ),
        numbers=2,
    )


def _cache(report: Report) -> tuple[rendering.ReportEntry, ...]:
    verdicts = (("before", report.cache_before), ("after", report.cache_after))
    if report.cache_before == report.cache_after:
        verdicts = (("", report.cache_after),)
    return rendering.aligned(
        rendering.ReportEntry(
            label,
            "the same in every process, as far as the program shows"
            if verdict.stable
            else "another one in each process, or never written:",
            verdict.causes,
        )
        for label, verdict in verdicts
    )


_CALLBACK = re.compile(r"stablehlo\.custom_call @\w*python\w*callback\(")
_NAMED = {
    "the program": re.compile(r'^module @("[^"]*"|[^\s{]+)', re.MULTILINE),
    "an inner function": re.compile(r'func\.func (?:private )?@("[^"]*"|[^\s(]+)\('),
    "a mesh axis": re.compile(r"sdy\.mesh @\S+ = <\[([^\]]*)\]"),
    "a result": re.compile(r'jax\.result_info = "((?:[^"\\]|\\.)*)"'),
}
_MADE_UP = re.compile(
    r"0x[0-9a-f]{6,}"  # an address
    r"|\d{9,}"  # an id, or seconds since 1970
    r"|(?<![0-9a-z])[0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}",  # a UUID
    re.IGNORECASE,
)
