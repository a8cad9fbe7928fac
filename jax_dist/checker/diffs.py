"""What a change does to a file, as a unified diff that `git apply` and `patch -p1` take."""

import os
import re

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NO_END = "\\ No newline at end of file\n"
_COLOURS = {"-": "\x1b[31m", "+": "\x1b[32m", "@": "\x1b[36m"}
_PLAIN = "\x1b[0m"


def diff(
    path: str, before: bytes, after: bytes, encoding: str = "utf-8", *, new: bool = False
) -> str:
    """The lines that change, with three around them; empty where nothing does.

    Args:
      path: of the file.
      before: what it holds.
      after: what it would hold.
      encoding: of both.
      new: it is not there yet.
    """
    import difflib  # only here: it is slow to load

    shown = _shown(path)
    lines = difflib.unified_diff(
        _lines(before, encoding),
        _lines(after, encoding),
        "/dev/null" if new else f"a/{shown}",
        f"b/{shown}",
        lineterm="\n",
    )
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_END}" for line in lines)


def _shown(path: str) -> str:
    """As seen from the current folder, where the patch is applied."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    shown = path if inside.startswith(os.pardir) else inside
    return shown.replace(os.sep, "/").lstrip("/")


def coloured(text: str) -> str:
    """A diff in a terminal's colours."""
    return "".join(map(_coloured, _LINE.findall(text)))


def _lines(data: bytes, encoding: str) -> list[str]:
    """Lines end at "\\n" only, as they do for `patch`; a "\\r" before it is part of the line."""
    return _LINE.findall(data.decode(encoding, "surrogateescape"))


def _coloured(line: str) -> str:
    colour = _COLOURS.get(line[:1])
    text = line.removesuffix("\n")
    return line if colour is None else f"{colour}{text}{_PLAIN}\n"
