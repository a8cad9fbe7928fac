"""For code scanning: SARIF 2.1.0, with the pages of the rules and the fixes."""

import hashlib
import json
import os
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from jax_dist.checker.engine import fixer
from jax_dist.checker.model import semantic_model, sources
from jax_dist.checker.model.findings import Edit, Finding, Safety, apply_edits
from jax_dist.checker.model.sources import Source
from jax_dist.checker.output.markdown import page_markdown
from jax_dist.checker.output.report import (
    PlacedEdit,
    RenderContext,
    in_file,
    placed,
    sentence,
    slashed,
)
from jax_dist.checker.rules import Page

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def render(findings: Sequence[Finding], context: RenderContext) -> str:
    """One run; columns count characters."""
    codes = sorted({finding.code for finding in findings})
    prints = _fingerprints(findings)
    fixes = _fixes(findings, context)
    run = {
        "tool": {"driver": _driver(codes, context)},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(finding, codes.index(finding.code), mark, fix, context)
            for finding, mark, fix in zip(findings, prints, fixes, strict=True)
        ],
    }
    return document(run)


def _fingerprints(findings: Sequence[Finding]) -> list[str]:
    """One for each, unlike all others; they outlive a move of the line."""
    seen: dict[tuple[str, ...], int] = {}
    prints: list[str] = []
    for finding in findings:
        said = (slashed(finding.path), finding.code, finding.line_text.strip())
        seen[said] = seen.get(said, 0) + 1
        text = "\0".join((*said, str(seen[said])))
        prints.append(hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32])
    return prints


def document(run: Mapping[str, Any]) -> str:
    """The text of one run."""
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def tool() -> dict[str, str]:
    """What this is, and its version."""
    import jax_dist

    return {"name": "jax-dist", "version": jax_dist.__version__}


def _driver(codes: list[str], context: RenderContext) -> dict[str, Any]:
    return {**tool(), "rules": [_rule(code, context.pages.get(code), context) for code in codes]}


def _rule(code: str, page: Page | None, context: RenderContext) -> dict[str, Any]:
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


def _result(
    finding: Finding,
    index: int,
    mark: str,
    fix: dict[str, Any] | None,
    context: RenderContext,
) -> dict[str, Any]:
    place = {"artifactLocation": artifact(finding.path), "region": _region(finding, context)}
    result = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": context.severity(finding.code),
        "message": {"text": sentence(finding)},
        "locations": [{"physicalLocation": place}],
        "partialFingerprints": {"jaxDistFinding/v1": mark},
    }
    return {**result, "fixes": [fix]} if fix else result


def artifact(path: str) -> dict[str, str]:
    """Where a file is."""
    name = slashed(path)
    if os.path.isabs(name):
        return {"uri": pathlib.Path(name).as_uri()}
    return {"uri": urllib.parse.quote(name)}


def _region(finding: Finding, context: RenderContext) -> dict[str, int]:
    start, end = in_file(finding, context)
    region = {"startLine": start.line, "startColumn": start.column}
    return {**region, "endLine": end.line, "endColumn": end.column}


def _fixes(findings: Sequence[Finding], context: RenderContext) -> list[dict[str, Any] | None]:
    """One for each finding; None where there is none, or only a sketch."""
    in_files: dict[str, list[Finding]] = {}
    for finding in findings:
        in_files.setdefault(finding.path, []).append(finding)
    files = {path: _module(group, context) for path, group in in_files.items()}
    fixes: list[dict[str, Any] | None] = []
    for finding in findings:
        module = files[finding.path]
        made = fixer.repair(finding, in_files[finding.path], module) if module else []
        fixes.append(_fix(finding, made, module.source) if module and made else None)
    return fixes


def _module(findings: Sequence[Finding], context: RenderContext) -> semantic_model.Module | None:
    """None where nothing is fixed, and for a file that is not what was checked."""
    if not any(finding.fix for finding in findings):
        return None
    source = context.source(findings[0].path)
    try:
        return semantic_model.Module(source) if source else None
    except sources.ParseError:
        return None


def _fix(finding: Finding, made: Sequence[Edit], source: Source) -> dict[str, Any]:
    if finding.start.cell is not None:
        made, source = _in_json(made, source)
    replacements = [_replacement(edit) for edit in placed(made, source)]
    change = {"artifactLocation": artifact(finding.path), "replacements": replacements}
    title = finding.fix.title if finding.fix else ""
    unsafe = finding.fix is not None and finding.fix.safety is Safety.UNSAFE
    text = f"{title} (unsafe: please look at it)" if unsafe else title
    return {"description": {"text": text}, "artifactChanges": [change]}


def _in_json(made: Sequence[Edit], notebook: Source) -> tuple[list[Edit], Source]:
    """What edits of the cells do to the file that holds them."""
    file = notebook.written(notebook.code)
    new = notebook.written(apply_edits(notebook.code, made))
    return list(fixer.between(file, new)), Source(notebook.path, file, file)


def _replacement(edit: PlacedEdit) -> dict[str, Any]:
    region = {
        "startLine": edit.start.line,
        "startColumn": edit.start.column,
        "endLine": edit.end.line,
        "endColumn": edit.end.column,
    }
    return {"deletedRegion": region, "insertedContent": {"text": edit.text}}
