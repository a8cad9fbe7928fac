"""Where the code stands in the JSON of a notebook, and how a line of it is changed there."""

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_BLANK = re.compile(r"[ \t\r\n]*")
# One character of a string in JSON, and the newline among them.
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)
_NEWLINES = ("\\n", "\\u000a", "\\u000A")
_decode = json.JSONDecoder().raw_decode


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of code and the characters `[start, end)` of the JSON that spell it."""

    text: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell of code.

    Its pieces are its lines: strings of a list, or what lies between the newlines of one string.
    """

    number: int  # among all cells, from 1
    text: str
    start: int = 0  # of the value that holds the code, in characters of the JSON
    end: int = 0
    pieces: tuple[Piece, ...] = ()  # empty where a string of the list is not exactly one line
    is_list: bool = False
    begin: int = 0  # of the whole cell

    def place(self, line: int) -> int:
        """Where a line of the cell, counted from 1, stands in the JSON."""
        return self.pieces[line - 1].start if 0 < line <= len(self.pieces) else self.start


def cells_of(raw: str) -> list[Cell]:
    """The cells with Python code, of formats 3 and 4.

    Raises:
      ValueError: this is no notebook.
    """
    top = dict(_members(raw, _skip(raw, 0)))
    cells: list[tuple[int, tuple[int, dict[str, int]]]] = []
    if "cells" in top:
        cells += enumerate(_objects(raw, top["cells"]), start=1)
    elif "worksheets" in top:  # format 3
        sheets = _objects(raw, top["worksheets"])
        cells += enumerate(
            (cell for _, sheet in sheets for cell in _objects(raw, sheet.get("cells"))), start=1
        )
    else:
        raise ValueError("it has neither cells nor worksheets")
    if not _is_python(_value(raw, top.get("metadata"))):
        return []
    return [cell for number, at in cells if (cell := _cell(raw, number, *at)) is not None]


def spliced(
    raw: str, changes: Iterable[tuple[Cell, str]], cells: Iterable[tuple[Cell, str]] = ()
) -> str:
    """The JSON with new code in some cells, and with new cells.

    Args:
      raw: the JSON.
      changes: each cell and its new code.
      cells: the code of each new cell, and the one that it stands below.
    """
    ascii_only = raw.isascii()
    edits = [
        edit for cell, text in changes for edit in _edits(raw, cell, text, ascii_only=ascii_only)
    ]
    edits += (_new_cell(raw, above, text) for above, text in cells)
    edits.sort()
    pieces: list[str] = []
    at = 0
    for start, end, text in edits:
        pieces += (raw[at:start], text)
        at = end
    return "".join((*pieces, raw[at:]))


def _new_cell(raw: str, above: Cell, text: str) -> tuple[int, int, str]:
    """A cell like the one above it: of the same format, and written in the same way."""
    start, end = above.begin, _decode(raw, above.begin)[1]
    members = dict(_members(raw, start))
    is_old = "input" in members  # format 3
    made: dict[str, Any] = {"cell_type": "code"}
    if "id" in members:
        made["id"] = f"jax-dist-migrate-{above.number}"
    made |= {"language": "python", "prompt_number": None} if is_old else {"execution_count": None}
    lines = _lines(text)
    made |= {"metadata": {}, "outputs": []}
    made["input" if is_old else "source"] = lines if above.is_list else "".join(lines)
    made = dict(sorted(made.items()))
    line = raw.rfind("\n", 0, start) + 1
    indent = _blank_at(raw, line)
    if line + len(indent) != start:  # not on a line of its own: all in one line
        return end, end, ", " + json.dumps(made, ensure_ascii=raw.isascii())
    inner = raw[start + 1 : _skip(raw, start + 1)].rpartition("\n")[2]
    step = max(len(inner) - len(indent), 1)
    spelled = json.dumps(made, indent=step, ensure_ascii=raw.isascii()).replace("\n", f"\n{indent}")
    return end, end, f",\n{indent}{spelled}"


def _edits(raw: str, cell: Cell, text: str, *, ascii_only: bool) -> Iterator[tuple[int, int, str]]:
    lines = _lines(text)
    if not cell.pieces:  # the whole value, as Jupyter would write it
        yield cell.start, cell.end, _whole(raw, cell, lines, ascii_only=ascii_only)
        return
    spelled = [json.dumps(line, ensure_ascii=ascii_only) for line in lines]
    spelled = spelled if cell.is_list else [line[1:-1] for line in spelled]
    between = _between(raw, cell)
    old = [piece.text for piece in cell.pieces]
    matcher = difflib.SequenceMatcher(None, old, lines, autojunk=False)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind != "equal":
            yield _edit(cell.pieces, first, last, spelled[new_first:new_last], between)


def _edit(
    pieces: Sequence[Piece], first: int, last: int, new: Sequence[str], between: str
) -> tuple[int, int, str]:
    """Puts the strings `new` in the place of `pieces[first:last]`."""
    text = between.join(new)
    if first == last == len(pieces):
        return pieces[-1].end, pieces[-1].end, between + text
    if first == last:
        return pieces[first].start, pieces[first].start, text + between
    if new or last - first == len(pieces):
        return pieces[first].start, pieces[last - 1].end, text
    if last < len(pieces):
        return pieces[first].start, pieces[last].start, ""
    return pieces[first - 1].end, pieces[-1].end, ""


def _between(raw: str, cell: Cell) -> str:
    """What stands between two strings of the list."""
    if not cell.is_list:
        return ""
    first, *others = cell.pieces
    if others:
        return raw[first.end : others[0].start]
    return "," + raw[cell.start + 1 : first.start]


def _whole(raw: str, cell: Cell, lines: Sequence[str], *, ascii_only: bool) -> str:
    if not cell.is_list:
        return json.dumps("".join(lines), ensure_ascii=ascii_only)
    line = raw.rfind("\n", 0, cell.start) + 1
    indent = raw[line : line + len(_blank_at(raw, line))]
    inner = f"\n{indent} " if line else " "
    body = f",{inner}".join(json.dumps(line, ensure_ascii=ascii_only) for line in lines)
    outer = f"\n{indent}" if line else ""
    return f"[{inner}{body}{outer}]"


def _cell(raw: str, number: int, begin: int, at: dict[str, int]) -> Cell | None:
    start = at.get("source", at.get("input"))  # "input" in format 3
    if start is None or _value(raw, at.get("cell_type")) != "code":
        return None
    if _value(raw, at.get("language")) not in (None, "python"):  # format 3
        return None
    metadata = _value(raw, at.get("metadata"))
    editor = metadata.get("vscode") if isinstance(metadata, dict) else None
    if isinstance(editor, dict) and editor.get("languageId", "python") != "python":
        return None
    value, end = _decode(raw, start)
    if isinstance(value, str):
        pieces = tuple(_lines_of_string(raw, start + 1, end - 1))
        return Cell(number, value, start, end, pieces, is_list=False, begin=begin)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise ValueError(f"the source of cell {number} is no text")
    text = "".join(value)
    pieces = tuple(_strings_of_list(raw, start)) if value == _lines(text) else ()
    return Cell(number, text, start, end, pieces, is_list=True, begin=begin)


def _is_python(metadata: Any) -> bool:
    """Said by the kernel or by the language; a notebook that says neither is taken for Python."""
    if not isinstance(metadata, dict):
        return True
    kernel, language = metadata.get("kernelspec"), metadata.get("language_info")
    named = [
        language.get("name") if isinstance(language, dict) else None,
        kernel.get("language") if isinstance(kernel, dict) else None,
    ]
    said = [name.lower() for name in named if isinstance(name, str) and name]
    return not said or said[0] in ("python", "ipython")


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _lines_of_string(raw: str, start: int, end: int) -> Iterator[Piece]:
    first = start
    for unit in _UNIT.finditer(raw, start, end):
        if unit[0] in _NEWLINES:
            yield _piece(raw, first, unit.end())
            first = unit.end()
    if first < end:
        yield _piece(raw, first, end)


def _piece(raw: str, start: int, end: int) -> Piece:
    return Piece(json.loads(f'"{raw[start:end]}"'), start, end)


def _strings_of_list(raw: str, start: int) -> Iterator[Piece]:
    for at in _elements(raw, start):
        value, end = _decode(raw, at)
        yield Piece(value, at, end)


def _value(raw: str, at: int | None) -> Any:
    return None if at is None else _decode(raw, at)[0]


def _objects(raw: str, at: int | None) -> list[tuple[int, dict[str, int]]]:
    """Of the list at `at`: where each object begins, and where the values of its members do."""
    if at is None:
        return []
    return [(place, dict(_members(raw, place))) for place in _elements(raw, at)]


def _members(raw: str, at: int) -> Iterator[tuple[str, int]]:
    """Of the object at `at`: each key, and where its value begins."""
    at = _past(raw, at, "{")
    while raw[at : at + 1] != "}":
        key, at = _decode(raw, at)
        at = _past(raw, _skip(raw, at), ":")
        yield key, at
        at = _past_value(raw, at, "}")


def _elements(raw: str, at: int) -> Iterator[int]:
    """Of the list at `at`: where each element begins."""
    at = _past(raw, at, "[")
    while raw[at : at + 1] != "]":
        yield at
        at = _past_value(raw, at, "]")


def _past_value(raw: str, at: int, close: str) -> int:
    """The next value or key, or the closing bracket."""
    at = _skip(raw, _decode(raw, at)[1])
    return at if raw[at : at + 1] == close else _past(raw, at, ",")


def _past(raw: str, at: int, sign: str) -> int:
    if raw[at : at + 1] != sign:
        raise ValueError(f"{sign!r} expected at character {at}")
    return _skip(raw, at + 1)


def _skip(raw: str, at: int) -> int:
    return at + len(_blank_at(raw, at))


def _blank_at(raw: str, at: int) -> str:
    blank = _BLANK.match(raw, at)
    return blank[0] if blank else ""
