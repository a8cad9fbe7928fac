"""What hides findings: comments that switch rules off, and baselines.

Comments are found, heeded, and reported where they do nothing: `# noqa`, `# noqa: JXD001`,
`# jax-dist: ignore[JXD001]` and `# jax-dist: ignore-file[JXD001]`, where Python sees comments and
not in strings.

A baseline hides findings too: those that are known and left for later, and only them. A finding is
known by its path, its code and the text of its line, so that it stays known when the line moves. Of
several that are alike, as many are hidden as there were.
"""

import bisect
import dataclasses
import io
import itertools
import json
import os
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jax_dist._usage import MisuseError, hint
from jax_dist.lint.engine import config
from jax_dist.lint.model.findings import Code, Edit, Finding, Fix, Safety
from jax_dist.lint.model.sources import Source
from jax_dist.lint.rules import Page
from jax_dist.lint.rules.linter_findings import SYNTAX_ERROR, UNKNOWN, UNUSED

_CODE = r"(?:[A-Za-z]+[0-9]+|JXD)\b"
_NOQA = re.compile(rf"#\s*noqa\b(?:\s*:\s*(?P<codes>{_CODE}(?:\s*[,\s]\s*{_CODE})*)?)?", re.I)
_OURS = re.compile(r"#\s*jax-dist:\s*(?P<word>[\w-]+)\s*(?:\[(?P<codes>[^\]\n]*)\])?", re.I)
_WORD = re.compile(r"[^\s,]+")
_SILENT = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})

_Rows = tuple[int, int]  # first and last line, from 0, both included
_Span = tuple[int, int]  # bytes [start, end)

_EVERY_ROW: _Rows = (0, 1 << 62)


@dataclasses.dataclass(frozen=True, slots=True)
class _Suppression:
    """One such comment."""

    kind: Literal["noqa", "ignore", "ignore-file", "unknown"]
    word: str  # what follows "jax-dist:", as it is spelled; "noqa" otherwise
    codes: tuple[str, ...]  # as they are spelled; none: every rule
    listed: _Span  # of the codes
    directive: _Span  # from its "#" to the end of the codes
    comment: _Span  # the whole comment, which may hold more
    rows: _Rows  # a finding that begins or ends in these is meant


_OWN: Code = "JXD9"  # the rules about suppressions themselves are not looked for in them


def applied(
    source: Source,
    findings: Sequence[Finding],
    enabled: frozenset[Code],
    pages: Mapping[Code, Page],
) -> list[Finding]:
    """The findings that are not switched off, and those about the comments that should.

    `enabled` are the codes that were looked for; a comment for another one cannot be called unused.
    """
    sieve = _Sieve(source, pages)
    broken = [finding for finding in findings if finding.code == SYNTAX_ERROR.code]
    if broken:
        enabled -= {UNUSED.code}  # what a comment would catch is not known
    kept = [
        finding
        for finding in findings
        if not (sieve.catches_own if finding in broken else sieve.catches)(finding)
    ]
    about = [
        finding
        for suppression in sieve.suppressions
        for finding in sieve.about(suppression, enabled)
        if finding.code in enabled and not sieve.catches_own(finding)
    ]
    return sorted([*kept, *about], key=lambda finding: finding.sort_key)


class _Sieve:
    """Which suppressions catch what, and which of their codes have caught something."""

    def __init__(self, source: Source, pages: Mapping[Code, Page]) -> None:
        self.suppressions = _read_comments(source)
        self._source = source
        self._pages = pages
        self._used: set[tuple[_Suppression, str]] = set()

    def catches(self, finding: Finding) -> bool:
        caught = False
        for suppression in self._met_by(finding):
            for selector in _selectors(suppression):
                if selector == "" or finding.code in self._resolve(suppression, selector):
                    self._used.add((suppression, selector))
                    caught = True
        return caught

    def catches_own(self, finding: Finding) -> bool:
        """As `catches`, of a comment or of a file that cannot be parsed: only by its code."""
        return any(
            finding.code in self._resolve(suppression, selector)
            for suppression in self._met_by(finding)
            for selector in suppression.codes
            if selector.upper().startswith(_OWN)
        )

    def _met_by(self, finding: Finding) -> list[_Suppression]:
        """Those that speak for the row on which a finding begins, or that on which it ends."""
        first, end = finding.span
        rows = [_row_of(self._source, first), _row_of(self._source, max(first, end - 1))]
        return [
            each
            for each in self.suppressions
            if any(each.rows[0] <= row <= each.rows[1] for row in rows)
        ]

    def _resolve(self, suppression: _Suppression, selector: str) -> frozenset[Code]:
        """A noqa holds codes of many tools, so only there are names not looked up."""
        if not _is_ours(suppression, selector):
            return frozenset()
        return config.resolve(selector, self._pages)

    def about(self, suppression: _Suppression, enabled: frozenset[Code]) -> list[Finding]:
        """What is wrong with a comment."""
        source = self._source
        if suppression.kind == "unknown":
            remedy = hint(suppression.word, ["ignore", "ignore-file"], "Say ignore[CODE].")
            message = f"'jax-dist: {suppression.word}' switches nothing off. {remedy}"
            return [UNKNOWN.finding(source, message, suppression.directive)]
        found = [
            UNKNOWN.finding(source, f"no rule is called {code}. {remedy}", suppression.directive)
            for code in suppression.codes
            if _is_ours(suppression, code) and not self._resolve(suppression, code)
            for remedy in [config.likeness(code, self._pages)]
        ]
        unused: list[str] = []
        for selector in _selectors(suppression):
            codes = self._resolve(suppression, selector) if selector else frozenset(self._pages)
            codes = frozenset(code for code in codes if not code.startswith(_OWN))
            # Of a group of rules those that are off by default do not count: hardly anyone asks.
            looked_for = frozenset(code for code in codes if self._pages[code].default) or codes
            is_used = (suppression, selector) in self._used
            if codes and looked_for <= enabled and not is_used:
                unused.append(selector)
        # A noqa without codes is meant for some other tool, as likely as not.
        if unused and (suppression.kind != "noqa" or suppression.codes):
            names = ", ".join(unused) if suppression.codes else "every rule"
            edit = _removal(source, suppression, unused)
            fix = Fix("remove what is not used", Safety.SAFE, (edit,))
            message = f"nothing to switch off here: {names}"
            found.append(UNUSED.finding(source, message, suppression.directive, fix))
        return found


def _selectors(suppression: _Suppression) -> tuple[str, ...]:
    """`""` stands for every rule."""
    return () if suppression.kind == "unknown" else suppression.codes or ("",)


def _is_ours(suppression: _Suppression, code: str) -> bool:
    return suppression.kind != "noqa" or code.upper().startswith("JXD")


def _removal(source: Source, suppression: _Suppression, unused: Sequence[str]) -> Edit:
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


def _read_comments(source: Source) -> tuple[_Suppression, ...]:
    """What switches rules off in a file; in one that Python cannot read, before the fault."""
    placed: list[tuple[int, _Span, _Rows]] = []  # row, comment, rows that it speaks for
    waiting: list[tuple[int, _Span]] = []  # comments of the line that is being read
    above: list[tuple[int, _Span]] = []  # comments with nothing before them on their line
    first: int | None = None  # of a logical line: a statement, or the head of a compound one
    for token in _tokens(source):
        row = token.start[0] - 1
        if token.type == tokenize.COMMENT:
            (waiting if first is not None else above).append((row, _span(source, token)))
        if token.type == tokenize.NEWLINE and first is not None:
            rows = (first, row)
            # On the first or last row of a statement a comment is meant for all of it.
            placed += [(row, span, rows if row in rows else (row, row)) for row, span in waiting]
            placed += [(row, span, rows) for row, span in above]
            first, waiting, above = None, [], []
        elif token.type not in _SILENT and token.type != tokenize.ENDMARKER and first is None:
            first = row
    placed += [(row, span, (row, row)) for row, span in (*waiting, *above)]
    return tuple(found for place in sorted(placed) for found in _suppressions(source, *place))


def _tokens(source: Source) -> Iterator[tokenize.TokenInfo]:
    # Lines as `Source` counts them; tokenize by itself does not end one at a lone "\r".
    code = source.python
    starts = [*source.line_starts, len(code)]
    texts = (
        code[start:end].decode("utf-8", "replace") for start, end in itertools.pairwise(starts)
    )
    lines = (text.rstrip("\r\n") + "\n" if text.endswith(("\r", "\n")) else text for text in texts)
    reader = io.StringIO("".join(lines), newline="\n").readline
    try:
        yield from tokenize.generate_tokens(reader)
    except (tokenize.TokenError, SyntaxError, SystemError):  # the last: a NUL, on Python 3.13
        return


def _span(source: Source, token: tokenize.TokenInfo) -> _Span:
    row, column = token.start
    start = source.line_starts[row - 1] + len(token.line[:column].encode())
    return start, start + len(token.string.encode())


def _suppressions(source: Source, row: int, comment: _Span, rows: _Rows) -> Iterator[_Suppression]:
    text = source.code[slice(*comment)].decode()
    alone = not source.code[source.line_starts[row] : comment[0]].strip()

    def span(start: int, end: int) -> _Span:
        before = comment[0] + len(text[:start].encode())
        return before, before + len(text[start:end].encode())

    for match in (*_NOQA.finditer(text), *_OURS.finditer(text)):
        is_ours = match.re is _OURS
        word = match["word"] if is_ours else "noqa"
        kind: Any = word.lower()
        if is_ours and kind not in ("ignore", "ignore-file"):
            kind = "unknown"
        # A noqa speaks for its own line only, as everywhere.
        meant = (row, row) if kind == "noqa" and alone else rows
        meant = _EVERY_ROW if kind == "ignore-file" else meant
        listed = match.span("codes") if match["codes"] is not None else (match.end(), match.end())
        codes = tuple(_WORD.findall(match["codes"] or ""))
        directive = span(*match.span())
        yield _Suppression(kind, word, codes, span(*listed), directive, comment, meant)


def _row_of(source: Source, offset: int) -> int:
    """The line, from 0, that holds a byte."""
    return bisect.bisect_right(source.line_starts, offset) - 1


_Known: TypeAlias = tuple[str, Code, str]  # path from the folder of the baseline, code, line

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Stale:
    """An entry that hides nothing any more."""

    path: str
    code: Code
    line: str
    count: int  # of findings that are gone


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """Findings against a baseline."""

    new: tuple[Finding, ...]
    hidden: int
    stale: tuple[_Stale, ...]


def baseline_of(findings: Iterable[Finding], file: str) -> str:
    """A baseline that hides these findings, to be written to `file`."""
    counts = Counter(_known(finding, file) for finding in findings)
    entries: dict[str, list[dict[str, Any]]] = {}
    for (path, code, line), count in sorted(counts.items()):
        entries.setdefault(path, []).append({"code": code, "line": line, "count": count})
    return json.dumps({"version": _VERSION, "findings": entries}, indent=2) + "\n"


def beyond_baseline(
    findings: Sequence[Finding], file: str, *, files: Iterable[str], codes: frozenset[Code]
) -> _Compared:
    """Takes from the findings those that a baseline hides.

    Args:
      findings: in order; of several that are alike the first are hidden.
      file: the baseline.
      files: what was checked; entries of other files are not called stale while they exist.
      codes: what was looked for; likewise.

    Raises:
      MisuseError: the baseline cannot be read.
    """
    left = _read(file)
    new: list[Finding] = []
    for finding in findings:
        known = _known(finding, file)
        if left[known]:
            left[known] -= 1
        else:
            new.append(finding)
    checked = {_seen(path, file) for path in files}
    folder = os.path.dirname(os.path.abspath(file))
    stale = tuple(
        _Stale(path, code, line, count)
        for (path, code, line), count in sorted(left.items())
        if count and code in codes
        if path in checked or not os.path.exists(os.path.join(folder, path))
    )
    return _Compared(tuple(new), len(findings) - len(new), stale)


def _known(finding: Finding, file: str) -> _Known:
    return _seen(finding.path, file), finding.code, finding.line_text.strip()


def _seen(path: str, file: str) -> str:
    folder = os.path.dirname(os.path.abspath(file))
    try:
        seen = os.path.relpath(path, folder)
    except ValueError:  # Windows: another drive
        seen = os.path.abspath(path)
    return seen.replace(os.sep, "/")


def _read(file: str) -> Counter[_Known]:
    try:
        with open(file, encoding="utf-8") as opened:
            table = json.load(opened)
    except OSError as error:
        remedy = "--write-baseline makes one." if isinstance(error, FileNotFoundError) else ""
        raise MisuseError(
            f"the baseline {file} cannot be read: {error.strerror}. {remedy}".rstrip()
        ) from error
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"the baseline {file} is not JSON: {error}") from error
    try:
        if table["version"] != _VERSION:
            raise ValueError(table["version"])
        return Counter(
            {
                (str(path), str(entry["code"]), str(entry["line"])): int(entry["count"])
                for path, entries in table["findings"].items()
                for entry in entries
            }
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MisuseError(
            f"{file} is not a baseline of this version; --write-baseline writes a new one"
        ) from error
