"""What differs between two texts of one program: all edits, and those of the host in both forms."""

import ast
import builtins
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_dist.migrate.codegen import set_from_itself
from jax_dist.migrate.verify.program_text import HostForm, ProgramText

_BLOCKS = ("body", "orelse", "finalbody")
_WITH_BLOCKS = ("handlers", "cases")
_INNER = (*_BLOCKS, *_WITH_BLOCKS, "decorator_list")  # of a statement, no part of its head
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINED = (*_FUNCTIONS, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_ONLY_INSIDE = (ast.Starred, ast.Slice)
_DEEPEST = 2  # calls around the value of a host edit


# --- two pieces of syntax side by side


class _UnlikeSyntaxError(Exception):
    """Two pieces of syntax do not correspond."""


class _Walk:
    """Goes through two pieces of syntax together, down to the expressions that differ.

    Args:
      *found: lists that get what is found, and lose it again where that turns out to be too little.
    """

    def __init__(self, *found: list[Any]):
        self._found = found

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        """Finds what differs; raises an _UnlikeSyntaxError where it cannot be told."""
        raise NotImplementedError

    def _tried(self, step: Callable[..., None], *arguments: Any) -> bool:
        """Whether a step finds all that differs; else it finds nothing."""
        counts = [len(each) for each in self._found]
        try:
            step(*arguments)
        except _UnlikeSyntaxError:
            for each, count in zip(self._found, counts, strict=True):
                del each[count:]
            return False
        return True

    def _fields(self, old: ast.AST, new: ast.AST, skipped: Sequence[str] = ()) -> None:
        if type(old) is not type(new):
            raise _UnlikeSyntaxError
        for name in old._fields:
            if name not in skipped:
                self._node(getattr(old, name), getattr(new, name))

    def _node(self, old: Any, new: Any) -> None:
        if isinstance(old, list):
            if len(old) != len(new):
                raise _UnlikeSyntaxError
            for one, other in zip(old, new, strict=True):
                self._node(one, other)
        elif isinstance(old, ast.expr) and isinstance(new, ast.expr):
            self._expression(old, new)
        elif isinstance(old, ast.AST):
            self._fields(old, new)
        elif repr(old) != repr(new):  # 1 and 1.0 are equal, and not the same
            raise _UnlikeSyntaxError


def _opcodes(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> list[Any]:
    """As difflib gives them, of the statements of two blocks."""

    def key(statement: ast.stmt) -> tuple[str, str]:
        if isinstance(statement, _IMPORTS):
            return "import", ast.dump(statement)
        if isinstance(statement, ast.Assign):
            return "assignment", " = ".join(map(ast.unparse, statement.targets))
        return type(statement).__name__, statement.name if isinstance(statement, _DEFINED) else ""

    ones, others = ([key(each) for each in block] for block in (old, new))
    return difflib.SequenceMatcher(None, ones, others, autojunk=False).get_opcodes()


def _blocks(old: ast.stmt, new: ast.stmt) -> Iterator[tuple[Any, Any]]:
    """The blocks inside of two statements that correspond."""
    for name in _BLOCKS:
        yield getattr(old, name, []), getattr(new, name, [])
    for name in _WITH_BLOCKS:
        for one, other in zip(getattr(old, name, ()), getattr(new, name, ()), strict=False):
            yield one.body, other.body


def _imported(node: ast.AST) -> list[tuple[str, ast.alias]]:
    """What an import binds; `import a.b, a.c` binds one name twice."""
    aliases = node.names if isinstance(node, _IMPORTS) else []
    return [(alias.asname or alias.name.partition(".")[0], alias) for alias in aliases]


def _cannot_be_moved(expression: ast.expr) -> bool:
    """Whether it means something else, or happens twice, inside a lambda."""
    for each in ast.walk(expression):
        match each:
            case ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                return True
            case ast.Call(func=ast.Name(id="super" | "locals"), args=[]):
                return True  # it looks at the function that it stands in
    return False


# --- all edits


@dataclass(frozen=True)
class Change:
    """What an edit replaces: an expression, an import that binds another thing, or a statement."""

    line: int  # before, from 1
    what: str
    span: tuple[int, int] | None  # the bytes that it covers; None of a whole statement
    imported: str = ""  # the name that an import binds


def changes(program: ProgramText, after: ast.Module) -> list[Change]:
    """The smallest expressions that differ, and the statements that do not correspond.

    New imports, definitions and names change nothing by themselves, nor does an import that goes.

    Args:
      program: the text before.
      after: the syntax tree of what it became.
    """
    search = _Changes(program)
    search.block(program.tree.body, after.body)
    return list(dict.fromkeys(search.changes))


class _Changes(_Walk):
    def __init__(self, program: ProgramText):
        self.changes: list[Change] = []
        super().__init__(self.changes)
        self._program = program
        bound = [*_bound(program.tree)]
        self._bound = {name for name, _ in bound} | {*dir(builtins)}
        self._imports = {text for _, text in bound}
        plain = {text for text in self._imports if text[:7] == "import " and " as " not in text}
        self._packages = {text.partition(".")[0] for text in plain}

    def block(
        self, old: Sequence[ast.stmt], new: Sequence[ast.stmt], around: ast.stmt | None = None
    ) -> None:
        for tag, i, j, k, m in _opcodes(old, new):
            if tag == "equal":
                for one, other in zip(old[i:j], new[k:m], strict=True):
                    self._statement(one, other)
                continue
            for each in old[i:j]:
                if not isinstance(each, _IMPORTS):
                    self._whole(each)
            former = {name: each for each in old for name, _ in _imported(each)}
            near = old[min(i, len(old) - 1)] if old else around
            for each in new[k:m]:
                self._addition(each, former, near)

    def _addition(
        self, added: ast.stmt, former: Mapping[str, ast.stmt], near: ast.stmt | None
    ) -> None:
        """What only the new text has, where it gives an old name another meaning, or acts."""
        if isinstance(added, _IMPORTS):
            for name, alias in _imported(added):
                text = ast.unparse(_only(added, alias))
                if text in self._imports or name not in self._bound:
                    continue
                if text.partition(".")[0] in self._packages and not alias.asname:
                    continue  # it binds the same package, and loads a part of it
                if name in former:
                    self._import(former[name], name)
                elif near is not None:
                    self._whole(near)
            return
        is_text = isinstance(added, ast.Expr) and isinstance(added.value, ast.Constant)
        if near is not None and not (is_text or self._only_binds(added)):
            self._whole(near)

    def _only_binds(self, added: ast.stmt) -> bool:
        """Whether all that it does is to give new names a meaning."""
        if isinstance(added, _DEFINED):
            return added.name not in self._bound
        stored = [e for e in ast.walk(added) if isinstance(getattr(e, "ctx", None), ast.Store)]
        return isinstance(added, ast.Assign) and not any(
            isinstance(each, ast.Attribute | ast.Subscript)
            or (isinstance(each, ast.Name) and each.id in self._bound)
            for each in stored
        )

    def _import(self, former: ast.stmt, name: str) -> None:
        start = self._program.offset(former.lineno, former.col_offset)
        stop = self._program.offset(former.end_lineno, former.end_col_offset)
        self.changes.append(Change(former.lineno, ast.unparse(former), (start, stop), name))

    def _statement(self, old: ast.stmt, new: ast.stmt) -> None:
        if _arms(old) != _arms(new) or not self._tried(self._head, old, new):
            self._whole(old)
            return
        for pair in _blocks(old, new):
            self.block(*pair, old)

    def _head(self, old: Any, new: Any) -> None:
        """What a statement has besides its blocks; decorators are one expression, or alike."""
        ones, others = (getattr(each, "decorator_list", []) for each in (old, new))
        if not self._tried(self._node, ones, others):
            if not ones:
                raise _UnlikeSyntaxError
            span = self._program.span(ones[0])[0], self._program.span(ones[-1])[1]
            what = self._program.between(*self._program.span(ones[0]))
            self.changes.append(Change(ones[0].lineno, what, span))
        self._fields(old, new, _INNER)

    def _whole(self, statement: ast.stmt) -> None:
        text = ast.unparse(statement).partition("\n")[0]
        self.changes.append(Change(statement.lineno, text, None))

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        if self._tried(self._fields, old, new):
            return
        if isinstance(old, _ONLY_INSIDE) or isinstance(getattr(old, "ctx", None), ast.Store):
            raise _UnlikeSyntaxError
        span = self._program.span(old)
        self.changes.append(Change(old.lineno, self._program.between(*span), span))


def _arms(statement: ast.stmt) -> list[list[Any]]:
    """What the handlers and cases of a statement have besides their blocks."""
    plain = lambda each: ast.dump(each) if isinstance(each, ast.AST) else each
    arms = [arm for name in _WITH_BLOCKS for arm in getattr(statement, name, ())]
    return [[plain(v) for name, v in ast.iter_fields(arm) if name != "body"] for arm in arms]


def _only(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(statement.module, [alias], statement.level)


def _bound(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """`(name, text of the import)` of what a program binds, at any depth."""
    for each in ast.walk(tree):
        if isinstance(each, _DEFINED):
            yield each.name, ""
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id, ""
        elif isinstance(each, _IMPORTS):
            for name, alias in _imported(each):
                yield name, ast.unparse(_only(each, alias))


# --- host edits


def host_edits(before: ast.Module, after: ast.Module) -> list[tuple[HostForm, HostForm]]:
    """The host edits between two texts of a program, in both forms, the outer ones first.

    One puts something else around the same value: `jax_utils.unreplicate(state)` that became
    `state` puts nothing around it. What is around it is a small program of its own, so it can be
    traced and compared; the value goes on being computed where it was.

    Args:
      before: its syntax tree.
      after: that of what it became.
    """
    search = _HostEdits(before)
    search.block(before.body, after.body)
    return search.edits


def with_names_kept(before: ast.Module, after: str) -> str:
    """The new text, with `x = x` where `x = unreplicate(x)` has gone: so its value can be told."""
    program = ProgramText(after.removesuffix("\n") + "\n")

    def block(old: Sequence[ast.stmt], new: Sequence[ast.stmt]) -> None:
        if not new:  # no line is left beside those that went
            return
        for tag, i, j, k, m in _opcodes(old, new):
            for one, other in zip(old[i:j], new[k:m], strict=True) if tag == "equal" else ():
                for pair in _blocks(one, other):
                    block(*pair)
            names = [set_from_itself(each) for each in old[i:j]] if tag == "delete" else []
            text = [f"{name} = {name}\n" for name in names if name]
            beside = new[min(k, len(new) - 1)]
            start = program.line_of(beside)
            indent = program.between(start, start + beside.col_offset)
            if not (indent.strip() or isinstance(beside, _IMPORTS)):
                at = start if k < len(new) else program.offset((beside.end_lineno or 0) + 1, 0)
                program.replace(at, at, "".join(indent + line for line in text))

    block(before.body, program.tree.body)
    return program.edited


class _HostEdits(_Walk):
    def __init__(self, tree: ast.Module):
        self.edits: list[tuple[HostForm, HostForm]] = []
        super().__init__(self.edits)
        # No values.
        self._imported = {name for each in ast.walk(tree) for name, _ in _imported(each)}

    def block(self, before: Sequence[Any], after: Sequence[Any], *, in_class: bool = False) -> None:
        for tag, i, j, k, m in _opcodes(before, after):
            for one, other in zip(before[i:j], after[k:m], strict=True) if tag == "equal" else ():
                if not in_class:  # a lambda in the body of a class does not see its names
                    self._tried(self._fields, one, other, _INNER)
                inner = isinstance(one, ast.ClassDef) or (
                    in_class and not isinstance(one, _FUNCTIONS)
                )
                for pair in _blocks(one, other):
                    self.block(*pair, in_class=inner)

    def _expression(self, old: ast.expr, new: ast.expr) -> None:
        if self._tried(self._fields, old, new):
            return
        if _cannot_be_moved(old):
            raise _UnlikeSyntaxError
        ones, others = self._values(old), list(self._values(new))
        pairs = [(d + e, x, y) for d, x in ones for e, y in others]
        for _, x, y in sorted(pairs, key=lambda pair: pair[0]):
            self.edits.append((HostForm(old, x), HostForm(new, y)))
            if self._tried(self._fields, x, y):
                return
            self.edits.pop()
        raise _UnlikeSyntaxError

    def _values(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[int, ast.expr]]:
        """What an expression may put something around, and how deep it lies."""
        if isinstance(node, ast.Constant):  # the value only where there is no other
            depth += _DEEPEST
        inner: list[ast.expr] = []
        match node:
            case ast.Lambda() | ast.Starred():
                return
            case ast.Name() if node.id in self._imported:
                return
            case ast.Call(func=ast.Attribute(value=value)):
                inner = [*node.args, value]
            case ast.Call():
                inner = [*node.args, *(word.value for word in node.keywords if word.arg)]
            case ast.Subscript():
                inner = [node.value]
        yield depth, node
        for each in inner if depth < _DEEPEST else ():
            yield from self._values(each, depth + 1)
