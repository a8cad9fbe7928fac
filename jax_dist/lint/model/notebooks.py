"""A Jupyter notebook as one Python text, and back.

The text is that of all code cells in Python, each behind a comment that marks where it begins, so
that the cells can be told apart once it was edited. The JSON is written again in the layout that it
has, which leaves all but the edited lines as they were in what Jupyter, Colab and VS Code write.
IPython's own syntax is hidden (`magics`).
"""

import bisect
import codecs
import dataclasses
import functools
import json
import re
from typing import Any

from jax_dist.lint.model import magics
from jax_dist.lint.model.findings import Position
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One cell in the code."""

    number: int  # among all cells, from 1
    hidden: str  # what stands before its Python: a line such as `%%time`
    start: int  # of its Python, in bytes of the code


@dataclasses.dataclass(frozen=True)
class Notebook(Source):
    """The Python cells of one notebook.

    Positions count all cells, also those of prose, from 1, and the lines within the cell.
    """

    data: bytes = b""  # the file
    marker: str = ""  # begins the comment before each cell
    parts: tuple[_Part, ...] = ()
    unparsed: tuple[ParseError, ...] = ()  # of cells that are no Python; blank in `python`

    def position(self, offset: int) -> Position:
        place = super().position(offset)
        if not self.parts:
            return place
        part = self.parts[max(bisect.bisect_right(self._starts, offset) - 1, 0)]
        above = super().position(part.start).line - part.hidden.count("\n")
        # On the comment before a cell, which is in no cell: its first line.
        return Position(max(1, place.line - above + 1), place.column, part.number)

    def new_cell(self, offset: int) -> tuple[int, str] | None:
        below = max(bisect.bisect_right(self._starts, offset), 1)
        end = len(self.code)
        if below < len(self.parts):
            mark = _mark(self.marker, self.parts[below].number, first=False)
            end = self.parts[below].start - len(mark.encode())
        return end, f"\n{self.marker} {_NEW}\n"

    def written(self, code: bytes) -> bytes:
        """The notebook's bytes once `code` is in the place of its code.

        Raises:
          ValueError: the marks between the cells are not what they were.
        """
        if code == self.code:
            return self.data
        texts = self._texts(code)
        if len(texts) != len(self.parts):
            raise ValueError(f"an edit reaches over the end of a cell of {self.path}")
        raw = self.data.decode("utf-8-sig")
        book = json.loads(raw)
        for part, whole in reversed(list(zip(self.parts, texts, strict=True))):
            text, *new = whole.split(f"\n{self.marker} {_NEW}\n")
            cell = book["cells"][part.number - 1]
            text = part.hidden + text
            if text != _text_of(cell, part.number):
                cell["source"] = _source(text, cell)
            book["cells"][part.number : part.number] = [
                _new_cell(each, cell, part.number) for each in new
            ]
        # Half of a surrogate pair cannot be encoded: it is spelled as JSON does, as it was.
        written = _like(raw, book).encode("utf-8", "backslashreplace")
        return codecs.BOM_UTF8 + written if self.bom else written

    def edited(self, code: bytes) -> "Notebook":
        """The notebook as it will be read once `code` is in the place of its code.

        Raises:
          ParseError: a cell would be no Python that is now.
        """
        found = read_notebook(self.path, self.written(code))
        if len(found.unparsed) > len(self.unparsed):
            raise found.unparsed[0]
        return found

    def _texts(self, code: bytes) -> list[str]:
        text = code.decode("utf-8", "surrogatepass")
        texts: list[str] = []
        for index, part in reversed(list(enumerate(self.parts))):
            text, mark, cell = text.rpartition(_mark(self.marker, part.number, first=not index))
            if not mark:
                return []
            texts.append(cell)
        if texts:
            texts[-1] = text + texts[-1]  # what was put above the first mark
        return texts[::-1]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [part.start for part in self.parts]


_NEW = "+"  # in the place of a number: a cell that the notebook has not yet


def read_notebook(path: str, data: bytes) -> Notebook:
    """The Python cells of a notebook of format 4 or later; none of one in another language.

    Raises:
      UnreadableError: it is no notebook.
    """
    try:
        cells = _cells_of(json.loads(data.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:  # also what json and decoding raise
        raise UnreadableError(f"the file is no notebook: {error}") from error
    marker = "# cell"  # which no cell holds
    while any(marker + " " in text for text in cells.values()):
        marker += "'"
    code, python = b"", b""
    parts: list[_Part] = []
    unparsed: list[ParseError] = []
    for number, text in cells.items():
        start = magics.body_start(text)
        if start is None:
            continue
        mark = _mark(marker, number, first=not parts).encode()
        parts.append(_Part(number, text[:start], len(code + mark)))
        body, shown, error = text[start:], b"", None
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
    bom = data.startswith(codecs.BOM_UTF8)
    return Notebook(path, code, python, "utf-8", bom, data, marker, tuple(parts), tuple(unparsed))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _mark(marker: str, number: int, *, first: bool) -> str:
    return f"{marker} {number}\n" if first else f"\n{marker} {number}\n"


def _cells_of(book: Any) -> dict[int, str]:
    """The cells with Python code, by their number.

    Raises:
      ValueError: this is no notebook.
    """
    match book:
        case {"worksheets": _}:
            raise ValueError(
                "it is of a format before 4, which `jupyter nbconvert --to notebook` converts"
            )
        case {"cells": list(cells)} if all(isinstance(cell, dict) for cell in cells):
            pass
        case _:
            raise ValueError("it has no list of cells")
    match book.get("metadata"):
        case {"language_info": {"name": str(language)}} if language:
            pass
        case {"kernelspec": {"language": str(language)}} if language:
            pass
        case _:  # one that says neither is taken for Python
            language = "python"
    if language.lower() not in ("python", "ipython"):
        return {}
    return {
        number: _text_of(cell, number)
        for number, cell in enumerate(cells, start=1)
        if cell.get("cell_type") == "code" and "source" in cell and _is_python(cell)
    }


def _is_python(cell: dict[str, Any]) -> bool:
    match cell.get("metadata"):
        case {"vscode": {"languageId": language}}:
            return language == "python"
    return True


def _text_of(cell: dict[str, Any], number: int) -> str:
    match cell["source"]:
        case str(text):
            return text
        case list(lines) if all(isinstance(line, str) for line in lines):
            return "".join(lines)
    raise ValueError(f"the source of cell {number} is no text")


def _source(text: str, like: dict[str, Any]) -> str | list[str]:
    """A cell's code as another cell has it: one string, or its lines."""
    return text if isinstance(like["source"], str) else magics.lines_of(text)


def _new_cell(text: str, above: dict[str, Any], number: int) -> dict[str, Any]:
    """A cell of the same format as the one above it."""
    made: dict[str, Any] = {"cell_type": "code", "execution_count": None}
    if "id" in above:
        made["id"] = f"jax-dist-migrate-{number}"
    return {**made, "metadata": {}, "outputs": [], "source": _source(text, above)}


def _like(raw: str, book: Any) -> str:
    """The notebook as JSON, laid out and escaped as `raw` is."""
    indented = re.search(r"\n([ \t]+)", raw)
    text = json.dumps(book, indent=indented and indented[1], ensure_ascii=raw.isascii())
    for sign in "<>&'":  # which Colab used to escape
        escaped = f"\\u{ord(sign):04x}"
        if escaped in raw and sign not in raw:
            text = text.replace(sign, escaped)
    newline = "\r\n" if "\r\n" in raw else "\n"
    return text.replace("\n", newline) + raw[len(raw.rstrip()) :]
