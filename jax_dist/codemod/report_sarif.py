"""What a migration did and left, and how sure each place is, for code scanning: SARIF 2.1.0.

Each place is one result. Its rule is its rung, its kind says what that means: "pass" where old and
new are the same, "open" where nothing is known, "fail" where they differ. A place that was not
verified is for "review", one that was left is "informational".
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from jax_dist.checker.output import sarif
from jax_dist.codemod.report import MigrationReport
from jax_dist.codemod.results import PlaceResult

_RULES = {  # kind, and what it means
    "same program": ("pass", "Old and new are traced to one program."),
    "equal by rules": ("pass", "Old and new are traced to programs that named rules make equal."),
    "replayed": ("pass", "Old and new gave the same in all calls of one run."),
    "same in two runs": ("pass", "All calls gave the same in two runs, before and after."),
    "ran": ("open", "The new code ran; what it computes was not compared."),
    "never ran": ("open", "The command never reached this place."),
    "different": ("fail", "Old and new differ."),
    "done": ("review", "The code was migrated, and not verified."),
    "left": ("informational", "The code stays as it was."),
}
_NAMES = list(_RULES)


def as_sarif(report: MigrationReport) -> str:
    """The report as one run of SARIF; lines are those of the files before."""
    proof = report.verification
    run = {
        "tool": {"driver": {**sarif.tool(), "rules": [_rule(name) for name in _NAMES]}},
        "results": [*_results(report, proof)],
        "properties": {"to": report.to, "cautions": list(report.cautions)},
    }
    if proof is not None:
        run["invocations"] = [_invocation(proof)]
    return sarif.document(run)


def _rule(name: str) -> dict[str, Any]:
    return {
        "id": _id(name),
        "shortDescription": {"text": _RULES[name][1]},
        "defaultConfiguration": {"level": _level(name)},
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
    said += ["put back"] if entry["put_back"] else []
    text = f"{_first_line(entry['what'])}: {'; '.join([rung, *said])}."
    more = {name: entry[name] for name in ("calls", "equal", "rules", "put_back")}
    where = [_location(entry["path"], entry["line"])]
    return {**_result(rung, text, where), "properties": more}


def _of_place(place: PlaceResult) -> dict[str, Any]:
    if place.cell is None:
        where = _location(place.path, place.line)
        at = ""
    else:  # the lines of a cell are not those of the file
        where = _location(place.path)
        at = f"cell {place.cell}, line {place.line}: "
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


def _invocation(proof: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "commandLine": shlex.join(proof["command"]),
        "executionSuccessful": proof["exit_code"] == 0,
        "properties": {name: proof[name] for name in ("headline", "worst", "kept_apart", "notes")},
    }
    if proof["exit_code"] is not None:  # it was not stopped, being late
        made["exitCode"] = proof["exit_code"]
    return made


def _first_line(text: str) -> str:
    first, newline, _ = text.partition("\n")
    return f"{first.rstrip()} ..." if newline else first
