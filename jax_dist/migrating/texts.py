"""The text around one place: names that can be used there, indentation, comments."""

import ast
import io
import tokenize
from collections.abc import Iterable
from typing import Any

from jax_dist.checker.model import edits
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating import layout
from jax_dist.migrating.layout import Style, Value
from jax_dist.migrating.names import Namer
from jax_dist.migrating.outcomes import Left

_SHORT = {"jax.sharding.PartitionSpec": "P"}  # as the field writes it


class Texts:
    """Writes new text for one place of a file, and notes what it needs at the top."""

    def __init__(self, module: Module, at: ast.AST, style: Style, namer: Namer):
        self.module, self.at, self.style = module, at, style
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
        return layout.moved(text, old, wanted)

    def written(self, value: Value, replaced: Any) -> str:
        """The text of `value` in the place of the node `replaced`."""
        _, end = self.module.span(replaced)
        rest = self.module.source.line_text(end)
        after = len(rest) - (self.module.source.position(end).column - 1)
        used = self.column(replaced) + after
        line = self.module.source.line_text(self.module.span(replaced)[0])
        indent = line[: len(line) - len(line.lstrip())]
        return layout.written(value, self.style, indent, used)

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
    unit = edits.indentation_of(text)
    longest = max((len(line) for line in text.splitlines()), default=0)
    width = 80 if unit == "  " else min(max(longest, 79), 100)
    quote = "'" if text.count("'") > text.count('"') else '"'
    return Style(unit, "    ", width, quote)
