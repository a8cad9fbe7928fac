"""What a check found: as data, as text, as a table in a notebook."""

import dataclasses
from collections.abc import Iterator, Mapping

from jax_dist.consistency.verdicts import Verdict
from jax_dist.consistency.words import Explanation
from jax_dist.rewriting import rendering
from jax_dist.rewriting.rendering import counted


@dataclasses.dataclass(frozen=True, slots=True)
class Consistency:
    """Whether a function computes the same on any number of devices."""

    name: str  # of the function
    devices: tuple[int, ...]  # on which it was compared with one
    skipped: Mapping[int, str]  # on which not, and why
    verdicts: tuple[Verdict, ...]  # of each result, on each number of devices
    findings: tuple[Explanation, ...]
    notes: tuple[str, ...] = ()  # what the check could not see

    @property
    def ok(self) -> bool:
        """Whether all results were compared, and none differs by more than rounding explains."""
        return not self.findings and all(each.same and not each.undecided for each in self.verdicts)

    @property
    def summary(self) -> str:
        on = f"on {_listed(self.devices)} devices"
        wrong = {each.name for each in self.verdicts if not each.same}
        names = {each.name for each in self.verdicts}
        unsure = {each.name for each in self.verdicts if each.undecided}
        if wrong:
            of = f"{len(wrong)} of {counted(len(names), 'result')}"
            return f"it depends on the number of devices: {of} differ"
        if self.findings:
            return "results that all devices should share differ"
        if unsure:
            return f"{len(unsure)} of {counted(len(names), 'result')} undecided {on}: see below"
        return f"the same {on} as on one, {counted(len(names), 'result')} compared"

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "ok": self.ok,
            "summary": self.summary,
            "devices": list(self.devices),
            "skipped": {str(count): why for count, why in self.skipped.items()},
            "findings": rendering.plain(self.findings),
            "results": [
                {
                    "name": each.name,
                    "devices": each.devices,
                    "same": each.same,
                    "undecided": each.undecided,
                    "words": each.words,
                    "apart": each.apart,
                    "tolerance": each.tolerance,
                }
                for each in self.verdicts
            ],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        return rendering.as_text(f"{self.name}: {self.summary}", _sections(self))

    def _repr_html_(self) -> str:
        return rendering.as_html(f"{self.name}: {self.summary}", _sections(self))


def _sections(report: Consistency) -> Iterator[rendering.Section]:
    if report.findings:
        yield rendering.Section("Found", tuple(map(_entry, report.findings)))
    told = [each for each in report.verdicts if not each.same or each.undecided]
    if told:
        rows = tuple(
            (each.name, str(each.devices), each.words or "undecided", _number(each.apart),
             _number(each.tolerance))
            for each in told
        )  # fmt: skip
        header = ("result", "devices", "compared with one device", "apart", "rounding")
        yield rendering.Section("Results", (rendering.Table(header, rows, numbers=2),))
    notes = [
        *(f"{count} devices left out: {why}" for count, why in report.skipped.items()),
        *report.notes,
    ]
    if any(each.undecided for each in report.verdicts):
        notes.append(
            "undecided: rounding alone changes the result so much that a wrong scale could hide; "
            "check with fewer steps, or with larger numbers"
        )
    if notes:
        yield rendering.Section("Noted", tuple(rendering.ReportEntry("", note) for note in notes))


def _entry(finding: Explanation) -> rendering.ReportEntry:
    details = [f"because {finding.why}", f"do: {finding.do}"]
    if finding.results:
        details.append(f"seen in {', '.join(finding.results)}")
    label = f"{finding.where or 'line unknown'}"
    text = finding.what + (f" ({finding.code})" if finding.code else "")
    return rendering.ReportEntry("", f"{label}: {text}", tuple(details))


def _listed(counts: tuple[int, ...]) -> str:
    return " and ".join(
        part for part in (", ".join(map(str, counts[:-1])), str(counts[-1])) if part
    )


def _number(value: float) -> str:
    return f"{value:.2g}"
