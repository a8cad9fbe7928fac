"""What a migration did and left, for people (Markdown) and for machines (JSON, SARIF).

The JSON is one object:
  schema: 3; grows when a field changes its meaning, not when one is added
  to: "jax_dist", "jax" or "global"
  summary: files (with places or problems), changed, done, left (places), problems
  rules: [{code, name, done, left}]
  reasons: [{reason, by_hand, sketch, places}], the most frequent first
  files: [{path, changed, problem}]; a problem is why the file was left whole, or ""
  places: [{path, line, cell, code, name, status, what, reason, detail, by_hand, sketch}], in order
    of file and place; status is "done" or "left"; line is of the file as it was (in a notebook: of
    the cell, which is counted from 1); sketch is Python, or ""
  helpers: [{path, functions, is_new}] of the modules that the files import helpers from
  cautions: what a reader has to know of what was done
  verification: what --verify found, or null

In SARIF 2.1.0, for code scanning, each place is one result. Its rule says how sure it is, and its
kind what that means: "pass" where old and new are the same, "open" where nothing is known, "fail"
where they differ. A place that was not verified is for "review", one that was left is
"informational".
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist._usage import counted
from jax_dist.lint.engine import config, linter
from jax_dist.lint.model.findings import Code
from jax_dist.lint.output import sarif
from jax_dist.migrate.migration import MigrationOptions, Target
from jax_dist.migrate.results import AXIS_STAYS, FileMigration, PlaceResult, ProjectContext

_SCHEMA = 3
_RULES = {  # kind, and what it means
    "same program": ("pass", "Old and new are traced to one program."),
    "equal by rules": ("pass", "Old and new are traced to programs that named rules make equal."),
    "replayed": ("pass", "Old and new gave the same in all calls of one run."),
    "same in two runs": ("pass", "All calls gave the same in two runs, before and after."),
    "ran": ("open", "The new code ran; what it computes was not compared."),
    "never ran": ("open", "The command never reached this place."),
    "raised": ("open", "Old and new raised an error in all calls, which shows nothing."),
    "different": ("fail", "Old and new differ."),
    "done": ("review", "The code was migrated, and not verified."),
    "left": ("informational", "The code stays as it was."),
}
_NAMES = list(_RULES)


@dataclasses.dataclass(frozen=True)
class MigrationReport:
    """All that one migration did."""

    to: Target
    files: Sequence[FileMigration]
    verification: Mapping[str, Any] | None = None  # as `Verification.to_dict` gives it
    proof: str = ""  # the same, for people
    cautions: tuple[str, ...] = ()  # what a reader has to know of what was done

    @property
    def outcomes(self) -> list[PlaceResult]:
        """The places of each file, from its top to its end."""
        place = lambda outcome: (outcome.cell or 0, outcome.line)
        return [outcome for file in self.files for outcome in sorted(file.outcomes, key=place)]

    @property
    def done(self) -> list[PlaceResult]:
        return [outcome for outcome in self.outcomes if outcome.status == "done"]

    @property
    def left(self) -> list[PlaceResult]:
        return [outcome for outcome in self.outcomes if outcome.status == "left"]

    @property
    def changed(self) -> list[FileMigration]:
        return [file for file in self.files if file.changed]

    @property
    def problems(self) -> list[FileMigration]:
        return [file for file in self.files if file.problem]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "to": self.to,
            "summary": {
                "files": len(self.files),
                "changed": len(self.changed),
                "done": len(self.done),
                "left": len(self.left),
                "problems": len(self.problems),
            },
            "rules": [
                {"code": code, "name": _name(code), "done": done, "left": left}
                for code, done, left in self.by_rule()
            ],
            "reasons": [
                {
                    "reason": places[0].reason,
                    "by_hand": places[0].remedy,
                    "sketch": places[0].sketch,
                    "places": len(places),
                }
                for places in self.by_reason()
            ],
            "files": [
                {"path": file.path, "changed": file.changed, "problem": file.problem}
                for file in self.files
            ],
            "places": [_place(outcome) for outcome in self.outcomes],
            "helpers": self.helpers(),
            "cautions": list(self.cautions),
            "verification": self.verification,
        }

    def helpers(self) -> list[dict[str, Any]]:
        """The modules that the files import helpers from."""
        names: dict[str, set[str]] = {}
        for file in self.files:
            if file.helpers is not None:
                shown = os.path.relpath(file.helpers.path)
                names.setdefault(shown, set()).update(file.helpers.functions)
        new = {file.path for file in self.files if file.is_new}
        return [
            {"path": path, "functions": sorted(each), "is_new": path in new}
            for path, each in sorted(names.items())
        ]

    def by_rule(self) -> list[tuple[Code, int, int]]:
        """`(code, places done, places left)` of each rule that had a place."""
        done = Counter(outcome.code for outcome in self.done)
        left = Counter(outcome.code for outcome in self.left)
        return [(code, done[code], left[code]) for code in sorted({*done, *left})]

    def by_reason(self) -> list[list[PlaceResult]]:
        """The places that were left, those with the same reason together, most frequent first."""
        groups: dict[str, list[PlaceResult]] = {}
        for outcome in self.left:
            groups.setdefault(outcome.reason, []).append(outcome)
        return sorted(groups.values(), key=lambda places: -len(places))

    def with_axis(self) -> list[tuple[str, int, str]]:
        """Why device axes stay, with the first place and the number of others."""
        groups: dict[str, list[PlaceResult]] = {}
        for outcome in self.done:
            _, stays, why = outcome.reason.partition(f"{AXIS_STAYS}: ")
            if stays:
                groups.setdefault(why, []).append(outcome)
        return [(places[0].where, len(places) - 1, why) for why, places in groups.items()]


def _as_json(report: MigrationReport) -> str:
    """The report as one JSON object; the module's docstring says what is in it."""
    return json.dumps(report.to_dict(), indent=2, ensure_ascii=False) + "\n"


def _as_markdown(report: MigrationReport) -> str:
    """The report as a page."""
    return "\n".join(_lines(report)) + "\n"


def _place(outcome: PlaceResult) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "line": outcome.line,
        "cell": outcome.cell,
        "code": outcome.code,
        "name": _name(outcome.code),
        "status": outcome.status,
        "what": outcome.what,
        "reason": outcome.reason,
        "detail": outcome.detail,
        "by_hand": outcome.remedy,
        "sketch": outcome.sketch,
    }


def _name(code: Code) -> str:
    page = linter.PAGES.get(code)
    return page.name if page is not None else ""


def _lines(report: MigrationReport) -> Iterator[str]:
    yield f"# Migration to {report.to}\n"
    yield (
        f"{counted(len(report.changed), 'file')} changed, "
        f"{counted(len(report.done), 'place')} done, {len(report.left)} left."
    )
    for caution in report.cautions:
        yield f"\n{caution}"
    if report.outcomes:
        yield "\n| rule | done | left |"
        yield "|---|---:|---:|"
        for code, done, left in report.by_rule():
            yield f"| {code} {_name(code)} | {done} | {left} |"
    if report.helpers():
        yield _heading("Helper modules")
        for each in report.helpers():
            functions = ", ".join(f"`{name}`" for name in each["functions"])
            yield f"* `{each['path']}`{' (new)' if each['is_new'] else ''}: {functions}"
    if report.problems:
        yield _heading("Files left whole")
        for file in report.problems:
            yield f"* `{file.path}`: {file.problem}"
    if report.left:
        yield from _left(report)
    if report.done:
        yield _heading("Done")
        yield "| place | rule | what | |"
        yield "|---|---|---|---|"
        for place in report.done:
            what, reason = _in_table(_first_line(place.what)), _in_table(place.reason)
            yield f"| `{place.where}` | {place.code} | `{what}` | {reason} |"
    if report.proof:
        yield _heading("Verification")
        yield f"```text\n{report.proof}\n```"


def _left(report: MigrationReport) -> Iterator[str]:
    yield _heading("Left, and why")
    groups = report.by_reason()
    yield "| places | reason |"
    yield "|---:|---|"
    for places in groups:
        yield f"| {len(places)} | {_in_table(places[0].reason)} |"
    for places in groups:
        reason = places[0].reason
        yield _heading(reason[:1].upper() + reason[1:], "###")
        # Where what to do differs from place to place, once each.
        for remedy, sketch in dict.fromkeys((place.remedy, place.sketch) for place in places):
            if remedy:
                yield f"What to do: {remedy}\n"
            if sketch:
                yield f"```python\n{sketch}\n```\n"
        for place in places:
            detail = f" ({place.detail})" if place.detail else ""
            yield f"* `{place.where}` `{_first_line(place.what)}`{detail}"


def _in_table(text: str) -> str:
    return text.replace("|", "\\|")


def _heading(text: str, level: str = "##") -> str:
    return f"\n{level} {text}\n"


def _as_sarif(report: MigrationReport) -> str:
    """The report as one run of SARIF; lines are those of the files before."""
    proof = report.verification
    rules = [
        {
            "id": _id(name),
            "shortDescription": {"text": meaning},
            "defaultConfiguration": {"level": _level(name)},
        }
        for name, (_, meaning) in _RULES.items()
    ]
    run: dict[str, Any] = {
        "results": [*_results(report, proof)],
        "properties": {"to": report.to, "cautions": list(report.cautions)},
    }
    if proof is not None:
        said = {name: proof[name] for name in ("headline", "worst", "kept_apart", "notes")}
        invocation: dict[str, Any] = {
            "commandLine": shlex.join(proof["command"]),
            "executionSuccessful": proof["exit_code"] == 0,
            "properties": said,
        }
        if proof["exit_code"] is not None:  # it was not stopped, being late
            invocation["exitCode"] = proof["exit_code"]
        run["invocations"] = [invocation]
    return sarif.document(rules, run)


FORMS: dict[str, Callable[[MigrationReport], str]] = {  # by the suffix of the file
    ".json": _as_json,
    ".md": _as_markdown,
    ".sarif": _as_sarif,
}


def _id(name: str) -> str:
    return f"migration/{name.replace(' ', '-')}"


def _level(name: str) -> str:
    """Only what fails has one."""
    return "error" if _RULES[name][0] == "fail" else "none"


def _results(report: MigrationReport, proof: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    judged = set()
    for entry in () if proof is None else proof["places"]:
        judged.add((entry["path"], entry["line"], entry["what"]))
        yield _of_entry(entry)
    for problem in () if proof is None else proof["problems"]:
        yield _result("different", f"All places together: {problem}.", [])
    for place in report.outcomes:
        if (place.path, place.line, place.what) not in judged:
            yield _of_place(place)


def _of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    rung = entry["rung"]
    said = [f"{entry['equal']} of {entry['calls']} calls"] if rung == "replayed" else []
    said += [*entry["rules"], *entry["problems"], *entry["notes"]]
    said += entry["attempts"]
    said += ["put back"] if entry["put_back"] else []
    text = f"{_first_line(entry['what'])}: {'; '.join([rung, *said])}. {entry['next']}".rstrip()
    more = {name: entry[name] for name in ("calls", "equal", "rules", "put_back")}
    where = [_location(entry["path"], entry["line"])]
    return {**_result(rung, text, where), "properties": more}


def _of_place(place: PlaceResult) -> dict[str, Any]:
    if place.cell is None:
        where, at = _location(place.path, place.line), ""
    else:  # the lines of a cell are not those of the file
        where, at = _location(place.path), f"cell {place.cell}, line {place.line}: "
    said = [place.reason, *([place.detail] if place.detail else [])]
    text = f"{at}{_first_line(place.what)}: {'; '.join([place.status, *said])}."
    more = {"rule": place.code, "remedy": place.remedy, "sketch": place.sketch}
    return {**_result(place.status, text, [where]), "properties": more}


def _result(name: str, text: str, locations: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ruleId": _id(name),
        "ruleIndex": _NAMES.index(name),
        "kind": _RULES[name][0],
        "level": _level(name),
        "message": {"text": text},
        "locations": locations,
    }


def _location(path: str, line: int | None = None) -> dict[str, Any]:
    region = {} if line is None else {"region": {"startLine": line}}
    return {"physicalLocation": {"artifactLocation": sarif.artifact(path), **region}}


def _first_line(text: str) -> str:
    first, newline, _ = text.partition("\n")
    return f"{first.rstrip()} ..." if newline else first


# --- cautions

_REPLICATE = re.compile(
    rb"\bjax_utils\.replicate\b|\bfrom flax\.jax_utils import[^\n]*\breplicate\b"
)
_FAKE = re.compile(rb"\bfake_pmap|(?:patch|setattr|object)\([^)]*[\"']jax\.pmap[\"']|jax\.pmap = ")

_PMAP = _codes.PMAP_CALL
_NEEDS = (0, 8)
_FLAX = (0, 12, 7)
_BUILD_FILES = ("BUILD", "BUILD.bazel")


def cautions_of(
    files: Sequence[FileMigration], context: ProjectContext, options: MigrationOptions
) -> Iterator[str]:
    """The cautions of one migration, a sentence each."""
    places = [outcome for file in files for outcome in file.outcomes if outcome.status == "done"]
    if options.to == "global" or not any(outcome.code == _PMAP for outcome in places):
        return
    changed = [file.path for file in files if file.changed and not file.is_new]
    replicate = context.first(_REPLICATE, changed)
    if replicate and not _flax_is_new_enough():
        yield (
            f"{replicate} uses flax.jax_utils.replicate, which stays: with jax 0.10 and newer it "
            "needs flax 0.12.7 or newer."
        )
    if options.to != "jax":
        return
    fake = context.first(_FAKE, changed)
    if fake:
        yield (
            f"{fake} has jax.pmap replaced while it runs: mapped is not replaced there. In tests, "
            "give it as many devices as slices."
        )
    question = context.question_of_type
    if question:
        yield (
            f"{question} knows functions of jax.pmap by their type, PmapFunction: those of mapped "
            "are of another, so what asks there is told that they are not mapped."
        )
    sign = next(filter(None, map(context.sign, changed)), "")
    if sign and not options.promises.one_process:
        yield (
            f"The program may run in several processes ({sign}). There, mapped keeps the "
            "view of jax.pmap; inside jit, grad or vmap it raises an error, where jax.pmap "
            "silently uses the devices of one process only. If it never does, --one-process "
            "writes plainer code."
        )
    asked = [each for each in map(config.lower_bound, context.graph.roots) if each is not None]
    if asked and min(asked) < _NEEDS:
        oldest = ".".join(map(str, min(asked)))
        yield f"What was written needs jax 0.8 or newer; the project asks for {oldest} or newer."
    for file in files:
        for name in _BUILD_FILES if file.is_new else ():
            build = os.path.join(os.path.dirname(file.path), name)
            if os.path.isfile(build):
                yield f"Add {os.path.basename(file.path)} to the sources in {build}."


def _flax_is_new_enough() -> bool:
    """Whether the flax that is installed here replicates with any jax."""
    try:
        numbers = importlib.metadata.version("flax").split(".")[:3]
        return tuple(map(int, numbers)) >= _FLAX
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
