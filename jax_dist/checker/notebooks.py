"""A Jupyter notebook as one Python text, and back with only the edited lines changed.

The text is that of all code cells in Python, each behind a comment that marks where it begins, so
that the cells can be told apart once it was edited. The notebook's JSON is never rewritten:
the lines that changed are put into its bytes, and all other bytes stay.
"""

import bisect
import codecs
import dataclasses
import functools
import re
from collections.abc import Sequence

from jax_dist.checker import magics
from jax_dist.checker.findings import Position
from jax_dist.checker.notebook_json import Cell, cells_of, spliced
from jax_dist.checker.parsing import ParseError
from jax_dist.checker.sources import Source, UnreadableError


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

    def ends_cell(self, offset: int) -> bool:
        """Whether the comment before the next cell begins here."""
        return bool(self.marker) and self.code.startswith(f"{self.marker} ".encode(), offset)

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
        written = spliced(self.raw, changes, cells).encode("utf-8", "surrogatepass")
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
    """The Python cells; none of a notebook in another language.

    Args:
      path: as the user gave it.
      data: the file, of notebook format 3 or later.

    Raises:
      UnreadableError: it is no notebook.
    """
    bom = data.startswith(codecs.BOM_UTF8)
    try:
        raw = (data[len(codecs.BOM_UTF8) :] if bom else data).decode("utf-8")
        cells = cells_of(raw)
    except (ValueError, RecursionError) as error:  # also what json and decoding raise
        raise UnreadableError(f"the file is no notebook: {error}") from error
    return joined(path, cells, raw=raw, bom=bom)


def joined(path: str, cells: Sequence[Cell], *, raw: str = "", bom: bool = False) -> Notebook:
    """The notebook that has these cells; without `raw` it can be checked, but not written."""
    marker = _marker(cells)
    code, python = b"", b""
    parts: list[_Part] = []
    unparsed: list[ParseError] = []
    for cell in cells:
        start = magics.body_start(cell.text)
        if start is None:
            continue
        mark = _mark(marker, cell, first=not parts).encode()
        parts.append(_Part(cell, cell.text[:start], len(code + mark)))
        body = cell.text[start:]
        shown, error = _shown(body)
        if error:
            above = (code + mark).count(b"\n")
            unparsed.append(ParseError(error.message, above + error.line, error.column))
        code += mark + _bytes(body)
        python += mark + shown
    return Notebook(
        path=path,
        code=code,
        python=python,
        bom=bom,
        raw=raw,
        marker=marker,
        parts=tuple(parts),
        unparsed=tuple(unparsed),
    )


def _shown(body: str) -> tuple[bytes, ParseError | None]:
    """What is parsed of a cell; a cell that cannot be is blank, so that the others still are."""
    try:
        return magics.hidden(body).encode(), None
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return _blank(_bytes(body)), ParseError("it holds half of a character")
    except ParseError as error:
        return _blank(_bytes(body)), error


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _blank(code: bytes) -> bytes:
    return re.sub(rb"[^\r\n]", b" ", code)


def _marker(cells: Sequence[Cell]) -> str:
    """A comment that no cell holds."""
    marker = "# cell"
    while any(marker + " " in cell.text for cell in cells):
        marker += "'"
    return marker


def _mark(marker: str, cell: Cell, *, first: bool) -> str:
    return f"{marker} {cell.number}\n" if first else f"\n{marker} {cell.number}\n"
