"""For GitLab: a Code Quality report."""

import json
from collections.abc import Sequence
from typing import Any

from jax_dist.checker.findings import Finding
from jax_dist.checker.render.context import (
    Context,
    Severity,
    fingerprints,
    in_file,
    sentence,
    slashed,
)

_SEVERITIES: dict[Severity, str] = {"error": "major", "warning": "minor", "note": "info"}


def render(findings: Sequence[Finding], context: Context) -> str:
    """One array of issues, each with a fingerprint of its own."""
    prints = fingerprints(findings)
    pairs = zip(findings, prints, strict=True)
    return json.dumps([_issue(*pair, context) for pair in pairs], indent=2) + "\n"


def _issue(finding: Finding, fingerprint: str, context: Context) -> dict[str, Any]:
    start, end = in_file(finding, context)
    return {
        "check_name": finding.code,
        "description": f"{finding.code} {sentence(finding)}",
        "severity": _SEVERITIES[context.severity(finding.code)],
        "fingerprint": fingerprint,
        "location": {
            "path": slashed(finding.path),
            "positions": {
                "begin": {"line": start.line, "column": start.column},
                "end": {"line": end.line, "column": end.column},
            },
        },
    }
