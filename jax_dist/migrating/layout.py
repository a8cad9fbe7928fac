"""Calls as text: on one line where they fit, else one argument a line."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

Value: TypeAlias = "str | Call"


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call to be written: `name(*positional, **keywords)`."""

    name: str
    positional: Sequence[Value] = ()
    keywords: Sequence[tuple[str, Value]] = ()
    comments: Sequence[str] = ()  # "# why", each on a line of its own, before the keywords


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
    """How the file is written."""

    unit: str = "    "  # one step of indentation of a block
    hang: str = "    "  # one step of indentation of arguments
    width: int = 88
    quote: str = '"'


def written(value: Value, style: Style, indent: str = "", used: int = 0) -> str:
    """The text of a value whose first line begins `used` columns into a line.

    Args:
      value: a call, or text that is kept as it is.
      style: of the file.
      indent: of the statement that holds it.
      used: columns before it, and after it on its last line.

    >>> print(written(Call("f", ["a", Call("g", ["b"])]), Style(width=9)))
    f(
        a,
        g(b),
    )
    """
    if isinstance(value, str):
        return value
    flat = _flat(value)
    if flat is not None and "\n" not in flat and used + len(flat) <= style.width:
        return flat
    inner = indent + style.hang
    lines = [f"{value.name}("]
    for each in value.positional:
        lines.append(f"{inner}{written(each, style, inner, len(inner) + 1)},")
    comments = [inner + comment for comment in value.comments]
    at = len(lines) if value.keywords else 1  # most say why a buffer is donated
    lines[at:at] = comments
    for name, each in value.keywords:
        start = f"{inner}{name}="
        lines.append(f"{start}{written(each, style, inner, len(start) + 1)},")
    return "\n".join((*lines, f"{indent})"))


def _flat(value: Value) -> str | None:
    """On one line; None where a comment needs one of its own."""
    if isinstance(value, str):
        return value
    if value.comments:
        return None
    parts: list[str] = []
    for name, each in (*(("", each) for each in value.positional), *value.keywords):
        flat = _flat(each)
        if flat is None:
            return None
        parts.append(f"{name}={flat}" if name else flat)
    return f"{value.name}({', '.join(parts)})"


def moved(text: str, old_column: int, new_column: int) -> str:
    """Text of several lines that stood at one column, for another one."""
    first, newline, rest = text.partition("\n")
    if not newline:
        return text
    lines = rest.split("\n")
    shift = new_column - old_column
    if shift > 0:
        lines = [" " * shift + line if line.strip() else line for line in lines]
    elif shift < 0:
        spare = min(
            (len(line) - len(line.lstrip(" ")) for line in lines if line.strip()), default=0
        )
        cut = min(-shift, spare)
        lines = [line[cut:] if line.strip() else line for line in lines]
    return "\n".join((first, *lines))
