"""A Jupyter notebook as one Python text, and back.

The text is that of all code cells in Python, each below a comment that marks where it begins.
Edited lines are spliced into the JSON, so that every other byte stays as it was.
"""

import bisect
import codecs
import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import magics
from jax_dist.lint.model.findings import Position
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError

_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """One code cell in Python."""

    number: int  # among all cells, from 1
    lines: list[tuple[str, int, int]]  # of its source, each with its place in the JSON
    place: tuple[int, int]  # of its source in the JSON
    hidden: str  # what stands before its Python: a line such as `%%time`
    start: int  # of its Python, in bytes of the code


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook; positions count cells from 1, and lines within a cell."""

    raw: str = ""  # the file
    marker: str = ""  # begins the comment above each cell
    cells: tuple[_Cell, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [cell.start for cell in self.cells]

    def position(self, offset: int) -> Position:
        place = super().position(offset)
        if not self.cells:
            return place
        cell = self.cells[max(bisect.bisect_right(self._starts, offset) - 1, 0)]
        above = super().position(cell.start).line - cell.hidden.count("\n")
        # On the comment above a cell, which is in no cell: its first line.
        return Position(max(1, place.line - above + 1), place.column, cell.number)

    def written(self, code: bytes) -> bytes:
        """Return the notebook's bytes once `code` is in the place of its code.

        Raises:
          ValueError: the marks between the cells are not what they were.
        """
        mark = rf"(?:\A|\n){re.escape(self.marker)} \d+\n"
        above, *texts = re.split(mark, code.decode("utf-8", "surrogatepass"))
        if len(texts) != len(self.cells):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        texts[:1] = [above + "\n" * bool(above) + each for each in texts[:1]]
        pieces, at = [], 0
        for cell, text in zip(self.cells, texts, strict=True):
            start, end, new = _splice(self.raw, cell, cell.hidden + text)
            pieces += (self.raw[at:start], new)
            at = end
        data = "".join((*pieces, self.raw[at:])).encode()
        return codecs.BOM_UTF8 + data if self.bom else data

    def edited(self, code: bytes) -> "Notebook":
        """Return the notebook as it will be read once `code` is in the place of its code.

        Raises:
          ParseError: a cell would be no Python that is now.
        """
        after = read_notebook(self.path, self.written(code))
        if len(after.unparsed) > len(self.unparsed):
            raise after.unparsed[0]
        return after


def _splice(raw: str, cell: _Cell, text: str) -> tuple[int, int, str]:
    """Return what of the JSON gives way to which text, so that the cell's source is `text`."""
    old, (start, end) = cell.lines, cell.place
    if text == "".join(line for line, _, _ in old):
        return start, start, ""
    if raw[start] != "[":
        return start, end, _quoted(text, raw)
    new = magics.lines_of(text)
    kept = 0  # lines at the beginning, and then at the end, that stay as they are
    while kept < min(len(old), len(new)) and old[kept][0] == new[kept]:
        kept += 1
    last = 0
    while last < min(len(old), len(new)) - kept and old[-1 - last][0] == new[-1 - last]:
        last += 1
    between = f",{raw[start + 1 : old[0][1]]}" if old else ", "
    between = raw[old[0][2] : old[1][1]] if len(old) > 1 else between
    first, stop = kept, len(old) - last
    texts = [raw[one:two] for _, one, two in old[:first]]
    texts += [_quoted(each, raw) for each in new[first : len(new) - last]]
    texts += [raw[one:two] for _, one, two in old[stop:]]
    inside = (old[0][1], old[-1][2]) if old else (start + 1, end - 1)
    return *inside, between.join(texts)


def _quoted(text: str, raw: str) -> str:
    is_utf8 = text.encode("utf-8", "replace") == text.encode("utf-8", "surrogatepass")
    return json.dumps(text, ensure_ascii=raw.isascii() or not is_utf8)


def read_notebook(path: str, data: bytes) -> Notebook:
    """Return the Python cells of a notebook of format 4 or later; none if its language is another.

    Raises:
      UnreadableError: it is no notebook.
    """
    try:
        raw = data.decode("utf-8-sig")
        sources = list(_sources(raw, json.loads(raw)))
    except (ValueError, RecursionError) as error:  # also what json and decoding raise
        raise UnreadableError(f"the file is no notebook: {error}") from error
    marker = "# cell"  # which no cell holds
    while any(f"{marker} " in line for _, lines, _ in sources for line, _, _ in lines):
        marker += "'"
    code, python, unparsed = bytearray(), bytearray(), []
    cells: list[_Cell] = []
    for number, lines, place in sources:
        text = "".join(line for line, _, _ in lines)
        start = magics.body_start(text)
        if start is None:
            continue
        mark = f"{marker} {number}\n".encode()
        mark = b"\n" + mark if cells else mark
        cells.append(_Cell(number, lines, place, text[:start], len(code) + len(mark)))
        body = text[start:].encode("utf-8", "surrogatepass")
        try:
            shown = magics.hidden(text[start:]).encode()
        except (ParseError, UnicodeEncodeError) as error:  # the latter: half of a surrogate pair
            if not isinstance(error, ParseError):
                error = ParseError("it holds half of a character")
            shown = re.sub(rb"[^\r\n]", b" ", body)  # so that the others still are parsed
            above = code.count(b"\n") + mark.count(b"\n")
            unparsed.append(ParseError(error.message, above + error.line, error.column))
        code += mark + body
        python += mark + shown
    bom = data.startswith(codecs.BOM_UTF8)
    texts = (bytes(code), bytes(python))
    return Notebook(path, *texts, "utf-8", bom, raw, marker, tuple(cells), tuple(unparsed))


def _sources(raw: str, book: Any) -> Iterator[tuple[int, list[tuple[str, int, int]], Any]]:
    """Yield the number of each Python cell, its lines, and where its source stands."""
    match book:
        case {"worksheets": _}:
            raise ValueError("it is of a format before 4: jupyter nbconvert --to notebook")
        case {"cells": list(cells)} if all(isinstance(cell, dict) for cell in cells):
            pass
        case _:
            raise ValueError("it has no list of cells")
    match book.get("metadata"):
        case {"language_info": {"name": str(language)}} if language:
            pass
        case {"kernelspec": {"language": str(language)}} if language:
            pass
        case _:
            language = "python"
    if language.lower() not in ("python", "ipython"):
        return
    (begin,) = [at for key, _, at, _ in _items(raw, _skip(raw, 0)) if key == "cells"][-1:]
    for number, (_, cell, at, _) in enumerate(_items(raw, begin), start=1):
        if cell.get("cell_type") != "code" or "source" not in cell or not _is_python(cell):
            continue
        _, source, start, end = [each for each in _items(raw, at) if each[0] == "source"][-1]
        if isinstance(source, str):
            yield number, [(source, start, end)], (start, end)
        elif isinstance(source, list) and all(isinstance(line, str) for line in source):
            lines = [(line, one, two) for _, line, one, two in _items(raw, start)]
            yield number, lines, (start, end)
        else:
            raise ValueError(f"the source of cell {number} is no text")


def _is_python(cell: dict[str, Any]) -> bool:
    match cell.get("metadata"):
        case {"vscode": {"languageId": language}}:
            return language == "python"
    return True


def _items(raw: str, at: int) -> Iterator[tuple[Any, Any, int, int]]:
    """Yield the key (None in an array), value, start and end of what a JSON container holds."""
    is_object = raw[at] == "{"
    at = _skip(raw, at + 1)
    while raw[at] not in "]}":
        key = None
        if is_object:
            key, at = _decode(raw, at)
            at = _skip(raw, _skip(raw, at) + 1)
        value, end = _decode(raw, at)
        yield key, value, at, end
        at = _skip(raw, end)
        at = _skip(raw, at + 1) if raw[at] == "," else at


def _skip(raw: str, at: int) -> int:
    match = _SPACE.match(raw, at)
    assert match is not None
    return match.end()
