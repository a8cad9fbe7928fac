"""For programs: a list with everything that is known of each finding."""

import json
from collections.abc import Sequence
from typing import Any

from jax_dist.checker.model.findings import Finding, Fix, Position
from jax_dist.checker.output.context import RenderContext, placed


def render(findings: Sequence[Finding], context: RenderContext) -> str:
    """One array; lines, columns and cells count from 1, bytes from 0."""
    return json.dumps([_entry(finding, context) for finding in findings], indent=2) + "\n"


def _entry(finding: Finding, context: RenderContext) -> dict[str, Any]:
    return {
        "path": finding.path,
        "code": finding.code,
        "name": finding.name,
        "message": finding.message,
        "severity": context.severity(finding.code),
        "start": _position(finding.start),
        "end": _position(finding.end),
        "bytes": list(finding.span),
        "line": finding.line_text,
        "url": context.link(finding.code),
        "fix": _fix(finding.fix, finding.path, context) if finding.fix else None,
    }


def _position(position: Position) -> dict[str, int]:
    entry = {"line": position.line, "column": position.column}
    return entry if position.cell is None else {"cell": position.cell, **entry}


def _fix(fix: Fix, path: str, context: RenderContext) -> dict[str, Any]:
    places = placed(fix.edits, context.source(path)) or [None] * len(fix.edits)
    edits = [
        {
            "bytes": [edit.start, edit.end],
            **({"start": _position(place.start), "end": _position(place.end)} if place else {}),
            "text": edit.text,
        }
        for edit, place in zip(fix.edits, places, strict=True)
    ]
    return {
        "title": fix.title,
        "safety": str(fix.safety),
        "group": fix.group or None,
        "edits": edits,
        "imports": list(fix.imports),
    }
