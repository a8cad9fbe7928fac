"""The comments that switch rules off: found, heeded, and reported where they do nothing.

`# noqa`, `# noqa: JXD001`, `# jax-dist: ignore[JXD001]` and `# jax-dist: ignore-file[JXD001]`,
where Python sees comments and not in strings.
"""

import bisect
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from jax_dist._usage import hint
from jax_dist.checker.engine import config
from jax_dist.checker.model import edits
from jax_dist.checker.model.findings import Code, Edit, Finding, Fix, Safety
from jax_dist.checker.model.sources import Source
from jax_dist.checker.rules import Page, suppression_comments, syntax_error

_CODE = r"(?:[A-Za-z]+[0-9]+|JXD)\b"
_NOQA = re.compile(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{_CODE}(?:\s*[,\s]\s*{_CODE})*)?)?", re.I)
_OURS = re.compile(r"#\s*jax-dist:\s*(?P<word>[\w-]+)\s*(?:\[(?P<codes>[^\]\n]*)\])?", re.I)
_WORD = re.compile(r"[^\s,]+")
_SILENT = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})

Rows = tuple[int, int]  # first and last line, from 0, both included
Span = tuple[int, int]  # bytes [start, end)

_EVERY_ROW: Rows = (0, 1 << 62)


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
class _Comments:
    """All that switches rules off in a file, and its logical lines."""

    suppressions: tuple[Suppression, ...]
    lines: tuple[Line, ...]

    def line_of(self, row: int) -> Line | None:
        """The logical line that holds a row."""
        at = bisect.bisect_right(self.lines, row, key=lambda line: line.rows[0]) - 1
        line = self.lines[at] if at >= 0 else None
        return line if line is not None and row <= line.rows[1] else None


def _row_of(source: Source, offset: int) -> int:
    """The line, from 0, that holds a byte."""
    return bisect.bisect_right(source.line_starts, offset) - 1


def _read_comments(source: Source) -> _Comments:
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
    return _Comments(tuple(found), tuple(lines))


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
        meant = _EVERY_ROW if kind == "ignore-file" else rows
        yield _suppression(kind, match["word"], match, text, comment, meant)


def _suppression(kind, word: str, match: re.Match[str], text: str, comment: Span, rows: Rows):
    def span(start: int, end: int) -> Span:
        before = comment[0] + len(text[:start].encode())
        return before, before + len(text[start:end].encode())

    listed = match.span("codes") if match["codes"] is not None else (match.end(), match.end())
    codes = tuple(_WORD.findall(match["codes"] or ""))
    return Suppression(kind, word, codes, span(*listed), span(*match.span()), comment, rows)


_UNUSED = suppression_comments.UNUSED
_UNKNOWN = suppression_comments.UNKNOWN
_OWN: Code = "JXD9"  # the rules about suppressions themselves are not looked for in them


def applied(
    source: Source,
    findings: Sequence[Finding],
    enabled: frozenset[Code],
    pages: Mapping[Code, Page],
) -> list[Finding]:
    """The findings that are not switched off, and those about the comments that should.

    Args:
      source: the file.
      findings: what the rules say of it.
      enabled: the codes that were looked for; a comment for another one cannot be called unused.
      pages: all rules.
    """
    read = _read_comments(source)
    sieve = _Sieve(source, read, pages)
    kept = [finding for finding in findings if not sieve.catches(finding)]
    if any(finding.code == syntax_error.PAGE.code for finding in findings):
        enabled -= {_UNUSED.code}  # what a comment would catch is not known
    about = [
        finding
        for suppression in read.suppressions
        for finding in _about(source, suppression, sieve, enabled, pages)
        if finding.code in enabled and not sieve.catches_own(finding)
    ]
    return sorted([*kept, *about], key=lambda finding: finding.sort_key)


def with_noqa(source: Source, findings: Iterable[Finding]) -> bytes:
    """The code with comments that switch the findings off; existing ones take further codes."""
    read = _read_comments(source)
    wanted: dict[int, list[Code]] = {}
    for finding in findings:
        row = _commentable(read, _row_of(source, finding.span[0]))
        codes = wanted.setdefault(row, [])
        if finding.code not in codes:
            codes.append(finding.code)
    made = [_addition(source, read, row, sorted(codes)) for row, codes in wanted.items()]
    return edits.apply(source.code, made)


class _Sieve:
    """Which suppressions catch what, and which of their codes have caught something."""

    def __init__(self, source: Source, read: _Comments, pages: Mapping[Code, Page]) -> None:
        self._source = source
        self._suppressions = read.suppressions
        self._pages = pages
        self._used: set[tuple[Suppression, str]] = set()

    def catches(self, finding: Finding) -> bool:
        rows = self._rows(finding)
        caught = False
        for suppression in self._suppressions:
            for selector in _selectors(suppression):
                meant = selector == "" or finding.code in self.resolve(suppression, selector)
                if meant and _meet(suppression.rows, rows):
                    self._used.add((suppression, selector))
                    caught = True
        return caught

    def catches_own(self, finding: Finding) -> bool:
        """As `catches`, for a finding about a comment: only where it is switched off by code."""
        return any(
            finding.code in self.resolve(suppression, selector)
            for suppression in self._suppressions
            for selector in suppression.codes
            if selector.upper().startswith(_OWN) and _meet(suppression.rows, self._rows(finding))
        )

    def used(self, suppression: Suppression, selector: str) -> bool:
        return (suppression, selector) in self._used

    def resolve(self, suppression: Suppression, selector: str) -> frozenset[Code]:
        """A noqa holds codes of many tools, so only there are names not looked up."""
        if suppression.kind == "noqa" and not selector.upper().startswith("JXD"):
            return frozenset()
        return config.resolve(selector, self._pages)

    def _rows(self, finding: Finding) -> Rows:
        first, end = finding.span
        return (
            _row_of(self._source, first),
            _row_of(self._source, max(first, end - 1)),
        )


def _selectors(suppression: Suppression) -> tuple[str, ...]:
    """`""` stands for every rule."""
    return () if suppression.kind == "unknown" else suppression.codes or ("",)


def _meet(rows: Rows, finding: Rows) -> bool:
    return any(rows[0] <= row <= rows[1] for row in finding)


def _about(
    source: Source,
    suppression: Suppression,
    sieve: _Sieve,
    enabled: frozenset[Code],
    pages: Mapping[Code, Page],
) -> list[Finding]:
    if suppression.kind == "unknown":
        remedy = hint(suppression.word, ["ignore", "ignore-file"], "Say ignore[CODE].")
        message = f"'jax-dist: {suppression.word}' switches nothing off. {remedy}"
        return [_finding(source, _UNKNOWN, message, suppression)]
    found = [
        _finding(source, _UNKNOWN, _unknown(code, pages), suppression)
        for code in suppression.codes
        if _is_ours(suppression, code) and not sieve.resolve(suppression, code)
    ]
    unused = _unused(suppression, sieve, enabled, pages)
    if unused:
        names = ", ".join(unused) if suppression.codes else "every rule"
        fix = Fix("remove what is not used", Safety.SAFE, (_removal(source, suppression, unused),))
        message = f"nothing to switch off here: {names}"
        found.append(_finding(source, _UNUSED, message, suppression, fix))
    return found


def _is_ours(suppression: Suppression, code: str) -> bool:
    return suppression.kind != "noqa" or code.upper().startswith("JXD")


def _unknown(code: str, pages: Mapping[Code, Page]) -> str:
    names = [name for page in pages.values() for name in (page.code, page.name)]
    word = code.upper() if code.upper().startswith("JXD") else code.lower()
    remedy = hint(word, names, "`jax-dist rule --all` lists the rules.")
    return f"no rule is called {code}. {remedy}"


def _unused(
    suppression: Suppression,
    sieve: _Sieve,
    enabled: frozenset[Code],
    pages: Mapping[Code, Page],
) -> list[str]:
    if suppression.kind == "noqa" and not suppression.codes:
        return []  # meant for some other tool, as likely as not
    unused = []
    for selector in _selectors(suppression):
        codes = sieve.resolve(suppression, selector) if selector else frozenset(pages)
        codes = frozenset(code for code in codes if not code.startswith(_OWN))
        # Of a group of rules those that are off by default do not count: hardly anyone asks.
        looked_for = frozenset(code for code in codes if pages[code].default) or codes
        if codes and looked_for <= enabled and not sieve.used(suppression, selector):
            unused.append(selector)
    return unused


def _removal(source: Source, suppression: Suppression, unused: Sequence[str]) -> Edit:
    left = [code for code in suppression.codes if code not in unused]
    if left:
        return Edit(*suppression.listed, ", ".join(left))
    code = source.code
    start, end = suppression.directive
    before = code[suppression.comment[0] : start].strip()
    after = code[end : suppression.comment[1]]
    if after.strip():  # words of the author stay, as a comment
        end += len(after) - len(after.lstrip())
        return Edit(start, end, "" if after.lstrip().startswith(b"#") else "# ")
    row = _row_of(source, start)
    line_start = source.line_starts[row]
    if before or code[line_start:start].strip():
        kept = len(code[line_start:start].rstrip())
        return Edit(line_start + kept, suppression.comment[1], "")
    line_end = [*source.line_starts, len(code)][row + 1]
    return Edit(line_start, line_end, "")


def _finding(
    source: Source, page: Page, message: str, suppression: Suppression, fix: Fix | None = None
) -> Finding:
    start, end = suppression.directive
    return Finding(
        path=source.path,
        code=page.code,
        name=page.name,
        message=message,
        start=source.position(start),
        end=source.position(end),
        span=(start, end),
        line_text=source.line_text(start),
        fix=fix,
    )


def _commentable(read: _Comments, row: int) -> int:
    """The row itself, or the last of its statement where it ends in a string or a backslash."""
    line = read.line_of(row)
    return row if line is None or row in line.open_rows else line.rows[1]


def _addition(source: Source, read: _Comments, row: int, codes: Sequence[Code]) -> Edit:
    for suppression in read.suppressions:
        at = suppression.directive[0]
        takes_more = suppression.kind in ("noqa", "ignore") and suppression.codes
        if takes_more and _row_of(source, at) == row:
            merged = dict.fromkeys([*suppression.codes, *codes])
            return Edit(*suppression.listed, ", ".join(merged))
    end = source.line_starts[row] + len(source.line_text(source.line_starts[row]).encode())
    return Edit(end, end, f"  # noqa: {', '.join(codes)}")
