"""For code scanning: SARIF 2.1.0, with the pages of the rules and the fixes."""

import json
import os
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

from jax_dist.checker.findings import Finding, Fix, Safety
from jax_dist.checker.page import Page
from jax_dist.checker.render.context import (
    Context,
    fingerprints,
    in_file,
    placed,
    sentence,
    slashed,
)
from jax_dist.checker.render.markdown import page_markdown

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def render(findings: Sequence[Finding], context: Context) -> str:
    """One run; columns count characters."""
    codes = sorted({finding.code for finding in findings})
    prints = fingerprints(findings)
    run = {
        "tool": {"driver": _driver(codes, context)},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(finding, codes.index(finding.code), mark, context)
            for finding, mark in zip(findings, prints, strict=True)
        ],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2) + "\n"


def _driver(codes: list[str], context: Context) -> dict[str, Any]:
    import jax_dist

    return {
        "name": "jax-dist",
        "version": jax_dist.__version__,
        "rules": [_rule(code, context.pages.get(code), context) for code in codes],
    }


def _rule(code: str, page: Page | None, context: Context) -> dict[str, Any]:
    if page is None:
        return {"id": code}
    rule = {
        "id": code,
        "name": "".join(word.capitalize() for word in page.name.split("-")),
        "shortDescription": {"text": page.what},
        "fullDescription": {"text": page.why},
        "help": {"text": str(page), "markdown": page_markdown(page)},
        "defaultConfiguration": {"enabled": page.default, "level": context.severity(code)},
        "properties": {"tags": ["jax"], "problem.severity": _problem(context.severity(code))},
    }
    link = context.link(code)
    return {**rule, "helpUri": link} if link else rule


def _problem(level: str) -> str:
    """GitHub's word for it."""
    return "recommendation" if level == "note" else level


def _result(finding: Finding, index: int, mark: str, context: Context) -> dict[str, Any]:
    place = {"artifactLocation": _artifact(finding.path), "region": _region(finding, context)}
    result = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": context.severity(finding.code),
        "message": {"text": sentence(finding)},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"jaxDistFinding/v1": mark},
    }
    fix = _fix(finding, finding.fix, context) if finding.fix else None
    return {**result, "fixes": [fix]} if fix else result


def _artifact(path: str) -> dict[str, str]:
    name = slashed(path)
    if os.path.isabs(name):
        return {"uri": pathlib.Path(name).as_uri()}
    return {"uri": urllib.parse.quote(name)}


def _region(finding: Finding, context: Context) -> dict[str, int]:
    start, end = in_file(finding, context)
    region = {"startLine": start.line, "startColumn": start.column}
    return {**region, "endLine": end.line, "endColumn": end.column}


def _fix(finding: Finding, fix: Fix, context: Context) -> dict[str, Any] | None:
    """None for what cannot be applied as it stands: sketches, parts of a group, and notebooks."""
    whole = not (fix.imports or fix.definitions or fix.group)
    if fix.safety is Safety.DISPLAY or not whole or finding.start.cell is not None:
        return None
    edits = placed(fix.edits, context.source(finding.path))
    replacements = [
        {
            "deletedRegion": {
                "startLine": edit.start.line,
                "startColumn": edit.start.column,
                "endLine": edit.end.line,
                "endColumn": edit.end.column,
            },
            "insertedContent": {"text": edit.text},
        }
        for edit in edits
    ]
    if not replacements:
        return None
    change = {"artifactLocation": _artifact(finding.path), "replacements": replacements}
    unsafe = "" if fix.safety is Safety.SAFE else " (unsafe: please look at it)"
    return {"description": {"text": fix.title + unsafe}, "artifactChanges": [change]}
