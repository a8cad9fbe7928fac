"""IPython's own syntax in a cell, hidden so that the rest of the cell is plain Python.

What is hidden is replaced by as many bytes, so that every offset stays what it was.
"""

import re

from jax_dist.checker import parsing

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
_TOKEN = re.compile(r"#[^\n]*|(?:\"\"\"|''')|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[()\[\]{}]")


def body_start(text: str) -> int | None:
    """Where the Python of a cell begins: behind `%%time`; None where there is none, as in `%%bash`.

    Args:
      text: of the cell.
    """
    magic = _CELL_MAGIC.match(text)
    if magic is None:
        return 0
    return magic.end() if magic[1] in _PYTHON_BODIES else None


def hidden(text: str) -> str:
    """The cell with its magics hidden, of the same size in UTF-8.

    Raises:
      ParseError: also without its magics it is no Python.
    """
    if _parses(text):  # then it has no magics
        return text
    text = "".join(_lines_hidden(re.findall(r"[^\n]*\n|[^\n]+", text)))
    parsing.parse(text.encode())
    return text


def _lines_hidden(lines: list[str]) -> list[str]:
    """Only a line that begins a statement can be a magic: `% x` may stand in open brackets."""
    shown: list[str] = []
    state = _State()
    continues_magic = False
    for line in lines:
        if continues_magic:
            shown.append(_blank(line))
            continues_magic = _continues(line)
            continue
        new = _hide(line) if state.begins_statement else line
        continues_magic = new != line and _continues(line)
        shown.append(new)
        state.read(new)
    return shown


def _hide(line: str) -> str:
    body, end = _split_end(line)
    runs = _RUNS_ITS_LINE.match(body)
    if runs and _parses(body[runs.end() :]):
        indent = runs[1]
        space = runs.end() - len(indent)  # at least the six of "%time "
        return indent + "_" + " " * (space - 2) + ";" + body[runs.end() :] + end
    assigned = _ASSIGNED_MAGIC.match(body)
    if assigned and _parses(f"{assigned[1]}_".strip()):
        return assigned[1] + _name(body[assigned.end(1) :]) + end
    if _LINE_MAGIC.match(body) or _HELP.match(body) or _AUTOMAGIC.match(body):
        indent = body[: len(body) - len(body.lstrip())]
        # In a block it may be the only statement; elsewhere nothing should seem to stand there.
        return indent + _name(body[len(indent) :]) + end if indent else _blank(line)
    return line


def _name(text: str) -> str:
    """`_`, whose value nobody knows, and blanks."""
    return "_" + " " * (len(text.encode("utf-8", "surrogatepass")) - 1)


def _blank(line: str) -> str:
    body, end = _split_end(line)
    return " " * len(body.encode("utf-8", "surrogatepass")) + end


def _split_end(line: str) -> tuple[str, str]:
    body = line.rstrip("\r\n")
    return body, line[len(body) :]


def _continues(line: str) -> bool:
    return _split_end(line)[0].endswith("\\")


def _parses(text: str) -> bool:
    try:
        parsing.parse(text.encode())
    except parsing.ParseError:
        return False
    return True


class _State:
    """Whether the next line begins a statement, or continues brackets, a string, or a line."""

    def __init__(self) -> None:
        self._open = 0  # brackets
        self._quotes = ""  # of the string of several lines that is open
        self._continued = False  # by a backslash

    @property
    def begins_statement(self) -> bool:
        return not (self._open or self._quotes or self._continued)

    def read(self, line: str) -> None:
        at = 0
        while at < len(line):
            at = self._read_string(line, at) if self._quotes else self._read_token(line, at)
        self._continued = not self._quotes and _continues(line)

    def _read_string(self, line: str, at: int) -> int:
        end = re.compile(rf"(?:\\.|[^\\])*?{self._quotes}", re.DOTALL).match(line, at)
        if end is None:
            return len(line)
        self._quotes = ""
        return end.end()

    def _read_token(self, line: str, at: int) -> int:
        token = _TOKEN.search(line, at)
        if token is None:
            return len(line)
        if token[0] in ('"""', "'''"):
            self._quotes = token[0]
        elif token[0] in "([{":
            self._open += 1
        elif token[0] in ")]}":
            self._open = max(0, self._open - 1)
        return token.end()
