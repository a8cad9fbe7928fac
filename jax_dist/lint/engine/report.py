"""Findings as a report: text for people, JSON for programs, and commands for GitHub Actions."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_dist import _codes
from jax_dist._usage import counted
from jax_dist.errors import display_path
from jax_dist.lint.engine.linter import RULES
from jax_dist.lint.findings import Finding, Position, Safety
from jax_dist.lint.model.sources import display

_BOLD, _RED, _CYAN, _BLUE, _PLAIN = "\x1b[1m", "\x1b[1;31m", "\x1b[36m", "\x1b[1;34m", "\x1b[0m"
_HOW = {Safety.SAFE: "", Safety.UNSAFE: " (--unsafe-fixes)", Safety.DISPLAY: " (by hand)"}


def summary(findings: Sequence[Finding]) -> str:
    """Return such as `Found 3 findings in 2 files (1 fixable with --fix).`"""
    if not findings:
        return "No findings."
    files = len({finding.path for finding in findings})
    counts = Counter(finding.safety for finding in findings)
    safe, unsafe = counts[Safety.SAFE], counts[Safety.UNSAFE]
    options = [f"{safe} fixable with --fix"] if safe else []
    if unsafe:
        options.append(f"{unsafe} {'more' if safe else 'fixable'} with --unsafe-fixes")
    end = f" ({', '.join(options)})." if options else "."
    return f"Found {counted(len(findings), 'finding')} in {counted(files, 'file')}{end}"


def format_report(findings: Sequence[Finding], form: str, *, color: bool = False) -> str:
    """Return the report on the findings of all files.

    `form` is "text", a block for each finding, for people; "concise", a line for each, for editors
    and `grep`; "json", the fields of `Finding`, in which lines, columns and cells count from 1, and
    bytes from 0; "github", workflow commands, which annotate the changed lines.
    """
    if form == "json":
        objects = (json.dumps(finding, default=_fields) for finding in findings)
        return "[" + ",\n ".join(objects) + "]\n"
    if form == "text":
        return "\n".join(_block(finding, color=color) for finding in findings)
    if form == "github":
        return "".join(map(_command, findings))
    places = ((finding, _place(finding)) for finding in findings)
    return "".join(f"{place} {item.code} {display(item.message)}\n" for item, place in places)


def _fields(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, which is faster than `dataclasses.asdict`."""
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}


def _place(finding: Finding, path: str = "") -> str:
    """Return such as "train.py:3:1:", or "a.ipynb:cell 2:3:1:"; `path` is the path in color."""
    start = finding.start
    cell = f"cell {start.cell}:" if start.cell is not None else ""
    return f"{path or display(finding.path)}:{cell}{start.line}:{start.column}:"


def _block(finding: Finding, *, color: bool) -> str:
    """Return the finding, its source line with a row of "^" below, and what its fix does."""

    def paint(text: str, sign: str) -> str:
        return f"{sign}{text}{_PLAIN}" if color else text

    mark = paint("[*] ", _CYAN) if finding.safety is Safety.SAFE else ""
    path, code = paint(display(finding.path), _BOLD), paint(finding.code, _RED)
    lines = [f"{_place(finding, path)} {code} {mark}{display(finding.message)}"]
    number = str(finding.start.line)
    margin = " " * len(number)
    if finding.line_text.strip():
        line, before, width = _marked_line(finding)
        bar = paint("|", _BLUE)
        lines.append(f"{paint(number, _BLUE)} {bar} {line}")
        lines.append(f"{margin} {bar} {' ' * before}{paint('^' * width, _RED)}")
    if finding.fix:
        title = display(finding.fix.title) + _HOW[finding.fix.safety]
        lines.append(f"{margin} {paint('help:', _CYAN)} {title}")
    return "\n".join(lines) + "\n"


def _marked_line(finding: Finding) -> tuple[str, int, int]:
    """Return a finding's source line, the columns before the finding, and its width in columns."""
    text, start, end = finding.line_text.rstrip(), finding.start, finding.end
    first, last = start.column - 1, end.column - 1
    if text.startswith("…"):  # of a long line, the text begins at the finding
        first, last = 1, last - first + 1
    if (end.cell, end.line) != (start.cell, start.line):  # it goes on below this line
        last = len(text)
    before, marked, after = map(_visible, (text[:first], text[first:last], text[last:]))
    return before + marked + after, len(before), max(len(marked), 1)


def _visible(text: str) -> str:
    """Return a text with four blanks for each tab, and U+FFFD for unprintable characters."""
    text = text.replace("\t", "    ")
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def _command(finding: Finding) -> str:
    """Return the workflow command by which GitHub annotates the place of a finding."""
    start, end, message = finding.start, finding.end, finding.message
    if start.cell is not None:  # GitHub knows no cells: the first line of the file
        message = f"cell {start.cell}, line {start.line}: {message}"
        start = end = Position(1, 1)
    properties = {
        "title": f"jax-dist ({finding.code})",
        "file": display(display_path(finding.path).replace(os.sep, "/")),
        "line": str(start.line),
        "endLine": str(end.line),
    }
    if start.line == end.line:  # GitHub takes columns only within one line
        properties |= {"col": str(start.column), "endColumn": str(end.column)}
    quoted = ",".join(
        f"{name}={_escape(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in properties.items()
    )
    level = "warning" if RULES[finding.code].default else "notice"
    level = "error" if finding.code == _codes.SYNTAX_ERROR else level
    return f"::{level} {quoted}::{_escape(f'{finding.code} {message}')}\n"


def _escape(text: str) -> str:
    """Return a text with the escapes of GitHub's workflow commands."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
