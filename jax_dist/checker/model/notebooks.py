"""A Jupyter notebook as one Python text, and back with only the edited lines changed.

The text is that of all code cells in Python, each behind a comment that marks where it begins, so
that the cells can be told apart once it was edited. The notebook's JSON is never rewritten:
the lines that changed are put into its bytes, and all other bytes stay. IPython's own syntax is
hidden (`magics`).
"""

import bisect
import codecs
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax_dist.checker.model import magics
from jax_dist.checker.model.findings import Position
from jax_dist.checker.model.sources import ParseError, Source, UnreadableError


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
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
    pieces: tuple[_Piece, ...] = ()  # empty where a string of the list is not exactly one line
    is_list: bool = False
    begin: int = 0  # of the whole cell

    def place(self, line: int) -> int:
        """Where a line of the cell, counted from 1, stands in the JSON."""
        return self.pieces[line - 1].start if 0 < line <= len(self.pieces) else self.start


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One cell in the code."""

    cell: Cell
    hidden: str  # what stands before its Python: a line such as `%%time`
    start: int  # of its Python, in bytes of the code


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook.

    Positions count all cells, also those of prose, from 1, and the lines within the cell.
    """

    raw: str = ""  # the JSON, without a byte order mark
    marker: str = ""  # begins the comment before each cell
    parts: tuple[_Part, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    def position(self, offset: int) -> Position:
        part = self._part(offset)
        if part is None:
            return super().position(offset)
        place = super().position(offset)
        above = super().position(part.start).line - part.hidden.count("\n")
        # On the comment before a cell, which is in no cell: its first line.
        return Position(max(1, place.line - above + 1), place.column, part.cell.number)

    def line_in_file(self, offset: int) -> int:
        """The line of the JSON on which the line of code stands that holds `offset`."""
        part = self._part(offset)
        if part is None:
            return 1
        return self.raw.count("\n", 0, part.cell.place(self.position(offset).line)) + 1

    def new_cell(self, offset: int) -> tuple[int, str] | None:
        below = max(bisect.bisect_right(self._starts, offset), 1)
        end = len(self.code)
        if below < len(self.parts):
            mark = _mark(self.marker, self.parts[below].cell, first=False)
            end = self.parts[below].start - len(mark.encode())
        return end, f"\n{self.marker} {_NEW}\n"

    def written(self, code: bytes) -> bytes:
        """The notebook's bytes once `code` is in the place of its code.

        Raises:
          ValueError: the marks between the cells are not what they were.
        """
        texts = self._texts(code)
        if len(texts) != len(self.parts):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        changes: list[tuple[Cell, str]] = []
        cells: list[tuple[Cell, str]] = []
        for part, text in zip(self.parts, texts, strict=True):
            text, *new = text.split(f"\n{self.marker} {_NEW}\n")
            cells += ((part.cell, each) for each in new)
            if part.hidden + text != part.cell.text:
                changes.append((part.cell, part.hidden + text))
        written = _bytes(_spliced(self.raw, changes, cells))
        return codecs.BOM_UTF8 + written if self.bom else written

    def edited(self, code: bytes) -> "Notebook":
        """The notebook as it will be read once `code` is in the place of its code."""
        return read_notebook(self.path, self.written(code))

    def _texts(self, code: bytes) -> list[str]:
        text = code.decode("utf-8", "surrogatepass")
        texts: list[str] = []
        for index, part in reversed(list(enumerate(self.parts))):
            text, mark, cell = text.rpartition(_mark(self.marker, part.cell, first=not index))
            if not mark:
                return []
            texts.append(cell)
        if texts:
            texts[-1] = text + texts[-1]  # what was put above the first mark
        return texts[::-1]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]

    def _part(self, offset: int) -> _Part | None:
        index = bisect.bisect_right(self._starts, offset) - 1
        return self.parts[max(index, 0)] if self.parts else None


_NEW = "+"  # in the place of a number: a cell that the notebook has not yet


def read_notebook(path: str, data: bytes) -> Notebook:
    """The Python cells of a notebook of format 4 or later; none of one in another language.

    Raises:
      UnreadableError: it is no notebook.
    """
    bom = data.startswith(codecs.BOM_UTF8)
    try:
        raw = (data[len(codecs.BOM_UTF8) :] if bom else data).decode("utf-8")
        cells = _cells_of(raw)
    except (ValueError, RecursionError) as error:  # also what json and decoding raise
        raise UnreadableError(f"the file is no notebook: {error}") from error
    return joined(path, cells, raw=raw, bom=bom)


def joined(path: str, cells: Sequence[Cell], *, raw: str = "", bom: bool = False) -> Notebook:
    """The notebook that has these cells; without `raw` it can be checked, but not written."""
    marker = "# cell"  # which no cell holds
    while any(marker + " " in cell.text for cell in cells):
        marker += "'"
    code, python = b"", b""
    parts: list[_Part] = []
    unparsed: list[ParseError] = []
    for cell in cells:
        start = magics.body_start(cell.text)
        if start is None:
            continue
        mark = _mark(marker, cell, first=not parts).encode()
        parts.append(_Part(cell, cell.text[:start], len(code + mark)))
        body, shown, error = cell.text[start:], b"", None
        try:
            shown = magics.hidden(body).encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
            error = ParseError("it holds half of a character")
        except ParseError as said:
            error = said
        if error:  # it is blank, so that the others still are parsed
            shown = re.sub(rb"[^\r\n]", b" ", _bytes(body))
            above = (code + mark).count(b"\n")
            unparsed.append(ParseError(error.message, above + error.line, error.column))
        code += mark + _bytes(body)
        python += mark + shown
    return Notebook(path, code, python, "utf-8", bom, raw, marker, tuple(parts), tuple(unparsed))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _mark(marker: str, cell: Cell, *, first: bool) -> str:
    return f"{marker} {cell.number}\n" if first else f"\n{marker} {cell.number}\n"


_BLANK = re.compile(r"[ \t\r\n]*")
# One character of a string in JSON, and the newline among them.
_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)
_NEWLINES = ("\\n", "\\u000a", "\\u000A")
_decode = json.JSONDecoder().raw_decode


def _cells_of(raw: str) -> list[Cell]:
    """The cells with Python code.

    Raises:
      ValueError: this is no notebook.
    """
    top = dict(_members(raw, _skip(raw, 0)))
    if "worksheets" in top:
        raise ValueError(
            "it is of a format before 4, which `jupyter nbconvert --to notebook` converts"
        )
    if "cells" not in top:
        raise ValueError("it has no cells")
    match _value(raw, top.get("metadata")):
        case {"language_info": {"name": str(language)}} if language:
            pass
        case {"kernelspec": {"language": str(language)}} if language:
            pass
        case _:  # one that says neither is taken for Python
            language = "python"
    if language.lower() not in ("python", "ipython"):
        return []
    objects = _objects(raw, top["cells"])
    cells = (_cell(raw, number, *at) for number, at in enumerate(objects, start=1))
    return [cell for cell in cells if cell is not None]


def _spliced(
    raw: str, changes: Iterable[tuple[Cell, str]], cells: Iterable[tuple[Cell, str]] = ()
) -> str:
    """The JSON with new code in some cells, and with new cells, each below one that is named."""
    edits = [(cell.start, cell.end, _spelled(raw, cell, text)) for cell, text in changes]
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
    made: dict[str, Any] = {"cell_type": "code", "execution_count": None}
    if "id" in members:
        made["id"] = f"jax-dist-migrate-{above.number}"
    lines = magics.lines_of(text)
    made |= {"metadata": {}, "outputs": [], "source": lines if above.is_list else "".join(lines)}
    made = dict(sorted(made.items()))
    line = raw.rfind("\n", 0, start) + 1
    indent = _blank_at(raw, line)
    if line + len(indent) != start:  # not on a line of its own: all in one line
        return end, end, ", " + json.dumps(made, ensure_ascii=raw.isascii())
    inner = raw[start + 1 : _skip(raw, start + 1)].rpartition("\n")[2]
    step = max(len(inner) - len(indent), 1)
    spelled = json.dumps(made, indent=step, ensure_ascii=raw.isascii()).replace("\n", f"\n{indent}")
    return end, end, f",\n{indent}{spelled}"


def _spelled(raw: str, cell: Cell, text: str) -> str:
    """The value that holds a cell's code, with new code; lines that stay are spelled as before."""
    pieces = cell.pieces
    known = {piece.text: raw[piece.start : piece.end] for piece in pieces}
    cut = slice(None) if cell.is_list else slice(1, -1)  # without the quotes
    lines = [
        known.get(line) or json.dumps(line, ensure_ascii=raw.isascii())[cut]
        for line in magics.lines_of(text)
    ]
    if not cell.is_list:
        return f'"{"".join(lines)}"'
    if pieces:
        first = raw[cell.start + 1 : pieces[0].start]
        last = raw[pieces[-1].end : cell.end - 1]
        between = raw[pieces[0].end : pieces[1].start] if len(pieces) > 1 else f",{first}"
    else:  # as Jupyter would write it
        line = raw.rfind("\n", 0, cell.start) + 1
        last = f"\n{_blank_at(raw, line)}" if line else ""
        first = f"{last} "
        between = f",{first}"
    return f"[{first}{between.join(lines)}{last}]"


def _cell(raw: str, number: int, begin: int, at: dict[str, int]) -> Cell | None:
    start = at.get("source")
    if start is None or _value(raw, at.get("cell_type")) != "code":
        return None
    match _value(raw, at.get("metadata")):
        case {"vscode": {"languageId": language}} if language != "python":
            return None
    value, end = _decode(raw, start)
    if isinstance(value, str):
        pieces = tuple(_lines_of_string(raw, start + 1, end - 1))
        return Cell(number, value, start, end, pieces, is_list=False, begin=begin)
    if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
        raise ValueError(f"the source of cell {number} is no text")
    pieces, text = (), "".join(value)
    if value == magics.lines_of(text):
        decoded = ((at, _decode(raw, at)) for at in _elements(raw, start))
        pieces = tuple(_Piece(line, at, end) for at, (line, end) in decoded)
    return Cell(number, text, start, end, pieces, is_list=True, begin=begin)


def _lines_of_string(raw: str, start: int, end: int) -> Iterator[_Piece]:
    units = _UNIT.finditer(raw, start, end)
    ends = [unit.end() for unit in units if unit[0] in _NEWLINES]
    for first, last in itertools.pairwise(dict.fromkeys((start, *ends, end))):
        yield _Piece(json.loads(f'"{raw[first:last]}"'), first, last)


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
