"""Suppression of findings by `# noqa` comments on their first or last line."""

import re
from collections.abc import Sequence

from jax_dist.lint.findings import Finding
from jax_dist.lint.model.sources import Source

_NOQA = re.compile(rb"#\s*noqa\b(?:\s*:\s*((?:(?:[a-z]+[0-9]+|jxd)\b[\s,]*)*))?", re.IGNORECASE)
_REST_OF_LINE = re.compile(rb"[^\r\n]*")


def drop_suppressed(source: Source, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no `# noqa` on their first or last line switches off."""

    def is_on(finding: Finding) -> bool:
        line_ends = (_REST_OF_LINE.match(source.code, offset) for offset in finding.span)
        codes = {code for text in line_ends if text for code in codes_in(text[0])}
        return not finding.code.startswith(tuple(codes))

    return [finding for finding in findings if is_on(finding)]


def codes_in(line: bytes) -> set[str]:
    """Return the codes that the `# noqa` comments of a line switch off; "JXD" stands for all.

    >>> sorted(codes_in(b"f(x)  # noqa: E501, JXD306 it is meant")), codes_in(b"f(x)  # noqa")
    (['E501', 'JXD306'], {'JXD'})
    """
    lists = (match[1] or b"JXD" for match in _NOQA.finditer(line))
    return {code.decode().upper() for text in lists for code in re.findall(rb"\w+", text)}
