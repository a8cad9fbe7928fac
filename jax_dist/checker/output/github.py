"""For GitHub Actions: workflow commands, which become annotations of the changed lines."""

from collections.abc import Sequence

from jax_dist.checker.model.findings import Finding
from jax_dist.checker.output.context import RenderContext, Severity, in_file, sentence, slashed

_LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def render(findings: Sequence[Finding], context: RenderContext) -> str:
    """One `::warning` line for each finding."""
    return "".join(f"{_command(finding, context)}\n" for finding in findings)


def _command(finding: Finding, context: RenderContext) -> str:
    start, end = in_file(finding, context)
    properties = {
        "title": f"jax-dist ({finding.code})",
        "file": slashed(finding.path),
        "line": str(start.line),
        "endLine": str(end.line),
    }
    if start.line == end.line:  # GitHub takes columns only within one line
        properties |= {"col": str(start.column), "endColumn": str(end.column)}
    said = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    level = _LEVELS[context.severity(finding.code)]
    return f"::{level} {said}::{_data(f'{finding.code} {sentence(finding)}')}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
