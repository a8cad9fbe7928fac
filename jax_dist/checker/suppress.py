"""Takes away the findings that comments switch off, and finds the comments that do nothing."""

from collections.abc import Iterable, Mapping, Sequence

from jax_dist.checker import comments, edits, selecting
from jax_dist.checker.comments import Comments, Suppression
from jax_dist.checker.findings import Code, Edit, Finding, Fix, Safety
from jax_dist.checker.misuse import hint
from jax_dist.checker.page import Page
from jax_dist.checker.rules import bad_suppression_code, syntax_error, unused_suppression
from jax_dist.checker.sources import Source

UNUSED = unused_suppression.PAGE
UNKNOWN = bad_suppression_code.PAGE
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
    read = comments.read(source)
    sieve = _Sieve(source, read, pages)
    kept = [finding for finding in findings if not sieve.catches(finding)]
    if any(finding.code == syntax_error.PAGE.code for finding in findings):
        enabled -= {UNUSED.code}  # what a comment would catch is not known
    about = [
        finding
        for suppression in read.suppressions
        for finding in _about(source, suppression, sieve, enabled, pages)
        if finding.code in enabled and not sieve.catches_own(finding)
    ]
    return sorted([*kept, *about], key=lambda finding: finding.sort_key)


def with_noqa(source: Source, findings: Iterable[Finding]) -> bytes:
    """The code with comments that switch the findings off; existing ones take further codes."""
    read = comments.read(source)
    wanted: dict[int, list[Code]] = {}
    for finding in findings:
        row = _commentable(read, comments.row_of(source, finding.span[0]))
        codes = wanted.setdefault(row, [])
        if finding.code not in codes:
            codes.append(finding.code)
    made = [_addition(source, read, row, sorted(codes)) for row, codes in wanted.items()]
    return edits.apply(source.code, made)


class _Sieve:
    """Which suppressions catch what, and which of their codes have caught something."""

    def __init__(self, source: Source, read: Comments, pages: Mapping[Code, Page]) -> None:
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
        return selecting.resolve(selector, self._pages)

    def _rows(self, finding: Finding) -> comments.Rows:
        first, end = finding.span
        return (
            comments.row_of(self._source, first),
            comments.row_of(self._source, max(first, end - 1)),
        )


def _selectors(suppression: Suppression) -> tuple[str, ...]:
    """`""` stands for every rule."""
    return () if suppression.kind == "unknown" else suppression.codes or ("",)


def _meet(rows: comments.Rows, finding: comments.Rows) -> bool:
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
        return [_finding(source, UNKNOWN, message, suppression)]
    found = [
        _finding(source, UNKNOWN, _unknown(code, pages), suppression)
        for code in suppression.codes
        if _is_ours(suppression, code) and not sieve.resolve(suppression, code)
    ]
    unused = _unused(suppression, sieve, enabled, pages)
    if unused:
        names = ", ".join(unused) if suppression.codes else "every rule"
        fix = Fix("remove what is not used", Safety.SAFE, (_removal(source, suppression, unused),))
        message = f"nothing to switch off here: {names}"
        found.append(_finding(source, UNUSED, message, suppression, fix))
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
    row = comments.row_of(source, start)
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


def _commentable(read: Comments, row: int) -> int:
    """The row itself, or the last of its statement where it ends in a string or a backslash."""
    line = read.line_of(row)
    return row if line is None or row in line.open_rows else line.rows[1]


def _addition(source: Source, read: Comments, row: int, codes: Sequence[Code]) -> Edit:
    for suppression in read.suppressions:
        at = suppression.directive[0]
        takes_more = suppression.kind in ("noqa", "ignore") and suppression.codes
        if takes_more and comments.row_of(source, at) == row:
            merged = dict.fromkeys([*suppression.codes, *codes])
            return Edit(*suppression.listed, ", ".join(merged))
    end = source.line_starts[row] + len(source.line_text(source.line_starts[row]).encode())
    return Edit(end, end, f"  # noqa: {', '.join(codes)}")
