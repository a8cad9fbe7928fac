"""What IPython adds to Python in a notebook's cell, hidden so that Python can parse the rest.

It is hidden by as many bytes, so that every offset stays what it was.
"""

import itertools
import re

from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import ParseError

# Their body runs as Python in the notebook's own namespace; that of all others is not looked at.
_PYTHON_BODIES = frozenset(
    ("capture", "code_wrap", "debug", "ipytest", "prun", "px", "time", "timeit")
)
# `%timeit -n 5 f(x)` runs f(x); `timeit f(x)` does too, and the options belong to the magic.
_RUNS_ITS_LINE = re.compile(r"(\s*)%?(?:time|timeit|prun)\b((?:[ \t]+-\w+(?:[ \t]*\d+)?)*[ \t]+)")
_CELL_MAGIC = re.compile(r"\s*%%(\w*)[^\n]*(?:\n|$)")
_LINE_MAGIC = re.compile(r"\s*(?:[%!,;/]|\?{1,2}[\w%])")
_HELP = re.compile(r"\s*[%\w.*\[\]'\"]+\?{1,2}\s*$")
_ASSIGNED_MAGIC = re.compile(r"([^#'\"()=]*?=\s*)[%!]\S[^\n]*")
_AUTOMAGIC = re.compile(r"\s*(?:pip|conda|cd|ls|cat|cp|mv|rm|mkdir|pwd)(?:[ \t]+[^=(.\[,:\s].*)?$")


def body_start(text: str) -> int | None:
    """Return where a cell's Python begins: behind `%%time`; None in a `%%bash`."""
    magic = _CELL_MAGIC.match(text)
    if magic is None:
        return 0
    return magic.end() if magic[1] in _PYTHON_BODIES else None


_MOST_PARSES = 16  # of one cell; then all that looks like a magic is taken for one


def hidden(text: str) -> str:
    """Return the cell with its magics hidden, of the same size in UTF-8.

    A magic is where Python stops: `% x` in open brackets is none.

    Raises:
      ParseError: also without its magics it is no Python.
    """
    lines = lines_of(text)
    for parses in itertools.count():
        try:
            sources.parse("".join(lines).encode())
        except ParseError as error:
            at = error.line - 1
            if _hide_at(lines, at) is False:
                raise
            if parses == _MOST_PARSES:
                for each in range(at, len(lines)):
                    if _LINE_MAGIC.match(lines[each]):
                        _hide_at(lines, each)
        else:
            break
    return "".join(lines)


def _hide_at(lines: list[str], at: int) -> bool:
    """Hide the magic of a line, with the lines that go on with it; return whether there is one."""
    line = lines[at] if at < len(lines) else ""
    if (shown := _hide(line)) == line:
        return False
    lines[at] = shown
    while _split_end(line)[0].endswith("\\"):
        at += 1
        line = lines[at] if at < len(lines) else ""
        lines[at : at + 1] = [_blank_line(line)] if line else []
    return True


def _hide(line: str) -> str:
    body, end = _split_end(line)
    runs = _RUNS_ITS_LINE.match(body)
    if runs and sources.parses(body[runs.end() :].encode()):
        indent = runs[1]
        space = runs.end() - len(indent)  # at least the six of "%time "
        return indent + "_" + " " * (space - 2) + ";" + body[runs.end() :] + end
    assigned = _ASSIGNED_MAGIC.match(body)
    if assigned and sources.parses(f"{assigned[1]}_".strip().encode()):
        return assigned[1] + _name(body[assigned.end(1) :]) + end
    if _LINE_MAGIC.match(body) or _HELP.match(body) or _AUTOMAGIC.match(body):
        indent = body[: len(body) - len(body.lstrip())]
        # In a block it may be the only statement; elsewhere nothing should seem to stand there.
        return indent + _name(body[len(indent) :]) + end if indent else _blank_line(line)
    return line


def _name(text: str) -> str:
    """Return `_`, whose value nobody knows, and blanks."""
    return "_" + " " * (len(text.encode("utf-8", "surrogatepass")) - 1)


def _blank_line(line: str) -> str:
    body, end = _split_end(line)
    return " " * len(body.encode("utf-8", "surrogatepass")) + end


def _split_end(line: str) -> tuple[str, str]:
    body = line.rstrip("\r\n")
    return body, line[len(body) :]


def lines_of(text: str) -> list[str]:
    """Return the lines of a cell, each with its end."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
