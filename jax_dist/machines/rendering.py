"""Prints a report for a terminal of 80 columns and for a notebook, from the same parts.

Nothing here knows what is reported: a report is a headline and sections, a section is a title and
parts, and each kind of part knows its two forms.
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

    def html(self) -> str:
        """For a notebook, with every style in place: a page around it may have its own."""
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

    def html(self) -> str:
        label = f"<b>{html.escape(self.label)}</b> " if self.label else ""
        details = "".join(f"<div {_DETAIL}>{html.escape(detail)}</div>" for detail in self.details)
        return f"<div>{label}{html.escape(self.text)}{details}</div>"


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

    def html(self) -> str:
        header = "".join(self._html_cell("th", *pair) for pair in enumerate(self.header))
        rows = [
            "".join(self._html_cell("td", *pair) for pair in enumerate(row)) for row in self.rows
        ]
        for place, note in enumerate(self.notes):
            rows[place] += f"<td {_WORD}>{html.escape(note)}</td>"
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table {_TABLE}><tr>{header}</tr>{body}</table>"

    def _html_cell(self, tag: str, column: int, cell: str) -> str:
        style = _NUMBER if column >= len(self.header) - self.numbers else _WORD
        return f"<{tag} {style}>{html.escape(cell)}</{tag}>"


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

    def html(self) -> str:
        rows = "".join(
            f"<tr><td {_WORD}>{html.escape(label)}</td><td {_WORD}>"
            f'<div style="width:{round(200 * self._share(amount))}px;{_FILLED}"></div></td>'
            f"<td {_NUMBER}>{html.escape(text)}</td></tr>"
            for label, amount, text in self.rows
        )
        return f"<table {_TABLE}>{rows}</table>"


def aligned(entries: Iterable[ReportEntry]) -> tuple[ReportEntry, ...]:
    """The entries with labels of one length."""
    every = tuple(entries)
    width = max((len(entry.label) for entry in every), default=0)
    return tuple(dataclasses.replace(each, label=each.label.ljust(width)) for each in every)


def as_text(headline: str, sections: Iterable[Section]) -> str:
    """No line is longer than 80 columns."""
    lines = _wrapped(headline, _WIDTH, hanging=len(_INDENT))
    for section in sections:
        lines += ["", section.title]
        lines += [_INDENT + line for part in section.parts for line in part.lines()]
    return "\n".join(lines)


def as_html(headline: str, sections: Iterable[Section]) -> str:
    """One element, in the colours of the page around it."""
    body = "".join(
        f"<div {_TITLE}>{html.escape(section.title)}</div>"
        + "".join(part.html() for part in section.parts)
        for section in sections
    )
    return f"<div {_PAGE}><div><b>{html.escape(headline)}</b></div>{body}</div>"


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
# Colours that are seen on white and on black; everything else is the page's own.
_PAGE = 'style="font-family:monospace;font-size:90%;line-height:1.4"'
_TITLE = 'style="margin-top:0.8em;font-weight:bold;opacity:0.7"'
_DETAIL = 'style="margin-left:2em;opacity:0.8"'
_TABLE = 'style="border-collapse:collapse;margin:0.2em 0"'
_EDGE = "padding:0.1em 0.8em 0.1em 0;border-bottom:1px solid rgba(128,128,128,0.3)"
_WORD = f'style="text-align:left;{_EDGE}"'
_NUMBER = f'style="text-align:right;{_EDGE}"'
_FILLED = "height:0.8em;background:#5b8db8"
