"""Text for users: the error of a command line, suggestions, counts, sizes, tables."""

import difflib
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

_MIN_SIMILARITY = 0.65  # difflib's ratio; with less in common it is taken for another word


class MisuseError(ValueError):
    """A path, an option or a setting of the user is invalid; the text has the remedy."""


def hint(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return "Did you mean ...?" with the known word nearest to `word`, or else `otherwise`.

    >>> hint("selct", ["select", "ignore"], "The settings are: ignore, select.")
    'Did you mean select?'
    """
    near = nearest(word, known)
    return f"Did you mean {near}?" if near else otherwise


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, if any; of several, that with the longest same prefix.

    >>> nearest("JXD01", ["JXD101", "JXD901", "JXD001"])
    'JXD001'
    """
    candidates = []
    for name in known:
        similarity = difflib.SequenceMatcher(None, word, name, autojunk=False).ratio()
        if similarity >= _MIN_SIMILARITY:
            prefix_length = len(os.path.commonprefix([word, name]))
            candidates.append((-similarity, -prefix_length, name))  # the smallest is the nearest
    return min(candidates)[-1] if candidates else None


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 array", "2 arrays"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def human_bytes(amount: float) -> str:
    """Format an amount of bytes in B, kB, MB, GB or TB, which are powers of 1000.

    >>> [human_bytes(amount) for amount in (0, 36, 999.6, 12_345, 999_960, 64e6)]
    ['0 B', '36 B', '1.0 kB', '12.3 kB', '1.0 MB', '64.0 MB']
    """
    if round(amount) < 1000:
        return f"{round(amount)} B"
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if round(amount, 1) < 1000:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} TB"


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: int = 0,
    header: bool = True,
) -> Any:
    """Return a rich table without lines, of plain texts; the last `numbers` columns are numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=header, padding=(0, 2, 0, 0))
    first_number = len(columns) - numbers
    for name in columns[:first_number]:
        table.add_column(name, overflow="fold")
    for name in columns[first_number:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def render(*parts: Any, width: int = 80) -> str:
    """Render strings and rich objects (tables) below each other as plain text of this width."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
