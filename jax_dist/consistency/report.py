"""What a check found: a verdict for each result, as data, as text, as a table in a notebook."""

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from jax_dist.consistency import relations
from jax_dist.consistency.relations import Expected, Relation
from jax_dist.consistency.words import Explanation
from jax_dist.rewriting import rendering
from jax_dist.rewriting.rendering import counted

_UNDECIDED = 0.5  # of the mean size: from such a tolerance on, a factor of 2 could hide


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One result on so many devices, compared with that of one."""

    name: str  # "result['loss']"
    devices: int
    same: bool
    words: str  # how it differs: "4 times too large"; "" where it is the same
    relation: Relation
    apart: float  # the largest distance
    tolerance: float
    undecided: bool = False


def verdict(
    name: str, values: np.ndarray, expected: Expected, out_axis: int | None, *, is_key: bool
) -> Verdict:
    """Judges `[devices, *shape]` by the value of one device.

    Args:
      name: of the result.
      values: what each device returns.
      expected: what one device returns.
      out_axis: along which dimension the shares of the devices make the whole; None: found out.
      is_key: whether it is a random key; devices may have their own.
    """
    devices = len(values)
    relation = relations.relation_of(values[:, None], expected)
    whole = expected.value[0]
    along = relations.rows_along(values.shape[1:], whole.shape, devices)
    if out_axis is not None and values[0].ndim:
        along = out_axis % values[0].ndim
    if along is None:
        merged, whole = values, np.broadcast_to(whole, (devices, *whole.shape))
        same = values.shape == whole.shape and relation.kind == "same"
    else:
        merged = relations.put_together(values, along)
        same = merged.shape == whole.shape
    apart, average = _distances(merged, whole)
    same = same and apart <= expected.tolerance and average <= expected.average
    if is_key and values[0].shape == expected.value[0].shape:
        same = True
    words = "" if same else _words(values, expected.value[0], along, relation)
    undecided = same and not is_key and bool(expected.unit) and _hides(expected)
    return Verdict(name, devices, same, words, relation, apart, expected.tolerance, undecided)


def _hides(expected: Expected) -> bool:
    size = float(np.abs(np.nan_to_num(expected.value)).mean()) if expected.value.size else 0.0
    return expected.average > _UNDECIDED * size > 0


def _words(values: np.ndarray, whole: np.ndarray, along: int | None, relation: Relation) -> str:
    devices, shape = len(values), values.shape[1:]
    if along is None and shape != whole.shape:
        return f"shape {list(shape)} on each device, {list(whole.shape)} on one"
    if along is not None and (shares := relations.put_together(values, along).shape) != whole.shape:
        return f"shape {list(shares)}, {list(whole.shape)} on one device"
    if along is None and relation.part is not None:
        return f"each device has its own; their {relation.part} is right"
    if relation.factor == devices:
        return f"{devices} times too large"
    if relation.factor == 1 / devices:
        return f"1/{devices} of what it should be"
    if relation.factor == devices**2:
        return f"{devices}\N{SUPERSCRIPT TWO} times too large"
    if relation.factor == 1 / devices**2:
        return f"1/{devices}\N{SUPERSCRIPT TWO} of what it should be"
    if along is None and not relation.alike:
        return "each device has its own"
    return "other values"


def _distances(values: np.ndarray, whole: np.ndarray) -> tuple[float, float]:
    """The largest and the mean one."""
    if values.shape != whole.shape:
        return float("inf"), float("inf")
    apart = relations.distance(values, whole)
    return float(apart.max(initial=0.0)), float(apart.mean()) if apart.size else 0.0


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
