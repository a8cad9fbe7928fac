"""Suppression of findings by `# noqa` comments: of those that begin or end on the same line."""

import io
import re
import tokenize
from collections.abc import Sequence

from jax_dist.lint.model.findings import Finding
from jax_dist.lint.model.sources import Source

_NOQA = re.compile(r"#\s*noqa\b(?:\s*:\s*((?:(?:[a-z]+[0-9]+|jxd)\b[\s,]*)*))?", re.IGNORECASE)
_EVERY = "JXD"


def unsuppressed(source: Source, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no comment switches off."""
    codes = _codes_by_row(source)

    def is_on(finding: Finding) -> bool:
        first, end = finding.span
        rows = {source.row(first), source.row(max(first, end - 1))}
        return not any(finding.code.startswith(codes.get(row, ())) for row in rows)

    return [finding for finding in findings if is_on(finding)]


def _codes_by_row(source: Source) -> dict[int, tuple[str, ...]]:
    """Return, by row from 0, the beginnings of codes that are off there."""
    rows: dict[int, tuple[str, ...]] = {}
    # Lines as `Source` counts them; tokenize by itself does not end one at a lone "\r".
    text = re.sub(r"\r\n?", "\n", source.python.decode("utf-8", "replace"))
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="\n").readline):
            if token.type == tokenize.COMMENT:
                rows[token.start[0] - 1] = _codes_in(token.string)
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last: a NUL, on Python 3.13
        pass
    return rows


def _codes_in(comment: str) -> tuple[str, ...]:
    """Return what a comment switches off; no codes behind `noqa` mean every rule.

    >>> sorted(_codes_in("# noqa: E501, JXD306 it is meant")), sorted(_codes_in("# noqa"))
    (['E501', 'JXD306'], ['JXD'])
    """
    matches = _NOQA.finditer(comment)
    texts = ((match[1] or _EVERY).upper() for match in matches)
    return tuple({code for text in texts for code in re.findall(r"\w+", text)})
