"""The text of a migrated place: calls, indentation, comments, and what is taken off around it."""

import ast
import dataclasses
import io
import tokenize
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax_dist.checker.model.findings import Edit, indentation_of
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod.names import Namer
from jax_dist.codemod.results import Left

Value: TypeAlias = "str | CallText"


@dataclasses.dataclass(frozen=True, slots=True)
class CallText:
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

    >>> print(written(CallText("f", ["a", CallText("g", ["b"])]), Style(width=9)))
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


_SHORT = {"jax.sharding.PartitionSpec": "P"}  # as the field writes it


class Texts:
    """Writes new text for one place of a file, and notes what it needs at the top."""

    def __init__(self, module: Module, at: ast.AST, style: Style, namer: Namer):
        self.module: Module = module
        self.at: ast.AST = at
        self.style: Style = style
        self._namer = namer
        self._imports: dict[str, None] = {}

    @property
    def imports(self) -> tuple[str, ...]:
        return tuple(self._imports)

    def named(self, name: str) -> str:
        """How to write a dotted name here."""
        short = _SHORT.get(name)
        text, imports = self.module.name_for(name, self.at)
        if short is not None and imports == () and text.count(".") == 0:
            return text
        if short is not None and self.module.scope(self.at).lookup(short) is None:
            package, _, last = name.rpartition(".")
            self._imports[f"from {package} import {last} as {short}"] = None
            return short
        for line in imports:
            self._imports[line] = None
        return text

    def helper(self, function: str) -> str:
        """The name of a function of the helpers; the file then gets it. Raises Left."""
        name = self._namer.named(self.module, function, self.at)
        if name.edits:
            raise Left("jax is imported inside of a function")
        self._imports |= dict.fromkeys(name.imports)
        return name.text

    # --- layout

    def quoted(self, word: str) -> str:
        """A string literal, with the file's kind of quotes."""
        return f"{self.style.quote}{word}{self.style.quote}"

    def indent_of(self, node: Any) -> str:
        """The indentation of the line on which a node's statement begins."""
        start, _ = self.module.span(self.module.statement(node))
        text = self.module.source.line_text(start)
        return text[: len(text) - len(text.lstrip())]

    def column(self, node: Any) -> int:
        return self.module.source.position(self.module.span(node)[0]).column - 1

    def moved(self, node: Any, depth: int) -> str:
        """The node's text as it would stand `depth` steps further in than its statement."""
        text = self.module.text(node)
        if "\n" not in text or _has_long_string(node):
            return text
        wanted = len(self.indent_of(node)) + depth * len(self.style.hang)
        line = self.module.source.line_text(self.module.span(node)[0])
        old = len(line) - len(line.lstrip())
        return moved(text, old, wanted)

    def written(self, value: Value, replaced: Any) -> str:
        """The text of `value` in the place of the node `replaced`."""
        _, end = self.module.span(replaced)
        rest = self.module.source.line_text(end)
        after = len(rest) - (self.module.source.position(end).column - 1)
        used = self.column(replaced) + after
        line = self.module.source.line_text(self.module.span(replaced)[0])
        indent = line[: len(line) - len(line.lstrip())]
        return written(value, self.style, indent, used)

    def at_sign(self, start: int) -> int:
        """Where the `@` of the decorator at `start` stands."""
        return self.module.source.code.rindex(b"@", 0, start)

    def comments(self, node: Any, kept: Iterable[Any]) -> list[str]:
        """The comments inside a node that stand in none of the parts which are kept."""
        start, end = self.module.span(node)
        code = self.module.source.code[start:end]
        if b"#" not in code:
            return []
        spans = [self.module.span(part) for part in kept if self.module.holds(part)]
        found: list[str] = []
        text = "(" + code.decode() + ")"
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line.encode()))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row = text.splitlines(keepends=True)[token.start[0] - 1]
                at = start - 1 + starts[token.start[0] - 1] + len(row[: token.start[1]].encode())
                if not any(low <= at < high for low, high in spans):
                    found.append(token.string)
        return found


def _has_long_string(node: ast.AST) -> bool:
    """Whether a string in it runs over several lines, so that its spaces are its value."""
    return any(
        isinstance(each, ast.Constant | ast.JoinedStr)
        and getattr(each, "end_lineno", 0) != getattr(each, "lineno", 0)
        for each in ast.walk(node)
    )


def style_of(code: bytes) -> Style:
    """The indentation and width of a file, as most of it shows."""
    text = code.decode("utf-8", "replace")
    unit = indentation_of(text)
    longest = max((len(line) for line in text.splitlines()), default=0)
    width = 80 if unit == "  " else min(max(longest, 79), 100)
    quote = "'" if text.count("'") > text.count('"') else '"'
    return Style(unit, "    ", width, quote)


def shell(texts: Texts, whole: ast.expr, inner: ast.expr, start: str, end: str) -> tuple[Edit, ...]:
    """Replaces what stands around `inner`; inside it other edits may be made.

    Args:
      texts: of the file.
      whole: the expression that is left with `inner` alone.
      inner: a part of it.
      start: what comes before that.
      end: what comes after it.
    """
    module = texts.module
    if not start and _is_to_itself(module, whole, inner):
        return (_without_line(module, module.statement(whole)),)
    low, high = module.span(whole)
    first, last = module.span(inner)
    edits = (Edit(low, first, start), Edit(last, high, end))
    return (
        *_comments_above(texts, whole, inner),
        *(edit for edit in edits if edit.start != edit.end or edit.text),
    )


def _comments_above(texts: Texts, whole: ast.expr, inner: ast.expr) -> tuple[Edit, ...]:
    """The comments that would be lost, on lines of their own above the statement."""
    comments = texts.comments(whole, [inner])
    if not comments:
        return ()
    at = texts.module.span(texts.module.statement(whole))[0]
    indent = texts.indent_of(whole)
    return (Edit(at, at, "".join(f"{comment}\n{indent}" for comment in comments)),)


def _is_to_itself(module: Module, whole: ast.expr, inner: ast.expr) -> bool:
    """Whether `x = unreplicate(x)` would become `x = x`, among other statements."""
    statement = module.parent(whole)
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) if (
            isinstance(inner, ast.Name) and not module.scope(whole).is_class
        ):
            block = getattr(module.parent(statement), "body", [])
            others = [each for each in block if not _sets_from_itself(each)]
            return inner.id == name and statement in block and bool(others)
    return False


def _sets_from_itself(statement: ast.stmt) -> bool:
    """Whether it may go too: a block must keep one statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value))
    return False


def _without_line(module: Module, statement: ast.stmt) -> Edit:
    """Takes a statement out, with its line; a comment behind it stays."""
    start, end = module.span(statement)
    code = module.source.code
    line = max(code.rfind(b"\n", 0, start), code.rfind(b"\r", 0, start)) + 1
    rest = code[end:]
    blank = len(rest) - len(rest.lstrip(b" \t"))
    for newline in (b"\r\n", b"\n", b"\r"):
        if rest[blank:].startswith(newline) and not code[line:start].strip():
            return Edit(line, end + blank + len(newline), "")
    if rest[blank:].startswith(b";"):
        more = rest[blank + 1 :]
        return Edit(start, end + blank + 1 + len(more) - len(more.lstrip(b" \t")), "")
    return Edit(start, end, "")


def around(module: Module, whole: ast.expr, inner: ast.expr, *, end: bool = False) -> str:
    """Parentheses, where the inner expression would fall apart without them.

    Args:
      module: the file.
      whole: what it takes the place of.
      inner: what they would stand around.
      end: whether the closing one is asked for.
    """
    tight = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant
    closed = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.SetComp | ast.DictComp
    if isinstance(inner, tight | closed) or _has_brackets(module, inner):
        return ""
    if isinstance(module.parent(whole), ast.Return) and isinstance(inner, ast.Tuple):
        return ""
    return ")" if end else "("


def _has_brackets(module: Module, inner: ast.expr) -> bool:
    """Whether its own text begins and ends with brackets: `ast` counts those of a tuple to it."""
    text = module.text(inner)
    return isinstance(inner, ast.Tuple | ast.GeneratorExp) and text[:1] == "(" and text[-1:] == ")"
