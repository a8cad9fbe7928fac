"""The text of a migrated place: the names that it needs, calls, indentation, comments.

The new functions are those of jax_dist, or of the file's own helpers. A name is written as the file
would write it, and its import stands where the file knows jax from: in the same function, in the
same `try`.
"""

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import new_imports
from jax_dist.lint.model.findings import Code, Edit, Fix, Safety, indentation_of
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import helper_module
from jax_dist.migrate.helper_homes import Home
from jax_dist.migrate.results import Form, Left, PlannedPlace

Value: TypeAlias = "str | CallText"
Namer: TypeAlias = "LibraryNames | HelperNames"


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

    @classmethod
    def of(cls, code: bytes) -> "Style":
        """The style of a file, as most of it shows."""
        text = code.decode("utf-8", "replace")
        unit = indentation_of(text)
        longest = max((len(line) for line in text.splitlines()), default=0)
        width = 80 if unit == "  " else min(max(longest, 79), 100)
        quote = "'" if text.count("'") > text.count('"') else '"'
        return cls(unit, "    ", width, quote)


_SHORT = {"jax.sharding.PartitionSpec": "P"}  # as the field writes it


class Texts:
    """Writes new text for one place of a file, and notes what it needs at the top."""

    def __init__(self, module: Module, at: ast.expr, style: Style, namer: Namer):
        self.module: Module = module
        self.at: ast.expr = at
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
        self._imports |= dict.fromkeys(imports)
        return text

    def helper(self, function: str, *parts: str) -> str:
        """The name of a function of the helpers, with these parts; the file then gets it.

        Raises:
          Left: it cannot be had there.
        """
        self._namer.needs(frozenset(parts))
        name = self._namer.named(self.module, function, self.at)
        if name.edits:
            raise Left("jax is imported inside of a function")
        self._imports |= dict.fromkeys(name.imports)
        return name.text

    # --- layout

    def indent_of(self, node: Any) -> str:
        """The indentation of the line on which a node's statement begins."""
        start, _ = self.module.span(self.module.statement(node))
        return indentation(self.module.source.line_text(start))

    def moved(self, node: Any, depth: int) -> str:
        """The node's text as it would stand `depth` steps further in than its statement."""
        first, newline, rest = self.module.text(node).partition("\n")
        has_long_string = any(  # whose spaces are its value
            isinstance(each, ast.Constant | ast.JoinedStr) and each.end_lineno != each.lineno
            for each in ast.walk(node)
        )
        if not newline or has_long_string:
            return first + newline + rest
        wanted = len(self.indent_of(node)) + depth * len(self.style.hang)
        old = len(indentation(self.module.source.line_text(self.module.span(node)[0])))
        lines = rest.split("\n")
        depths = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip()]
        cut = min([old - wanted, *depths])  # negative: they go further in
        shifted = lambda line: line[cut:] if cut > 0 else " " * -cut + line
        return "\n".join((first, *(shifted(line) if line.strip() else line for line in lines)))

    def written(self, value: Value, replaced: Any) -> str:
        """The text of `value` in the place of the node `replaced`."""
        source, (start, end) = self.module.source, self.module.span(replaced)
        after = len(source.line_text(end)) - (source.position(end).column - 1)
        used = source.position(start).column - 1 + after
        return _written(value, self.style, indentation(source.line_text(start)), used)

    def comments(self, node: Any, kept: Iterable[Any]) -> list[str]:
        """The comments inside a node that stand in none of the parts which are kept."""
        start, end = self.module.span(node)
        code = self.module.source.code[start:end]
        if b"#" not in code:
            return []
        spans = [self.module.span(part) for part in kept if self.module.holds(part)]
        found: list[str] = []
        text = "(" + code.decode() + ")"
        rows = text.splitlines(keepends=True)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                before = "".join((*rows[: row - 1], rows[row - 1][:column]))
                at = start - 1 + len(before.encode())
                if not any(low <= at < high for low, high in spans):
                    found.append(token.string)
        return found

    def around(self, function: str, inner: ast.expr, more: Sequence[str]) -> tuple[str, str]:
        """What stands before and behind `inner` in a call that takes the place of the whole."""
        start, end = f"{function}(", "".join(f", {each}" for each in more) + ")"
        module, (low, high) = self.module, self.module.span(self.at)
        row, text = module.source.line_text(low), module.text(inner)
        is_long = len(row) - (high - low) + len(start + text + end) > self.style.width
        if not is_long or "\n" in module.text(self.at):
            return start, end
        outer = indentation(row)
        gap = f"\n{outer}{self.style.hang}"
        return f"{start}{gap}", "".join(f",{gap}{each}" for each in more) + f",\n{outer})"

    # --- places

    def place(
        self,
        code: Code,
        edits: Iterable[Edit],
        group: str,
        said: str,
        form: Form = Form.MAPPED,
    ) -> PlannedPlace:
        """A place with its edits, which are made if all of its group can be."""
        fix = Fix(said, Safety.UNSAFE, tuple(edits), self.imports, group)
        return PlannedPlace.done(self.module, self.at, code, fix, said, form)

    def shell(self, inner: ast.expr, start: str, end: str) -> tuple[Edit, ...]:
        """Puts other text around `inner`, a part of the place, which other edits may change."""
        module, whole = self.module, self.at
        statement = module.statement(whole)
        if not start and _is_to_itself(module, whole, inner):
            return (_without_line(module, statement),)
        (low, high), (first, last) = module.span(whole), module.span(inner)
        edits = [Edit(low, first, start), Edit(last, high, end)]
        edits = [edit for edit in edits if edit.start != edit.end or edit.text]
        if comments := self.comments(whole, [inner]):  # they go above the statement
            at, indent = module.span(statement)[0], self.indent_of(whole)
            above = "".join(f"{comment}\n{indent}" for comment in comments)
            edits.insert(0, Edit(at, at, above))
        return tuple(edits)

    def brackets(self, inner: ast.expr) -> tuple[str, str]:
        """Parentheses, where `inner` would fall apart without them in the place of the whole."""
        tight = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant
        closed = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.SetComp | ast.DictComp
        text = self.module.text(inner)  # `ast` counts the brackets of a tuple to it
        has_own = isinstance(inner, ast.Tuple | ast.GeneratorExp) and text[:1] + text[-1:] == "()"
        around = self.module.parent(self.at)
        is_returned = isinstance(inner, ast.Tuple) and isinstance(around, ast.Return)
        is_safe = isinstance(inner, tight | closed) or has_own or is_returned
        return ("", "") if is_safe else ("(", ")")


def _written(value: Value, style: Style, indent: str = "", used: int = 0) -> str:
    """The text of a value; `used` columns are before its first line, and behind its last one.

    >>> print(_written(CallText("f", ["a", CallText("g", ["b"])]), Style(width=9)))
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
        lines.append(f"{inner}{_written(each, style, inner, len(inner) + 1)},")
    comments = [inner + comment for comment in value.comments]
    at = len(lines) if value.keywords else 1  # most say why a buffer is donated
    lines[at:at] = comments
    for name, each in value.keywords:
        start = f"{inner}{name}="
        lines.append(f"{start}{_written(each, style, inner, len(start) + 1)},")
    return "\n".join((*lines, f"{indent})"))


def _flat(value: Value) -> str | None:
    """On one line; None where a comment needs one of its own."""
    if isinstance(value, str):
        return value
    given = (*(("", each) for each in value.positional), *((f"{k}=", v) for k, v in value.keywords))
    parts = [(name, _flat(each)) for name, each in given]
    if value.comments or any(flat is None for _, flat in parts):
        return None
    return f"{value.name}({', '.join(f'{name}{flat}' for name, flat in parts)})"


def indentation(line: str) -> str:
    """What a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def _is_to_itself(module: Module, whole: ast.expr, inner: ast.expr) -> bool:
    """Whether `x = unreplicate(x)` would become `x = x`, among other statements."""
    statement = module.parent(whole)
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) if (
            isinstance(inner, ast.Name) and not module.scope(whole).is_class
        ):
            block = getattr(module.parent(statement), "body", [])  # must keep one statement
            others = [each for each in block if not set_from_itself(each)]
            return inner.id == name and statement in block and bool(others)
    return False


def set_from_itself(statement: ast.stmt) -> str:
    """The name that `x = unreplicate(x)` sets by its own value, so that it may go; "" of others."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            names = (each.id for each in ast.walk(value) if isinstance(each, ast.Name))
            return name if name in names else ""
    return ""


def _without_line(module: Module, statement: ast.stmt) -> Edit:
    """Takes a statement out, with its line; a comment behind it stays."""
    start, end = module.span(statement)
    code = module.source.code
    line = max(code.rfind(b"\n", 0, start), code.rfind(b"\r", 0, start)) + 1
    newline = re.compile(rb"[ \t]*(?:\r\n|\n|\r)").match(code, end)
    if newline is not None and not code[line:start].strip():
        return Edit(line, newline.end(), "")
    semicolon = re.compile(rb"[ \t]*;[ \t]*").match(code, end)
    return Edit(start, end if semicolon is None else semicolon.end(), "")


# --- names


@dataclasses.dataclass(frozen=True, slots=True)
class _Name:
    """A name as it is written at one place, and what it needs."""

    text: str
    imports: tuple[str, ...] = ()  # at the module's level
    edits: tuple[Edit, ...] = ()  # imports inside of functions


class LibraryNames:
    """The functions of jax_dist."""

    title = "jax_dist.pmap"
    source = "jax_dist"

    def named(self, module: Module, function: str, at: ast.AST) -> _Name:
        text, imports = module.name_for(f"jax_dist.{function}", at)
        return _within_reach(module, at, text, imports)

    def import_as(self, bound: str) -> str | None:
        return f"from jax_dist import pmap{'' if bound == 'pmap' else f' as {bound}'}"

    def needs(self, parts: frozenset[str]) -> None:
        """It has all of them."""


class HelperNames:
    """The functions of the helper module of one file."""

    title: str = "mapped"

    def __init__(self, home: Home):
        self.home = home
        self.source: str = home.module
        self.used: set[str] = set()  # all that was asked for: functions, parts of `mapped`
        self._taken: dict[tuple[Module, frozenset[str]], list[str]] = {}

    def named(self, module: Module, function: str, at: ast.AST) -> _Name:
        function = "mapped" if function == "pmap" else function
        if self.home.is_inside:
            name = self._inside(module, function, at)
        else:
            name = self._imported(module, function, at)
        self.used.add(function)
        return name

    def import_as(self, bound: str) -> str | None:
        if self.home.is_inside:
            return None
        self.used.add("mapped")
        alias = "" if bound == "mapped" else f" as {bound}"
        return f"from {self.home.module} import mapped{alias}"

    def needs(self, parts: frozenset[str]) -> None:
        """Notes what `mapped` must be able to do."""
        self.used |= parts

    def _inside(self, module: Module, function: str, at: ast.AST) -> _Name:
        import_within(module, at)
        if not isinstance(module.once(_anchor), ast.Import | ast.ImportFrom):
            raise Left(
                "the file imports jax inside of a function or block, and has no place for helpers",
                "Give the path of a module for them: --helpers PATH.",
            )
        key = module, frozenset(self.used | {function})
        if key not in self._taken:
            self._taken[key] = _taken(module, helper_module.bound_names(key[1]))
        taken = self._taken[key]
        if taken:
            raise Left(
                f"the file has its own {taken[0]}, a name that its helpers need",
                f"Rename {taken[0]}, or give the path of a module for the helpers: --helpers PATH.",
            )
        return _Name(function)

    def _imported(self, module: Module, function: str, at: ast.AST) -> _Name:
        target = f"{self.home.module}.{function}"
        text = ""
        for name, bindings in module.scopes.module.bindings.items():
            if len(bindings) == 1 and bindings[0].kind == "import" and bindings[0].target == target:
                text = text or name
        if not text:
            bound = {name for scope in module.scopes.all for name in scope.bindings}
            names = (function, f"{function}_over_devices", f"_{function}_over_devices")
            text = next((name for name in names if name not in bound), "")
        if not text:
            raise Left(
                f"the file has its own {function}", f"Rename {function}, then migrate again."
            )
        alias = "" if text == function else f" as {text}"
        line = f"from {self.home.module} import {function}{alias}"
        return _within_reach(module, at, text, (line,))


def import_within(module: Module, at: ast.AST) -> ast.stmt | None:
    """The import by which a place knows jax, where it stands in a function or block.

    None at the module's level.

    Raises:
      Left: only type checkers see the import.
    """
    root: ast.AST = at
    while isinstance(root, ast.Attribute):
        root = root.value
    found = module.scope(root).lookup(root.id) if isinstance(root, ast.Name) else None
    nodes = [binding.node for binding in found[1] if binding.kind == "import"] if found else []
    if not nodes:
        return None
    statements = sorted(map(module.statement, nodes), key=lambda each: each.lineno)
    if any(module.parent(each) is module.tree for each in statements):
        return None
    for around in module.ancestors(statements[0]):
        if isinstance(around, ast.If) and "TYPE_CHECKING" in module.text(around.test):
            raise Left("jax is imported for type checkers only")
    return statements[0]


def _within_reach(module: Module, at: ast.AST, text: str, imports: tuple[str, ...]) -> _Name:
    """The imports stand where jax is imported: in the same function, in the same `try`."""
    beside = import_within(module, at) if imports else None
    if beside is None:
        return _Name(text, imports)
    start, end = module.span(beside)
    row = module.source.line_text(start)
    indent = indentation(row)
    before = row[: module.source.position(start).column - 1].strip()
    behind = module.source.line_text(end)[module.source.position(end).column - 1 :].strip()
    if before or not (behind == "" or behind.startswith("#")):
        lead = "; "
    else:  # below the line, so that a comment stays with the import that it is about
        end = module.source.code.index(behind.encode(), end) + len(behind.encode())
        lead = f"\n{indent}"
    return _Name(text, edits=tuple(Edit(end, end, f"{lead}{line}") for line in imports))


def _anchor(module: Module) -> ast.stmt | None:
    return new_imports.anchor(module.tree)


def _taken(module: Module, wanted: dict[str, str]) -> list[str]:
    """Of names, each with what an import means by it or "" for a definition, those taken."""
    text = module.source.code.decode()
    present = helper_module.present_in(text) if helper_module.is_ours(text) else ()
    ours = helper_module.bound_names(present)  # what an earlier migration has put into the file
    taken: list[str] = []
    for name, target in wanted.items():
        for binding in module.scopes.module.bindings.get(name, ()):
            same = binding.kind == "import" and _is_same(module.absolute(binding.target), target)
            if not same and not (target == "" and name in ours):
                taken.append(name)
                break
    hidden = (name for name, target in wanted.items() if not target and name not in ours)
    inner = [scope for scope in module.scopes.all if scope is not module.scopes.module]
    taken += (name for name in hidden if any(name in scope.bindings for scope in inner))
    return taken


def _is_same(found: str, target: str) -> bool:
    """`typing.Callable` means what `collections.abc.Callable` does.

    And `Mesh` of `jax.experimental.maps` was that of `jax.sharding`, as everywhere in jax.
    """
    home, _, last = target.rpartition(".")
    if home == "jax.sharding":
        return found.startswith("jax.") and found.endswith(f".{last}")
    return found == target or (home == "collections.abc" and found == f"typing.{last}")
