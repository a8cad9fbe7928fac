"""Comments that switch rules off, found where Python sees comments and not in strings.

`# noqa`, `# noqa: JXD001`, `# jax-dist: ignore[JXD001]` and `# jax-dist: ignore-file[JXD001]`.
"""

import bisect
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Literal

from jax_dist.checker.sources import Source

_CODE = r"(?:[A-Za-z]+[0-9]+|JXD)\b"
_NOQA = re.compile(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{_CODE}(?:\s*[,\s]\s*{_CODE})*)?)?", re.I)
_OURS = re.compile(r"#\s*jax-dist:\s*(?P<word>[\w-]+)\s*(?:\[(?P<codes>[^\]\n]*)\])?", re.I)
_WORD = re.compile(r"[^\s,]+")
_SILENT = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})

Rows = tuple[int, int]  # first and last line, from 0, both included
Span = tuple[int, int]  # bytes [start, end)

EVERY_ROW: Rows = (0, 1 << 62)


@dataclasses.dataclass(frozen=True, slots=True)
class Suppression:
    """One such comment."""

    kind: Literal["noqa", "ignore", "ignore-file", "unknown"]
    word: str  # what follows "jax-dist:", as it is spelled; "noqa" otherwise
    codes: tuple[str, ...]  # as they are spelled; none: every rule
    listed: Span  # of the codes
    directive: Span  # from its "#" to the end of the codes
    comment: Span  # the whole comment, which may hold more
    rows: Rows  # a finding that begins or ends in these is meant


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A logical line: a statement, or the head of a compound one."""

    rows: Rows
    open_rows: frozenset[int]  # at the end of which a comment can stand


@dataclasses.dataclass(frozen=True, slots=True)
class Comments:
    """All that switches rules off in a file, and its logical lines."""

    suppressions: tuple[Suppression, ...]
    lines: tuple[Line, ...]

    def line_of(self, row: int) -> Line | None:
        """The logical line that holds a row."""
        at = bisect.bisect_right(self.lines, row, key=lambda line: line.rows[0]) - 1
        line = self.lines[at] if at >= 0 else None
        return line if line is not None and row <= line.rows[1] else None


def row_of(source: Source, offset: int) -> int:
    """The line, from 0, that holds a byte."""
    return bisect.bisect_right(source.line_starts, offset) - 1


def read(source: Source) -> Comments:
    """Reads the comments of a file; of one that Python cannot read, those before the fault."""
    lines: list[Line] = []
    placed: list[tuple[int, Span, Rows]] = []  # row, comment, rows that it speaks for
    waiting: list[tuple[int, Span]] = []  # comments of the line that is being read
    above: list[tuple[int, Span]] = []  # comments with nothing before them on their line
    first: int | None = None
    open_rows: set[int] = set()
    for token in _tokens(source):
        row = token.start[0] - 1
        if token.type == tokenize.COMMENT:
            (waiting if first is not None else above).append((row, _span(source, token)))
        if token.type in (tokenize.NL, tokenize.COMMENT) and first is not None:
            open_rows.add(row)
        if token.type == tokenize.NEWLINE and first is not None:
            rows = (first, row)
            lines.append(Line(rows, frozenset({*open_rows, row})))
            placed += [(row, span, _spoken_for(row, rows)) for row, span in waiting]
            placed += [(row, span, rows) for row, span in above]
            first, waiting, above = None, [], []
            open_rows.clear()
        elif token.type not in _SILENT and token.type != tokenize.ENDMARKER and first is None:
            first = row
    placed += [(row, span, (row, row)) for row, span in (*waiting, *above)]
    found = [each for place in sorted(placed) for each in _suppressions(source, *place)]
    return Comments(tuple(found), tuple(lines))


def _spoken_for(row: int, line: Rows) -> Rows:
    """On the first or last row of a statement a comment is meant for all of it."""
    return line if row in line else (row, row)


def _tokens(source: Source) -> Iterator[tokenize.TokenInfo]:
    try:
        yield from tokenize.generate_tokens(_reader(source))
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last: a NUL, on Python 3.13
        return


def _reader(source: Source):
    """Lines as `Source` counts them; tokenize by itself does not end one at a lone "\\r"."""
    code = source.python
    starts = [*source.line_starts, len(code)]
    texts = (
        code[start:end].decode("utf-8", "replace")
        for start, end in zip(starts, starts[1:], strict=False)
    )
    lines = (text.rstrip("\r\n") + "\n" if text.endswith(("\r", "\n")) else text for text in texts)
    return io.StringIO("".join(lines), newline="\n").readline


def _span(source: Source, token: tokenize.TokenInfo) -> Span:
    row, column = token.start
    start = source.line_starts[row - 1] + len(token.line[:column].encode())
    return start, start + len(token.string.encode())


def _suppressions(source: Source, row: int, comment: Span, rows: Rows) -> Iterator[Suppression]:
    text = source.code[slice(*comment)].decode()
    alone = not source.code[source.line_starts[row] : comment[0]].strip()
    for match in _NOQA.finditer(text):
        # A noqa speaks for its own line only, as everywhere.
        meant = (row, row) if alone else rows
        yield _suppression("noqa", "noqa", match, text, comment, meant)
    for match in _OURS.finditer(text):
        word = match["word"].lower()
        kind = word if word in ("ignore", "ignore-file") else "unknown"
        meant = EVERY_ROW if kind == "ignore-file" else rows
        yield _suppression(kind, match["word"], match, text, comment, meant)


def _suppression(kind, word: str, match: re.Match[str], text: str, comment: Span, rows: Rows):
    def span(start: int, end: int) -> Span:
        before = comment[0] + len(text[:start].encode())
        return before, before + len(text[start:end].encode())

    listed = match.span("codes") if match["codes"] is not None else (match.end(), match.end())
    codes = tuple(_WORD.findall(match["codes"] or ""))
    return Suppression(kind, word, codes, span(*listed), span(*match.span()), comment, rows)
