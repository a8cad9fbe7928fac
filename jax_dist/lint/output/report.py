"""Findings as a report: text for people, JSON for programs, and commands for GitHub Actions.

A form of report is a function `(findings, context) -> str`; `FORMATS` has all of them by name.
"""

import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from jax_dist._usage import counted
from jax_dist.lint.model.findings import Finding, Fix, Position, Safety, apply_edits
from jax_dist.lint.model.sources import Source
from jax_dist.lint.output.context import RenderContext, Severity, slashed

_WIDEST = 160  # columns of a source line; a longer one is cut around what is found
_BEFORE = 40  # columns that are kept before it then

_SIGNS = {"-": "\x1b[31m", "+": "\x1b[32m"}
_BOLD, _RED, _CYAN, _BLUE, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[36m", "\x1b[1;34m", "\x1b[0m"


def _text(findings: Sequence[Finding], context: RenderContext) -> str:
    """For people: a block for each finding, and a last line that counts them."""
    blocks = [_block(finding, context) for finding in findings]
    return "\n".join((*blocks, summary(findings) + "\n"))


def summary(findings: Sequence[Finding]) -> str:
    """`Found 3 findings in 2 files (1 fixable with --fix, 1 more with --unsafe-fixes).`"""
    if not findings:
        return "No findings."
    files = len({finding.path for finding in findings})
    safe = sum(_safety(finding) is Safety.SAFE for finding in findings)
    unsafe = sum(_safety(finding) is Safety.UNSAFE for finding in findings)
    ways = [f"{safe} fixable with --fix"] if safe else []
    ways += [f"{unsafe} {'more' if safe else 'fixable'} with --unsafe-fixes"] if unsafe else []
    end = f" ({', '.join(ways)})." if ways else "."
    return f"Found {counted(len(findings), 'finding')} in {counted(files, 'file')}{end}"


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


def _safety(finding: Finding) -> Safety | None:
    return finding.fix.safety if finding.fix else None


def _block(finding: Finding, context: RenderContext) -> str:
    def paint(text: str, colour: str) -> str:
        return f"{colour}{text}{_PLAIN}" if context.colour else text

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
        lines.append(f"{blank} {help_} {_printable(finding.fix.title)}{_HOW[finding.fix.safety]}")
        source = context.source(finding.path) if finding.fix.safety is Safety.DISPLAY else None
        if source is not None and finding.fix.edits:
            sketch = _sketch(finding.fix, source)
            lines += [f"{blank}   {paint(line, _SIGNS[line[0]])}" for line in sketch]
    return "\n".join(lines) + "\n"


_HOW = {Safety.SAFE: "", Safety.UNSAFE: " (--unsafe-fixes)", Safety.DISPLAY: " (by hand)"}


def _sketch(fix: Fix, source: Source) -> list[str]:
    """What nobody but the reader will write, line by line."""
    import difflib  # only here: sketches are few

    code, new = source.code, apply_edits(source.code, fix.edits)
    start = code.rfind(b"\n", 0, min(edit.start for edit in fix.edits)) + 1
    end = code.find(b"\n", max(edit.end for edit in fix.edits))
    behind = len(code) - end if end >= 0 else 0
    old_lines, new_lines = (
        text[start : len(text) - behind].decode("utf-8", "replace").splitlines()
        for text in (code, new)
    )
    changes = [*difflib.unified_diff(old_lines, new_lines, n=0, lineterm="")][2:]
    lines = [f"+{line}" for line in fix.imports]
    lines += [line for line in changes if not line.startswith("@@")]
    return [_printable(f"{line[0]} {line[1:]}") for line in lines]


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
    start, before, taken = first, 0, 0
    while start and before + columns[start - 1] <= _BEFORE:
        start -= 1
        before += columns[start]
    end = start
    while end < len(cells) and taken + columns[end] <= _WIDEST:
        taken += columns[end]
        end += 1
    left, right = "…" if start else "", "…" if end < len(cells) else ""
    shown = left + "".join(cells[start:end]) + right
    return shown, before + len(left), min(width, _WIDEST - _BEFORE)


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


def _json(findings: Sequence[Finding], context: RenderContext) -> str:
    """For programs: one array; lines, columns and cells count from 1, bytes from 0."""
    entries = [
        {
            "path": finding.path,
            "code": finding.code,
            "name": finding.name,
            "message": finding.message,
            "severity": context.severity(finding.code),
            "start": _position(finding.start),
            "end": _position(finding.end),
            "bytes": list(finding.span),
            "line": finding.line_text,
            "url": context.link(finding.code),
            "fix": _fix(finding.fix, finding.path, context) if finding.fix else None,
        }
        for finding in findings
    ]
    return json.dumps(entries, indent=2) + "\n"


def _position(position: Position) -> dict[str, int]:
    entry = {"line": position.line, "column": position.column}
    return entry if position.cell is None else {"cell": position.cell, **entry}


def _fix(fix: Fix, path: str, context: RenderContext) -> dict[str, Any]:
    source = context.source(path)
    edits: list[dict[str, Any]] = []
    for edit in fix.edits:
        entry: dict[str, Any] = {"bytes": [edit.start, edit.end]}
        if source is not None:
            entry["start"] = _position(source.position(edit.start))
            entry["end"] = _position(source.position(edit.end))
        edits.append({**entry, "text": edit.text})
    return {
        "title": fix.title,
        "safety": str(fix.safety),
        "group": fix.group or None,
        "edits": edits,
        "imports": list(fix.imports),
    }


_LEVELS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def _github(findings: Sequence[Finding], context: RenderContext) -> str:
    """Workflow commands, which become annotations of the changed lines: one `::warning` each."""
    lines: list[str] = []
    for finding in findings:
        start, end = finding.in_file
        properties = {
            "title": f"jax-dist ({finding.code})",
            "file": slashed(finding.path),
            "line": str(start.line),
            "endLine": str(end.line),
        }
        if start.line == end.line:  # GitHub takes columns only within one line
            properties |= {"col": str(start.column), "endColumn": str(end.column)}
        quoted = (
            f"{name}={_data(value).replace(':', '%3A').replace(',', '%2C')}"
            for name, value in properties.items()
        )
        level = _LEVELS[context.severity(finding.code)]
        said = _data(f"{finding.code} {finding.message_with_cell}")
        lines.append(f"::{level} {','.join(quoted)}::{said}\n")
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _sarif(findings: Sequence[Finding], context: RenderContext) -> str:
    from jax_dist.lint.output import sarif  # only here: it is slow to load

    return sarif.render(findings, context)


FORMATS: dict[str, Callable[[Sequence[Finding], RenderContext], str]] = {
    "text": _text,
    "json": _json,
    "sarif": _sarif,
    "github": _github,
}
