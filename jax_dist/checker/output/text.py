"""For people: each finding with its line, what it points at, and how to mend it."""

import unicodedata
from collections.abc import Sequence

from jax_dist.checker.model.findings import Finding, Fix, Safety
from jax_dist.checker.model.sources import Source
from jax_dist.checker.output.context import RenderContext

_WIDEST = 160  # columns of a source line; a longer one is cut around what is found
_BEFORE = 40  # columns that are kept before it then

_SIGNS = {"-": "\x1b[31m", "+": "\x1b[32m"}
_BOLD, _RED, _CYAN, _BLUE, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[36m", "\x1b[1;34m", "\x1b[0m"


def render(findings: Sequence[Finding], context: RenderContext) -> str:
    """A block for each finding, and a last line that counts them."""
    blocks = [_block(finding, context) for finding in findings]
    return "\n".join((*blocks, summary(findings) + "\n"))


def summary(findings: Sequence[Finding]) -> str:
    """`Found 3 findings in 2 files (1 fixable with --fix, 1 more with --unsafe-fixes).`"""
    if not findings:
        return "No findings."
    files = len({finding.path for finding in findings})
    safe = sum(_safety(finding) is Safety.SAFE for finding in findings)
    unsafe = sum(_safety(finding) is Safety.UNSAFE for finding in findings)
    more = "more " if safe else ""
    ways = [f"{safe} fixable with --fix"] if safe else []
    ways += [f"{unsafe} {more}fixable with --unsafe-fixes"] if unsafe and not safe else []
    ways += [f"{unsafe} more with --unsafe-fixes"] if unsafe and safe else []
    end = f" ({', '.join(ways)})." if ways else "."
    return f"Found {_counted(len(findings), 'finding')} in {_counted(files, 'file')}{end}"


def statistics(findings: Sequence[Finding]) -> str:
    """How often each rule speaks, the most frequent first; `[*]` where `--fix` mends some."""
    names = {finding.code: finding.name for finding in findings}
    counts = dict.fromkeys(sorted(names), 0)
    for finding in findings:
        counts[finding.code] += 1
    mended = {finding.code for finding in findings if _safety(finding) is Safety.SAFE}
    width = len(str(max(counts.values(), default=0)))
    lines = (
        f"{count:{width}}  {code}  {'[*]' if code in mended else '   '} {names[code]}\n"
        for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )
    return "".join(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _safety(finding: Finding) -> Safety | None:
    return finding.fix.safety if finding.fix else None


def _block(finding: Finding, context: RenderContext) -> str:
    paint = _painted if context.colour else _unpainted
    start = finding.start
    cell = f"cell {start.cell}:" if start.cell is not None else ""
    mark = paint("[*] ", _CYAN) if _safety(finding) is Safety.SAFE else ""
    path = paint(_printable(finding.path), _BOLD)
    code = paint(finding.code, _RED)
    place = f"{path}:{cell}{start.line}:{start.column}:"
    lines = [f"{place} {code} {mark}{_printable(finding.message)}"]
    number = str(start.line)
    blank = " " * len(number)
    if finding.line_text.strip():
        shown, before, width = _cut(finding)
        bar = paint("|", _BLUE)
        lines += [
            f"{paint(number, _BLUE)} {bar} {shown}",
            f"{blank} {bar} {' ' * before}{paint('^' * width, _RED)}",
        ]
    if finding.fix:
        help_ = paint("help:", _CYAN)
        lines.append(f"{blank} {help_} {_printable(finding.fix.title)}{_how(finding.fix.safety)}")
        if finding.fix.safety is Safety.DISPLAY and finding.fix.edits:
            sketch = _sketch(finding.fix, context.source(finding.path))
            lines += [f"{blank}   {paint(line, _SIGNS[line[0]])}" for line in sketch]
    return "\n".join(lines) + "\n"


def _how(safety: Safety) -> str:
    match safety:
        case Safety.SAFE:
            return ""
        case Safety.UNSAFE:
            return " (--unsafe-fixes)"
        case Safety.DISPLAY:
            return " (by hand)"


def _sketch(fix: Fix, source: Source | None) -> list[str]:
    """What nobody but the reader will write, line by line."""
    if source is None:
        return []
    from jax_dist.checker.engine import fixer  # only here: sketches are few
    from jax_dist.checker.model import edits

    lines = [f"+ {line}" for line in fix.imports]
    for edit in fixer.between(source.code, edits.apply(source.code, fix.edits)):
        old = source.code[edit.start : edit.end].decode("utf-8", "replace")
        lines += [f"- {line}" for line in old.splitlines()]
        lines += [f"+ {line}" for line in edit.text.splitlines()]
    return [_printable(line) for line in lines]


def _cut(finding: Finding) -> tuple[str, int, int]:
    """The line as shown, the columns before what is found, and the columns that it takes."""
    text = finding.line_text.rstrip()
    first = min(finding.start.column - 1, len(text))
    one_line = finding.end.line == finding.start.line and finding.end.cell == finding.start.cell
    last = min(finding.end.column - 1, len(text)) if one_line else len(text)
    plain = text.isascii() and text.isprintable()
    cells = list(text) if plain else [_shown(character) for character in text]
    columns = [1] * len(cells) if plain else [_columns(cell) for cell in cells]
    before, width = sum(columns[:first]), max(1, sum(columns[first:last]))
    if sum(columns) <= _WIDEST:
        return "".join(cells), before, width
    return _window(cells, columns, first, min(width, _WIDEST - _BEFORE))


def _window(cells: list[str], columns: list[int], first: int, width: int) -> tuple[str, int, int]:
    start, before = first, 0
    while start and before + columns[start - 1] <= _BEFORE:
        start -= 1
        before += columns[start]
    end, taken = start, 0
    while end < len(cells) and taken + columns[end] <= _WIDEST:
        taken += columns[end]
        end += 1
    left, right = "…" if start else "", "…" if end < len(cells) else ""
    return left + "".join(cells[start:end]) + right, before + len(left), width


def _shown(character: str) -> str:
    """Four blanks for a tab; a sign for what would move the cursor or change colours."""
    if character == "\t":
        return "    "
    return character if character.isprintable() or unicodedata.combining(character) else "�"


def _columns(cell: str) -> int:
    if len(cell) > 1:
        return len(cell)
    if unicodedata.combining(cell):
        return 0
    return 2 if unicodedata.east_asian_width(cell) in "WF" else 1


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(_shown(character) for character in text)


def _painted(text: str, colour: str) -> str:
    return f"{colour}{text}{_PLAIN}"


def _unpainted(text: str, colour: str) -> str:
    del colour
    return text
