"""A Jupyter notebook as one Python text, and back.

The text joins all code cells in Python, each below a comment that marks where it begins.
Edited lines are spliced into the JSON, so that every other byte stays as it was.
"""

import bisect
import codecs
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.findings import Position
from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError

_MARK = re.compile(r"(?:\A|\n|(?<=\n))# cell \d+\n")  # the last: below an emptied cell
_CELL_MAGIC = re.compile(rb"\s*%%(\w*).*\n?")
# Their body runs as Python in the notebook's own namespace; that of all others is not looked at.
_PYTHON_BODIES = (b"capture", b"debug", b"prun", b"px", b"time", b"timeit")
# At the beginning of a line, or behind `name =`. What `%timeit -n 5 f(x)` runs is code.
_MAGIC = re.compile(
    rb"(?m)^([ \t]*|[^#'\"()=\n]*=[ \t]*)(?:(%?time(?:it)?(?: +-\w+ ?\d*)* )(?=[\w(\[])"
    rb"|(?:%%?\w|!(?!=)|(?<![ \t])% \w)(?:.*\\\r?\n)*.*|\?.*|[\w.]+\?\??(?=[ \t\r]*$))"
)
# A string of the JSON; group 1 is the colon behind a key.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"(\s*:)?', re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """One code cell in Python."""

    number: int  # among all cells, from 1
    start: int  # the byte of `Notebook.code` at which it begins
    lines: list[slice]  # where the string of each line stands in the JSON
    is_list: bool  # True: the JSON has a list of lines; False: one string


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook; positions count cells from 1, and lines within a cell."""

    raw: str = ""  # the file
    cells: tuple[_Cell, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    def position(self, offset: int) -> Position:
        """Return the cell of a byte of the code, and the line and column within that cell."""
        in_text = super().position(offset)
        count = bisect.bisect_right(self.cells, offset, key=lambda cell: cell.start)
        cell = self.cells[max(count - 1, 0)]
        first_line = super().position(cell.start).line
        return Position(max(1, in_text.line - first_line + 1), in_text.column, cell.number)

    def written(self, code: bytes) -> bytes:
        """Return the notebook's bytes with new code; raise ValueError if an edit joined cells."""
        above, *texts = _MARK.split(code.decode())
        if len(texts) != len(self.cells):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        if above:  # what an edit added above the first mark belongs to the first cell
            texts[0] = f"{above}\n{texts[0]}"
        pieces, end = [], 0  # of the new file; where the cell before ends in the old one
        for cell, text in zip(self.cells, texts, strict=True):
            pieces += (self.raw[end : cell.lines[0].start], _cell_json(self.raw, cell, text))
            end = cell.lines[-1].stop
        return "".join((*pieces, self.raw[end:])).encode(self.encoding)

    def edit(self, code: bytes) -> "Notebook":
        """Return the notebook with new code; raise ParseError if a cell is no longer Python."""
        after = read_notebook(self.path, self.written(code))
        if len(after.unparsed) > len(self.unparsed):
            raise after.unparsed[0]
        return after


def _cell_json(raw: str, cell: _Cell, text: str) -> str:
    """Return the JSON of a cell whose source becomes `text`, such as `"a = 1\\n", "b = 2"`.

    Lines that stay keep their JSON in the file `raw`, which may have other escapes than Python's.
    """
    first, last = cell.lines[0], cell.lines[-1]
    if text == _decode(raw, cell.lines):
        return raw[first.start : last.stop]
    encode = lambda line: json.dumps(line, ensure_ascii=raw.isascii())
    if not cell.is_list:
        return encode(text)
    old_json = {json.loads(raw[place]): raw[place] for place in cell.lines}
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    new_json = [old_json.get(line) or encode(line) for line in lines]
    if len(cell.lines) > 1:  # the comma and the blanks between two lines, as they are
        return raw[first.stop : cell.lines[1].start].join(new_json)
    blanks = raw[raw.rindex("[", 0, first.start) + 1 : first.start]  # behind the bracket
    return f",{blanks or ' '}".join(new_json)


def read_notebook(path: str, data: bytes) -> Notebook:
    """Return the Python cells of a notebook of format 4 or later, or raise UnreadableError."""
    try:
        raw = data.decode("utf-8-sig")
        cells_and_texts = [(cell, _decode(raw, cell.lines).encode()) for cell in _code_cells(raw)]
    except (TypeError, ValueError, RecursionError) as error:  # also of json and decoding
        raise UnreadableError(f"the file is no notebook: {error}") from error
    code, python = bytearray(), bytearray()  # `python` has blanks for magics, as `%matplotlib`
    cells, unparsed = [], []
    for cell, text in cells_and_texts:
        mark = b"%s# cell %d\n" % (b"\n" if cells else b"", cell.number)
        try:
            parsed_text = _without_magics(text)
        except ParseError as error:
            parsed_text = _blank(text)  # so that the other cells still are parsed
            lines_above = code.count(b"\n") + mark.count(b"\n")
            unparsed.append(ParseError(error.message, lines_above + error.line, error.column))
        if parsed_text is not None:  # else it is in another language, such as `%%bash`
            cells.append(dataclasses.replace(cell, start=len(code) + len(mark)))
            code += mark + text
            python += mark + parsed_text
    encoding = "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else "utf-8"
    return Notebook(path, bytes(code), bytes(python), encoding, raw, tuple(cells), tuple(unparsed))


def _code_cells(raw: str) -> Iterator[_Cell]:
    """Yield a `_Cell`, with `start` 0, for each code cell that is not empty, in any language.

    To learn where the lines of a cell stand, `{"source": ["x = 1"]}` is parsed with each string but
    the keys replaced by its place in the file: `{"source": ["12:19"]}`.
    """
    # Only a key has a group 1: the colon behind it.
    with_places = lambda match: match[0] if match[1] else f'"{match.start()}:{match.end()}"'
    book = json.loads(_STRING.sub(with_places, raw))
    if not isinstance(book, dict) or not isinstance(book.get("cells"), list):
        raise ValueError("it has no list of cells")
    for number, cell in enumerate(book["cells"], start=1):
        match cell:
            case {"cell_type": str() as kind, "source": [_, *_] | str() as source}:
                is_list = isinstance(source, list)
                lines = list(map(_slice, source if is_list else [source]))
                if raw[_slice(kind)] == '"code"':
                    yield _Cell(number, 0, lines, is_list)


def _slice(place: Any) -> slice:
    """Return "start:end" as a slice."""
    if not isinstance(place, str):
        raise TypeError("a line of a cell is no text")
    return slice(*map(int, place.split(":")))


def _decode(raw: str, slices: list[slice]) -> str:
    """Return the joined text of the JSON strings at some slices of the file."""
    return "".join(json.loads(raw[place]) for place in slices)


def _without_magics(code: bytes) -> bytes | None:
    """Return a cell with blanks in place of its magics, such as `%matplotlib inline`.

    None if a cell magic such as `%%bash` makes it no Python. Raises ParseError.
    """
    head = _CELL_MAGIC.match(code)
    if head is not None:
        if head[1] not in _PYTHON_BODIES:
            return None
        code = _blank(head[0]) + code[head.end() :]
    if sources.parses(code):
        return code
    code = _MAGIC.sub(_blank_magic, code)
    sources.parse(code)
    return code


def _blank_magic(magic: re.Match[bytes]) -> bytes:
    """Return blanks of a magic's length, with the expression `_` where one may be needed."""
    before, timed = magic[1], magic[2]
    if timed:  # `%timeit f(x)` becomes `_      ;f(x)`
        return before + b"_" + b" " * (len(timed) - 2) + b";"
    return before + (b"_" if before else b" ") + _blank(magic[0][len(before) + 1 :])


def _blank(text: bytes) -> bytes:
    """Return a text of the same length that is blank but for the line ends."""
    return re.sub(rb"[^\r\n]", b" ", text)
