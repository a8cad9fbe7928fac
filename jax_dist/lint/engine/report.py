"""Findings as a report: text for people, JSON for programs, and commands for GitHub Actions.

A form of report is a function `(findings, colour) -> str`; `FORMATS` has all of them by name.
"""

import json
import os
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist._usage import counted
from jax_dist.lint.engine.linter import RULES
from jax_dist.lint.model.findings import Finding, Position, Safety
from jax_dist.lint.model.sources import display

_WIDEST = 160  # columns of a source line; a longer one is cut around what is found
_BEFORE = 40  # columns that are kept before it then
_BOLD, _RED, _CYAN, _BLUE, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[36m", "\x1b[1;34m", "\x1b[0m"


def summary(findings: Sequence[Finding]) -> str:
    """Return such as `Found 3 findings in 2 files (1 fixable with --fix).`"""
    if not findings:
        return "No findings."
    files = len({finding.path for finding in findings})
    safe = sum(finding.safety is Safety.SAFE for finding in findings)
    unsafe = sum(finding.safety is Safety.UNSAFE for finding in findings)
    ways = [f"{safe} fixable with --fix"] if safe else []
    ways += [f"{unsafe} {'more' if safe else 'fixable'} with --unsafe-fixes"] if unsafe else []
    end = f" ({', '.join(ways)})." if ways else "."
    return f"Found {counted(len(findings), 'finding')} in {counted(files, 'file')}{end}"


def _text(findings: Sequence[Finding], colour: bool) -> str:  # noqa: FBT001 - a table of functions
    """For people: a block for each finding."""
    return "\n".join(_block(finding, colour=colour) for finding in findings)


def _place(finding: Finding) -> str:
    start = finding.start
    cell = f"cell {start.cell}:" if start.cell is not None else ""
    return f"{cell}{start.line}:{start.column}:"


def _block(finding: Finding, *, colour: bool) -> str:
    def paint(text: str, sign: str) -> str:
        return f"{sign}{text}{_PLAIN}" if colour else text

    mark = paint("[*] ", _CYAN) if finding.safety is Safety.SAFE else ""
    path, code = paint(display(finding.path), _BOLD), paint(finding.code, _RED)
    lines = [f"{path}:{_place(finding)} {code} {mark}{display(finding.message)}"]
    number = str(finding.start.line)
    blank = " " * len(number)
    if finding.line_text.strip():
        shown, before, width = _cut(finding)
        bar = paint("|", _BLUE)
        lines += [
            f"{paint(number, _BLUE)} {bar} {shown}",
            f"{blank} {bar} {' ' * before}{paint('^' * width, _RED)}",
        ]
    if finding.fix:
        title = display(finding.fix.title) + _HOW[finding.fix.safety]
        lines.append(f"{blank} {paint('help:', _CYAN)} {title}")
    return "\n".join(lines) + "\n"


_HOW = {Safety.SAFE: "", Safety.UNSAFE: " (--unsafe-fixes)", Safety.DISPLAY: " (by hand)"}


def _cut(finding: Finding) -> tuple[str, int, int]:
    """Return the line as shown, the columns before what was found, and those that it takes."""
    text = finding.line_text.rstrip()
    one_line = finding.end.line == finding.start.line and finding.end.cell == finding.start.cell
    first = finding.start.column - 1
    last = finding.end.column - 1 if one_line else len(text)
    if text.startswith("…"):  # of a very long line, the part from what was found on
        first, last = 1, last - first + 1
    first, last = min(first, len(text)), min(last, len(text))
    cells = [_visible(character) for character in text]
    columns = [_columns(cell) for cell in cells]
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


def _visible(character: str) -> str:
    """Return four blanks for a tab, and a sign for what would move the cursor."""
    if character == "\t":
        return "    "
    return character if character.isprintable() or unicodedata.combining(character) else "�"


def _columns(cell: str) -> int:
    if len(cell) > 1:
        return len(cell)
    if unicodedata.combining(cell):
        return 0
    return 2 if unicodedata.east_asian_width(cell) in "WF" else 1


def _concise(findings: Sequence[Finding], colour: bool) -> str:  # noqa: FBT001
    """For editors and `grep`: a line for each finding."""
    del colour
    return "".join(
        f"{display(finding.path)}:{_place(finding)} {finding.code} {display(finding.message)}\n"
        for finding in findings
    )


def _json(findings: Sequence[Finding], colour: bool) -> str:  # noqa: FBT001
    """For programs: one array; lines, columns and cells count from 1, bytes from 0."""
    del colour
    entries = [
        {
            "path": finding.path,
            "code": finding.code,
            "name": finding.name,
            "message": finding.message,
            "start": _position(finding.start),
            "end": _position(finding.end),
            "bytes": list(finding.span),
            "line": finding.line_text,
            "fix": finding.fix
            and {
                "title": finding.fix.title,
                "safety": str(finding.fix.safety),
                "edits": [
                    {"bytes": [edit.start, edit.end], "text": edit.text}
                    for edit in finding.fix.edits
                ],
                "imports": list(finding.fix.imports),
            },
        }
        for finding in findings
    ]
    return json.dumps(entries, indent=2) + "\n"


def _position(position: Position) -> dict[str, Any]:
    entry = {"line": position.line, "column": position.column}
    return entry if position.cell is None else {"cell": position.cell, **entry}


def _github(findings: Sequence[Finding], colour: bool) -> str:  # noqa: FBT001
    """For GitHub Actions: workflow commands, which become annotations of the changed lines."""
    del colour
    lines: list[str] = []
    for finding in findings:
        start, end = finding.start, finding.end
        message = finding.message
        if start.cell is not None:  # GitHub knows no cells: the first line of the file
            message = f"cell {start.cell}, line {start.line}: {message}"
            start = end = Position(1, 1)
        properties = {
            "title": f"jax-dist ({finding.code})",
            "file": display(_as_seen_from_here(finding.path)),
            "line": str(start.line),
            "endLine": str(end.line),
        }
        if start.line == end.line:  # GitHub takes columns only within one line
            properties |= {"col": str(start.column), "endColumn": str(end.column)}
        quoted = (
            f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}"
            for name, value in properties.items()
        )
        rule = RULES[finding.code]
        level = "warning" if rule.default else "notice"
        level = "error" if finding.code == _codes.SYNTAX_ERROR else level
        lines.append(f"::{level} {','.join(quoted)}::{_escape(f'{finding.code} {message}')}\n")
    return "".join(lines)


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _as_seen_from_here(path: str) -> str:
    inside = os.path.relpath(path) if os.path.isabs(path) else os.path.normpath(path)
    return (os.path.abspath(path) if inside.startswith("..") else inside).replace(os.sep, "/")


FORMATS: dict[str, Callable[[Sequence[Finding], bool], str]] = {
    "text": _text,
    "concise": _concise,
    "json": _json,
    "github": _github,
}
