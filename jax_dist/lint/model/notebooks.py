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

_decode = json.JSONDecoder().raw_decode
_SPACES = re.compile(r"[ \t\r\n]*")

_CELL_MAGIC = re.compile(rb"\s*%%(\w*).*\n?")
# Their body runs as Python in the notebook's own namespace; that of all others is not looked at.
_PYTHON_BODIES = (b"capture", b"debug", b"prun", b"px", b"time", b"timeit")
# The code behind such a magic and its options runs: `%timeit -n 5 f(x)`.
_RUNS = re.compile(
    rb"(?m)^([ \t]*)(%?(?:time|timeit|prun)(?:[ \t]+-\w+(?:[ \t]*\d+)?)*)[ \t](?=[ \t]*[\w(\[])"
)
_ASSIGNED = re.compile(rb"(?m)^([^#'\"()=\n]*?=[ \t]*)[%!](?!=)(?:.*\\\r?\n)*.*")
_LINE_MAGIC = re.compile(
    rb"(?m)^([ \t]*)(?:%[\w%]|(?<![ \t])% \w|!(?!=)|\?{1,2}[\w%]|[%\w.]+\?{1,2}[ \t]*$"
    rb"|(?:pip|conda|cd|ls|cat|cp|mv|rm|mkdir|pwd)\b(?![ \t]*[=(.\[,:]))(?:.*\\\r?\n)*.*"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """One code cell in Python."""

    number: int  # among all cells, from 1
    start: int  # in bytes of the code
    place: tuple[int, int]  # of its source in the JSON
    lines: list[tuple[str, int, int]]  # of its source, each with its place in the JSON


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook; positions count cells from 1, and lines within a cell."""

    raw: str = ""  # the file
    marker: str = ""  # begins the comment above each cell
    cells: tuple[_Cell, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    def position(self, offset: int) -> Position:
        place = super().position(offset)
        if not self.cells:
            return place
        after = bisect.bisect_right(self.cells, offset, key=lambda cell: cell.start)
        cell = self.cells[max(after - 1, 0)]
        first = super().position(cell.start).line
        return Position(max(1, place.line - first + 1), place.column, cell.number)

    def written(self, code: bytes) -> bytes:
        """Return the notebook's bytes once `code` is in the place of its code.

        Raises:
          ValueError: the marks between the cells are not what they were.
        """
        mark = rf"(?:\A|\n){re.escape(self.marker)} \d+\n"
        above, *texts = re.split(mark, code.decode())
        if len(texts) != len(self.cells):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        if above:
            texts[0] = f"{above}\n{texts[0]}"
        pieces, at = [], 0
        for cell, text in zip(self.cells, texts, strict=True):
            pieces += (self.raw[at : cell.place[0]], _spliced(self.raw, cell, text))
            at = cell.place[1]
        data = "".join((*pieces, self.raw[at:])).encode()
        return codecs.BOM_UTF8 + data if self.bom else data

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
    (start, end), old = cell.place, cell.lines
    if text == "".join(line for line, _, _ in old):
        return raw[start:end]
    if raw[start] != "[":
        return json.dumps(text, ensure_ascii=raw.isascii())
    spelled = {line: raw[one:two] for line, one, two in old}
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    new = [spelled.get(line) or json.dumps(line, ensure_ascii=raw.isascii()) for line in lines]
    first, last = (old[0][1], old[-1][2]) if old else (start + 1, end - 1)
    between = raw[old[0][2] : old[1][1]] if len(old) > 1 else f",{raw[start + 1 : first] or ' '}"
    return raw[start:first] + between.join(new) + raw[last:end]


def read_notebook(path: str, data: bytes) -> Notebook:
    """Return the Python cells of a notebook of format 4 or later; none if its language is another.

    Raises:
      UnreadableError: it is no notebook.
    """
    try:
        raw = data.decode("utf-8-sig")
        found = [(*each, "".join(line for line, _, _ in each[2]).encode()) for each in _cells(raw)]
    except (TypeError, ValueError, RecursionError) as error:  # also of json and decoding
        raise UnreadableError(f"the file is no notebook: {error}") from error
    marker = "# cell"  # which no cell holds
    while any(f"{marker} ".encode() in text for *_, text in found):
        marker += "'"
    code, python, unparsed = bytearray(), bytearray(), []
    cells: list[_Cell] = []
    for number, place, lines, text in found:
        mark = f"{marker} {number}\n".encode()
        mark = b"\n" + mark if cells else mark
        try:
            shown = _parsable(text)
        except ParseError as error:
            shown = _blank(text)  # so that the others still are parsed
            above = code.count(b"\n") + mark.count(b"\n")
            unparsed.append(ParseError(error.message, above + error.line, error.column))
        if shown is not None:
            cells.append(_Cell(number, len(code) + len(mark), place, lines))
            code += mark + text
            python += mark + shown
    bom = data.startswith(codecs.BOM_UTF8)
    texts = (bytes(code), bytes(python))
    return Notebook(path, *texts, "utf-8", bom, raw, marker, tuple(cells), tuple(unparsed))


def _cells(raw: str) -> Iterator[tuple[int, tuple[int, int], list[tuple[str, int, int]]]]:
    """Yield the number of each Python cell, where its source stands, and the lines of that."""
    book = json.loads(raw)
    match book:
        case {"metadata": {"language_info": {"name": str(name)}}}:
            language = name
        case {"metadata": {"kernelspec": {"language": str(name)}}}:
            language = name
        case {"cells": [*_]}:
            language = "python"
        case _:
            raise ValueError("it has no list of cells")
    if language.lower() not in ("python", "ipython"):
        return
    (begin,) = [at for key, _, at, _ in _items(raw, _skip(raw, 0)) if key == "cells"][-1:]
    for number, (_, cell, at, _) in enumerate(_items(raw, begin), start=1):
        match cell:
            case {"metadata": {"vscode": {"languageId": other}}} if other != "python":
                continue
            case {"cell_type": "code", "source": str() | [*_] as source}:
                (place,) = [each[2:] for each in _items(raw, at) if each[0] == "source"][-1:]
                is_text = isinstance(source, str)
                items = [(None, source, *place)] if is_text else _items(raw, place[0])
                yield number, place, [(line, one, two) for _, line, one, two in items]


def _items(raw: str, at: int) -> Iterator[tuple[Any, Any, int, int]]:
    """Yield the key (None in an array), value, start and end of what a JSON container holds."""
    is_object = raw[at] == "{"
    at = _skip(raw, at + 1)
    while raw[at] not in "]}":
        key = None
        if is_object:
            key, at = _decode(raw, at)
            at = _skip(raw, raw.index(":", at) + 1)
        value, end = _decode(raw, at)
        yield key, value, at, end
        at = _skip(raw, end)
        at = _skip(raw, at + (raw[at] == ","))


def _skip(raw: str, at: int) -> int:
    """Return the place behind blanks."""
    match = _SPACES.match(raw, at)
    return at if match is None else match.end()


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
    code = _RUNS.sub(lambda found: found[1] + _name_and(found[2]) + b";", code)
    code = _ASSIGNED.sub(lambda found: found[1] + _name_and(found[0][len(found[1]) :]), code)
    code = _LINE_MAGIC.sub(_hide, code)
    sources.parse(code)
    return code


def _hide(magic: re.Match[bytes]) -> bytes:
    """Return blanks; in a block, where it may be the only statement, a name before them."""
    indent = magic[1]
    return indent + _name_and(magic[0][len(indent) :]) if indent else _blank(magic[0])


def _name_and(text: bytes) -> bytes:
    """Return `_`, whose value nobody knows, and blanks."""
    return b"_" + _blank(text[1:])


def _blank(text: bytes) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", text)
