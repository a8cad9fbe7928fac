"""The report of a migration: text, Markdown and JSON.

The JSON is one object:
  schema: 6; grows when a field changes its meaning, not when one is added
  to: the target
  summary: files (with places or problems), changed, done, left (places), problems
  files: [{path, changed, problem}]; a problem is why the file was left whole, or ""
  comments: [{path, line, text}]: lines with a comment on pmap, of the file after
  places: [{path, line, cell, code, status, form, what, reason, by_hand}]; line is of the file
    before (in a notebook: of the cell, counted from 1)
  verification: what the runs showed, or null; its `review` lists the lines that touch a changed
    value and did not run: [{path, line, text}]
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_dist._usage import counted
from jax_dist.migrate.places import FileMigration, Place, Target
from jax_dist.migrate.review import Line, comments_on_pmap
from jax_dist.migrate.verify.comparison import Verification

_SCHEMA = 6
_FILE_FIELDS = ("path", "changed", "problem")
_COUNTED = ("files", "changed", "done", "left", "problems")


@dataclasses.dataclass
class MigrationReport:
    """The places of one migration, and what its runs showed."""

    to: Target
    files: Sequence[FileMigration]
    verification: Verification | None = None

    def __post_init__(self):
        self.places = [place for file in self.files for place in file.places]
        self.done = [place for place in self.places if place.status == "done"]
        self.left = [place for place in self.places if place.status == "left"]
        self.changed = [file for file in self.files if file.changed]
        self.problems = [file for file in self.files if file.problem]
        rewritten = self.changed if self.to in ("shard_map", "jit") else []
        self.comments = [line for file in rewritten for line in comments_on_pmap(file)]
        to_review = () if self.verification is None else self.verification.review
        self.lines: dict[str, Sequence[Line]] = {  # to look at, by title
            "Review these lines: they read a changed value, and did not run": to_review,
            "These comments still speak of pmap": self.comments,
        }

    def count_places(self) -> str:
        """Return the numbers of places: "3 places done (2 jit, 1 shard_map), 0 left."."""
        forms = collections.Counter(place.form for place in self.done if place.form)
        texts = ", ".join(f"{count} {form}" for form, count in sorted(forms.items()))
        by_form = f" ({texts})" if forms.keys() - {self.to} else ""
        return f"{counted(len(self.done), 'place')} done{by_form}, {len(self.left)} left."

    def group_by_reason(self, places: Sequence[Place]) -> list[list[Place]]:
        """Return the places that have a reason, grouped by it, the most frequent first."""
        groups: dict[str, list[Place]] = {}
        for place in filter(lambda place: place.reason, places):
            groups.setdefault(place.reason, []).append(place)
        return sorted(groups.values(), key=lambda places: -len(places))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the JSON has it."""
        return {
            "schema": _SCHEMA,
            "to": self.to,
            "summary": {name: len(getattr(self, name)) for name in _COUNTED},
            "files": [{name: getattr(x, name) for name in _FILE_FIELDS} for x in self.files],
            "comments": [line._asdict() for line in self.comments],
            "places": [dataclasses.asdict(place) for place in self.places],
            "verification": self.verification and self.verification.to_dict(),
        }


def _format_text(report: MigrationReport) -> str:
    """Return the report with one line for each place, as compilers write errors."""
    lines = [f"{place.where}: {_outcome(place)}" for place in report.places]
    lines += [f"{file.path}: left whole: {file.problem}" for file in report.problems]
    if report.verification is not None:
        lines.append(str(report.verification))
    return "".join(f"{line}\n" for line in [*lines, *review_lines(report)])


def review_lines(report: MigrationReport) -> Iterator[str]:
    """Yield the lines to look at, as `  a.py:12: text`, below titles."""
    for title, lines in report.lines.items():
        if lines:
            yield title
            yield from (f"  {line.path}:{line.line}: {line.text}" for line in lines)


def _outcome(place: Place) -> str:
    """Return what a place became, or why it was left and what to do by hand."""
    what = _first_line(place.what)
    if place.status == "done":
        remark = f" ({place.reason})" if place.reason else ""
        return f"{what} -> {place.form}{remark}" if place.form else f"{what}: fixed"
    return f"{what} left: {place.reason}. {place.by_hand}".rstrip()


def _markdown_lines(report: MigrationReport) -> Iterator[str]:
    """Yield the report in sections: verification, review, left by reason, problems, done."""
    yield f"# Migration to {report.to}\n"
    yield f"{counted(len(report.changed), 'file')} changed, {report.count_places()}"
    if report.verification is not None:
        yield f"\n## Verification\n\n```text\n{report.verification}\n```"
    for title, lines in report.lines.items():
        if lines:
            yield f"\n## {title}\n"
            yield from (f"* `{line.path}:{line.line}` `{line.text}`" for line in lines)
    if report.left:
        yield "\n## Left"
        for places in report.group_by_reason(report.left):
            reason = places[0].reason
            yield f"\n### {reason[:1].upper()}{reason[1:]}\n"
            if places[0].by_hand:
                yield f"{places[0].by_hand}\n"
            yield from (f"* `{place.where}` `{_first_line(place.what)}`" for place in places)
    if report.problems:
        yield "\n## Files left whole\n"
        yield from (f"* `{file.path}`: {file.problem}" for file in report.problems)
    if report.done:
        yield "\n## Done\n"
        yield from (f"* `{place.where}` {_outcome(place)}" for place in report.done)


def _first_line(text: str) -> str:
    first, newline, _ = text.partition("\n")
    return f"{first.rstrip()} ..." if newline else first


FORMATS: dict[str, Callable[[MigrationReport], str]] = {  # by the suffix of the file
    ".json": lambda report: json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n",
    ".md": lambda report: "\n".join(_markdown_lines(report)) + "\n",
    ".txt": _format_text,
}
