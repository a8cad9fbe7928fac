"""Prints a report for a terminal of 80 columns; a notebook shows the same text.

Nothing here knows what is reported: a report is a headline and sections, a section is a title and
parts, and each kind of part knows its lines.
"""

import dataclasses
import html
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Protocol

_WIDTH = 80
_BAR = 40  # columns of the longest bar
_LABEL = 20  # of the longest label
_INDENT = "  "
_INSIDE = _WIDTH - len(_INDENT)  # of a section


class Part(Protocol):
    def lines(self) -> Iterator[str]:
        """For a terminal, without the indent of the section."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReportEntry:
    """A label, what it stands for, and details below."""

    label: str
    text: str
    details: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        label = _elided(self.label, _LABEL) + _INDENT if self.label else ""
        yield from _wrapped(label + self.text, _INSIDE, hanging=len(label))
        for detail in self.details:
            start = len(label) or len(_INDENT)
            yield from _wrapped(" " * start + detail, _INSIDE, hanging=start + len(_INDENT))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: int  # how many of the last columns are set flush right
    notes: tuple[str, ...] = ()  # one a row, or none at all

    def lines(self) -> Iterator[str]:
        columns = zip(self.header, *self.rows, strict=True)
        widths = [max(map(len, column)) for column in columns]
        words = len(widths) - self.numbers
        room = _INSIDE - len(_INDENT) * (len(widths) - 1)
        # Columns of words give way until the line fits.
        while sum(widths) > room and max(widths[:words]) > 1:
            widths[widths.index(max(widths[:words]))] -= 1
        for place, row in enumerate((self.header, *self.rows)):
            short = [_elided(cell, width) for cell, width in zip(row, widths, strict=True)]
            cells = [
                cell.ljust(width) if column < words else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(short, widths, strict=True))
            ]
            yield _INDENT.join(cells).rstrip()
            if self.notes and place:
                note = _INDENT + self.notes[place - 1]
                yield from _wrapped(note, _INSIDE, hanging=len(_INDENT))


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """Amounts, drawn to one scale."""

    rows: tuple[tuple[str, float, str], ...]  # label, amount, the amount in words

    def lines(self) -> Iterator[str]:
        labels = min(max(len(label) for label, _, _ in self.rows), _LABEL)
        words = max(len(text) for _, _, text in self.rows)
        for label, amount, text in self.rows:
            # Of full blocks and one of an eighth to seven; what is not nothing is seen.
            share = self._share(amount)
            eighths = max(round(share * _BAR * 8), 1 if share else 0)
            bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
            yield f"{_elided(label, labels):<{labels}}  {bar:<{_BAR}}  {text:>{words}}"

    def _share(self, amount: float) -> float:
        return amount / (max(amount for _, amount, _ in self.rows) or 1)


def aligned(entries: Iterable[ReportEntry]) -> tuple[ReportEntry, ...]:
    """The entries with labels of one length."""
    every = tuple(entries)
    width = max((len(entry.label) for entry in every), default=0)
    return tuple(dataclasses.replace(each, label=each.label.ljust(width)) for each in every)


class Printed:
    """A report that is printed: the same text at a prompt, and in a notebook."""

    __slots__ = ()

    @property
    def headline(self) -> str:
        raise NotImplementedError

    def sections(self) -> Iterator[Section]:
        """What is printed below the headline."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = _wrapped(self.headline, _WIDTH, hanging=len(_INDENT))
        for section in self.sections():
            lines += ["", section.title]
            lines += [_INDENT + line for part in section.parts for line in part.lines()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _elided(text: str, width: int) -> str:
    """
    >>> _elided("self.layers[0].kernel", 12)
    'self.l…ernel'
    """
    if len(text) <= width:
        return text
    behind = (width - 1) // 2
    return text[: width - 1 - behind] + "…" + text[len(text) - behind :]


def plain(value: object) -> object:
    """The same as dicts and lists, for JSON."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    return value


def _wrapped(text: str, width: int, *, hanging: int) -> list[str]:
    """Lines of a paragraph; a number stays with its unit."""
    joined = _AMOUNT.sub("\\1\N{NO-BREAK SPACE}\\2", text)
    lines = textwrap.wrap(joined, width, subsequent_indent=" " * hanging, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


_AMOUNT = re.compile(r"(\d) ([kMGT]?B)\b")
