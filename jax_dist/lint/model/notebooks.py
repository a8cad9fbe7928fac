"""A Jupyter notebook as one Python text, and back.

The text is that of all code cells in Python, each below a comment that marks where it begins.
Edited lines are spliced into the JSON, so that every other byte stays as it was.
"""

import bisect
import codecs
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Position
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError

_MARK = re.compile(r"(?:\A|\n)# cell \d+\n")
_CELL_MAGIC = re.compile(rb"\s*%%(\w*).*\n?")
# Their body runs as Python in the notebook's own namespace; that of all others is not looked at.
_PYTHON_BODIES = (b"capture", b"debug", b"prun", b"px", b"time", b"timeit")
# At the beginning of a line, or behind `name =`. What `%timeit -n 5 f(x)` runs is code.
_MAGIC = re.compile(
    rb"(?m)^([ \t]*|[^#'\"()=\n]*=[ \t]*)(?:(%?time(?:it)?(?: +-\w+ ?\d*)* )(?=[\w(\[])"
    rb"|(?:%%?\w|!(?!=)|(?<![ \t])% \w)(?:.*\\\r?\n)*.*|\?.*|[\w.]+\?\??(?=[ \t\r]*$))"
)
# Of the JSON, with the colon behind a key.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?', re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """One code cell in Python."""

    number: int  # among all cells, from 1
    start: int  # in bytes of the code
    lines: list[slice]  # the places of their strings in the JSON
    is_list: bool  # whether the JSON has a list of lines, or one string


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook; positions count cells from 1, and lines within a cell."""

    raw: str = ""  # the file
    cells: tuple[_Cell, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    def position(self, offset: int) -> Position:
        place = super().position(offset)
        after = bisect.bisect_right(self.cells, offset, key=lambda cell: cell.start)
        cell = self.cells[max(after - 1, 0)]
        first = super().position(cell.start).line
        return Position(max(1, place.line - first + 1), place.column, cell.number)

    def written(self, code: bytes) -> bytes:
        """Return the notebook's bytes once `code` is in the place of its code.

        Raises:
          ValueError: the marks between the cells are not what they were.
        """
        above, *texts = _MARK.split(code.decode())
        if len(texts) != len(self.cells):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        if above:
            texts[0] = f"{above}\n{texts[0]}"
        pieces, at = [], 0
        for cell, text in zip(self.cells, texts, strict=True):
            pieces += (self.raw[at : cell.lines[0].start], _spliced(self.raw, cell, text))
            at = cell.lines[-1].stop
        return "".join((*pieces, self.raw[at:])).encode(self.encoding)

    def edited(self, code: bytes) -> "Notebook":
        """Return the notebook once `code` is in the place of its code.

        Raises:
          ParseError: a cell would be no Python that is now.
        """
        after = read_notebook(self.path, self.written(code))
        if len(after.unparsed) > len(self.unparsed):
            raise after.unparsed[0]
        return after


def _spliced(raw: str, cell: _Cell, text: str) -> str:
    """Return the JSON of a cell's source once it is `text`; lines that stay are not respelled."""
    places = cell.lines
    spelled = {json.loads(raw[place]): raw[place] for place in places}
    if text == _decoded(raw, places):
        return raw[places[0].start : places[-1].stop]
    if not cell.is_list:
        return json.dumps(text, ensure_ascii=raw.isascii())
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    new = [spelled.get(line) or json.dumps(line, ensure_ascii=raw.isascii()) for line in lines]
    if len(places) > 1:
        return raw[places[0].stop : places[1].start].join(new)
    blanks = raw[raw.rindex("[", 0, places[0].start) + 1 : places[0].start]
    return f",{blanks or ' '}".join(new)


def read_notebook(path: str, data: bytes) -> Notebook:
    """Return the Python cells of a notebook of format 4 or later.

    Raises:
      UnreadableError: it is no notebook.
    """
    try:
        raw = data.decode("utf-8-sig")
        texts = [(cell, _decoded(raw, cell[1]).encode()) for cell in _cells(raw)]
    except (TypeError, ValueError, RecursionError) as error:  # also of json and decoding
        raise UnreadableError(f"the file is no notebook: {error}") from error
    code, python, unparsed = bytearray(), bytearray(), []
    cells: list[_Cell] = []
    for (number, lines, is_list), text in texts:
        mark = b"\n" * bool(cells) + b"# cell %d\n" % number
        try:
            shown = _parsable(text)
        except ParseError as error:
            shown = _blank(text)  # so that the others still are parsed
            above = code.count(b"\n") + mark.count(b"\n")
            unparsed.append(ParseError(error.message, above + error.line, error.column))
        if shown is not None:
            cells.append(_Cell(number, len(code) + len(mark), lines, is_list))
            code += mark + text
            python += mark + shown
    encoding = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    return Notebook(path, bytes(code), bytes(python), encoding, raw, tuple(cells), tuple(unparsed))


def _cells(raw: str) -> Iterator[tuple[int, list[slice], bool]]:
    """Yield the number of each code cell that is not empty, and the places of its lines."""
    book = json.loads(_STRING.sub(_place, raw))
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError("it has no list of cells")
    for number, cell in enumerate(book["cells"], start=1):
        match cell:
            case {"cell_type": str() as kind, "source": [_, *_] | str() as source}:
                is_list = isinstance(source, list)
                lines = list(map(_slice, source if is_list else [source]))
                if raw[_slice(kind)] == '"code"':
                    yield number, lines, is_list


def _place(string: re.Match[str]) -> str:
    """Return a string that says where a string of the JSON is; keys stay as they are."""
    return string[0] if string[1] else f'"{string.start()}:{string.end()}"'


def _slice(place: Any) -> slice:
    if not isinstance(place, str):
        raise TypeError("a line of a cell is no text")
    return slice(*map(int, place.split(":")))


def _decoded(raw: str, places: list[slice]) -> str:
    return "".join(json.loads(raw[place]) for place in places)


def _parsable(code: bytes) -> bytes | None:
    """Return a cell without its magics, of the same size; None where it is in another language.

    Raises:
      ParseError: also without its magics it is no Python.
    """
    head = _CELL_MAGIC.match(code)
    if head is not None:
        if head[1] not in _PYTHON_BODIES:
            return None
        code = _blank(head[0]) + code[head.end() :]
    if sources.parses(code):
        return code
    code = _MAGIC.sub(_hide, code)
    sources.parse(code)
    return code


def _hide(magic: re.Match[bytes]) -> bytes:
    """Return blanks for a magic; `_`, whose value nobody knows, where a statement may be needed."""
    before, timed = magic[1], magic[2]
    if timed:
        return before + b"_" + b" " * (len(timed) - 2) + b";"
    return before + (b"_" if before else b" ") + _blank(magic[0][len(before) + 1 :])


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", text)
