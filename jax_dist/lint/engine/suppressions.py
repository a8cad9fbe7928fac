"""Suppression of findings by `# noqa` comments.

A comment counts for the findings that begin or end on its line; on the first or last line of a
statement, for all of it.
"""

import io
import re
import tokenize
from collections.abc import Iterator, Sequence

from jax_dist.lint.model.findings import Finding
from jax_dist.lint.model.sources import Source

_NOQA = re.compile(r"#\s*noqa\b(?:\s*:\s*((?:(?:[a-z]+[0-9]+|jxd)\b[\s,]*)*))?", re.IGNORECASE)
_SILENT = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})
_EVERY = "JXD"


def unsuppressed(source: Source, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no comment switches off."""
    prefixes = _prefixes(source)

    def is_on(finding: Finding) -> bool:
        first, end = finding.span
        rows = {source.row(first), source.row(max(first, end - 1))}
        return not any(
            finding.code.startswith(prefix) for row in rows for prefix in prefixes.get(row, ())
        )

    return [finding for finding in findings if is_on(finding)]


def _prefixes(source: Source) -> dict[int, frozenset[str]]:
    """Return, by row from 0, the beginnings of codes that are off there."""
    rows: dict[int, frozenset[str]] = {}
    comments: dict[int, frozenset[str]] = {}  # of the logical line that is being read
    first: int | None = None
    for token in _tokens(source):
        row = token.start[0] - 1
        if token.type == tokenize.COMMENT:
            comments[row] = _codes_in(token.string)
        elif token.type == tokenize.NEWLINE and first is not None:
            whole = comments.get(first, frozenset()) | comments.get(row, frozenset())
            for each in range(first, row + 1) if whole else comments:
                rows[each] = whole | comments.get(each, frozenset())
            comments, first = {}, None
        elif token.type not in _SILENT and first is None:
            comments, first = {}, row
    return rows


def _codes_in(comment: str) -> frozenset[str]:
    """Return what a comment switches off; no codes behind `noqa` mean every rule.

    >>> sorted(_codes_in("# noqa: E501, JXD306 it is meant")), sorted(_codes_in("# noqa"))
    (['E501', 'JXD306'], ['JXD'])
    """
    matches = _NOQA.finditer(comment)
    texts = ((match[1] or _EVERY).upper() for match in matches)
    return frozenset(code for text in texts for code in re.findall(r"\w+", text))


def _tokens(source: Source) -> Iterator[tokenize.TokenInfo]:
    # Lines as `Source` counts them; tokenize by itself does not end one at a lone "\r".
    text = re.sub(r"\r\n?", "\n", source.python.decode("utf-8", "replace"))
    try:
        yield from tokenize.generate_tokens(io.StringIO(text, newline="\n").readline)
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last: a NUL, on Python 3.13
        return
