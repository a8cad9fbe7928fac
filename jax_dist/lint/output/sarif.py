"""For code scanning: SARIF 2.1.0, with the pages of the rules."""

import hashlib
import json
import os
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jax_dist
from jax_dist.lint.model.findings import Finding, Position
from jax_dist.lint.output.context import RenderContext, slashed
from jax_dist.lint.output.markdown import page_markdown
from jax_dist.lint.rules import Page

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def render(findings: Sequence[Finding], context: RenderContext) -> str:
    """One run; columns count characters."""
    codes = sorted({finding.code for finding in findings})
    seen: dict[tuple[str, ...], int] = {}
    results: list[dict[str, Any]] = []
    for finding in findings:
        # A mark unlike all others, which outlives a move of the line.
        said = (slashed(finding.path), finding.code, finding.line_text.strip())
        seen[said] = seen.get(said, 0) + 1
        text = "\0".join((*said, str(seen[said])))
        mark = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]
        start, end = finding.in_file
        place = {"artifactLocation": artifact(finding.path), "region": _region(start, end)}
        results.append(
            {
                "ruleId": finding.code,
                "ruleIndex": codes.index(finding.code),
                "level": context.severity(finding.code),
                "message": {"text": finding.message_with_cell},
                "locations": [{"physicalLocation": place}],
                "partialFingerprints": {"jaxDistFinding/v1": mark},
            }
        )
    rules = [_rule(code, context.pages.get(code), context) for code in codes]
    return document(rules, {"columnKind": "unicodeCodePoints", "results": results})


def document(rules: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The text of one run of this tool, which knows these rules."""
    driver = {"name": "jax-dist", "version": jax_dist.__version__, "rules": rules}
    runs = [{"tool": {"driver": driver}, **run}]
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}, indent=2) + "\n"


def _rule(code: str, page: Page | None, context: RenderContext) -> dict[str, Any]:
    if page is None:
        return {"id": code}
    level = context.severity(code)
    problem = "recommendation" if level == "note" else level  # GitHub's word for it
    rule = {
        "id": code,
        "name": "".join(word.capitalize() for word in page.name.split("-")),
        "shortDescription": {"text": page.what},
        "fullDescription": {"text": page.why},
        "help": {"text": str(page), "markdown": page_markdown(page)},
        "defaultConfiguration": {"enabled": page.default, "level": level},
        "properties": {"tags": ["jax"], "problem.severity": problem},
    }
    link = context.link(code)
    return {**rule, "helpUri": link} if link else rule


def artifact(path: str) -> dict[str, str]:
    """Where a file is."""
    name = slashed(path)
    if os.path.isabs(name):
        return {"uri": pathlib.Path(name).as_uri()}
    return {"uri": urllib.parse.quote(name)}


def _region(start: Position, end: Position) -> dict[str, int]:
    region = {"startLine": start.line, "startColumn": start.column}
    return {**region, "endLine": end.line, "endColumn": end.column}
