"""The text around one place: names that can be used there, indentation, comments, helpers."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from typing import Any

from jax_dist.checker import edits
from jax_dist.checker.modules import Module
from jax_dist.migrating import emitted, layout
from jax_dist.migrating.layout import Style, Value
from jax_dist.migrating.outcomes import Left

_SHORT = {"jax.sharding.PartitionSpec": "P"}  # as the field writes it


class Texts:
    """Writes new text for one place of a file, and notes what it needs at the top."""

    def __init__(self, module: Module, at: ast.AST, style: Style):
        self.module, self.at, self.style = module, at, style
        self._imports: dict[str, None] = {}
        self._definitions: dict[str, None] = {}

    @property
    def imports(self) -> tuple[str, ...]:
        return tuple(self._imports)

    @property
    def definitions(self) -> tuple[str, ...]:
        return tuple(self._definitions)

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

    def helper(self, definition: str) -> str:
        """The name of an emitted function, which the file then gets."""
        name = emitted.name_of(definition)
        styled = re.sub(
            r"(?m)^( +)",
            lambda m: self.style.unit * (len(m[1]) // 4) + " " * (len(m[1]) % 4),
            definition,
        )
        present = self.module.scopes.module.bindings.get(name)
        if present is not None and not self._is_ours(present[0].node, styled):
            raise Left(
                f"the file has its own {name}, the name of a function that would be added",
                f"Rename {name}, then migrate again.",
            )
        found = self.module.scope(self.at).lookup(name)
        if found is not None and found[0] is not self.module.scopes.module:
            raise Left(
                f"{name} is a local name here, and also that of a function to be added",
                f"Rename {name}, then migrate again.",
            )
        if present is None:
            for line in emitted.imports_of(definition):
                self._import(line)
            self._definitions[styled] = None
        return name

    def _import(self, line: str) -> None:
        """Definitions stand at the module's level and use plain names."""
        bound = line.split(" as ")[-1] if " as " in line else line.split()[-1]
        target = line.split()[1]
        meaning = self.module.meaning_of_name(self.module.scopes.module, bound)
        if self.module.scopes.module.lookup(bound) is None:
            self._imports[line] = None
        elif meaning is None or meaning.name != target:
            raise Left(
                f"the name {bound} means something else in this file than {target}",
                f"Import {target} as {bound}, then migrate again.",
            )

    def _is_ours(self, node: Any, definition: str) -> bool:
        if not isinstance(node, ast.FunctionDef):
            return False
        return ast.dump(ast.parse(definition).body[0]) == ast.dump(node)

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
