"""Finds host edits: expressions that put something else around the same value.

`jax_utils.unreplicate(state)` that became `state` is one: nothing around it. What is around it is a
small program of its own, so it can be traced and compared; the value goes on being computed where
it was.
"""

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_dist.codemod.verify.merged_program import cannot_be_moved, paired, same

_DEEPEST = 2  # calls around the value
_BLOCKS = ("body", "orelse", "finalbody")
_PARTS = ("handlers", "cases")  # that have a block


@dataclass(frozen=True, slots=True)
class HostForm:
    """An expression, and the value in it."""

    node: ast.expr
    of: ast.expr

    def around(self, name: str) -> str:
        """The expression with a name in the place of the value, in one line."""
        memo = {id(self.of): ast.Name(name, ast.Load())}
        return ast.unparse(copy.deepcopy(self.node, memo))


@dataclass(frozen=True, slots=True)
class HostEdit:
    """Both forms of one."""

    before: HostForm
    after: HostForm

    @property
    def line(self) -> int:
        """Before, from 1."""
        return self.before.node.lineno


def find(before: ast.Module, after: ast.Module) -> list[HostEdit]:
    """The host edits between two texts of a program, the outer ones first.

    Args:
      before: its syntax tree.
      after: that of what it became.
    """
    return list(_Search(before).block(before.body, after.body))


class _Search:
    def __init__(self, tree: ast.Module):
        imports = (each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom))
        names = (alias.asname or alias.name.partition(".")[0] for i in imports for alias in i.names)
        self._imported = frozenset(names)  # no values

    def block(
        self, before: Sequence[Any], after: Sequence[Any], *, in_class: bool = False
    ) -> Iterator[HostEdit]:
        for one, other in paired(before, after):
            if same(one, other):
                continue
            if not in_class:  # a lambda in the body of a class does not see its names
                yield from self._fields(one, other, (*_BLOCKS, *_PARTS, "decorator_list")) or ()
            defines = isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = isinstance(one, ast.ClassDef) or (in_class and not defines)
            for name in _BLOCKS:
                if isinstance(below := getattr(one, name, None), list):
                    yield from self.block(below, getattr(other, name), in_class=inner)
            for name in _PARTS:
                parts = zip(getattr(one, name, ()), getattr(other, name, ()), strict=False)
                for part, partner in parts:
                    yield from self.block(part.body, partner.body, in_class=inner)

    def _fields(
        self, one: ast.AST, other: ast.AST, skipped: Sequence[str] = ()
    ) -> list[HostEdit] | None:
        """The host edits below two nodes; None where they differ in more than that."""
        if type(one) is not type(other):
            return None
        found: list[HostEdit] = []
        for name in one._fields:
            if name not in (*skipped, "type_comment", "ctx"):
                below = self._between(getattr(one, name, None), getattr(other, name, None))
                if below is None:
                    return None
                found += below
        return found

    def _between(self, one: object, other: object) -> list[HostEdit] | None:
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other):
                return None
            parts = [self._between(*pair) for pair in zip(one, other, strict=True)]
            return None if None in parts else [edit for part in parts if part for edit in part]
        if isinstance(one, ast.expr) and isinstance(other, ast.expr):
            return self._expression(one, other)
        if isinstance(one, ast.AST) and isinstance(other, ast.AST):
            return self._fields(one, other)
        return [] if one == other else None

    def _expression(self, one: ast.expr, other: ast.expr) -> list[HostEdit] | None:
        if same(one, other):
            return []
        if (found := self._fields(one, other)) is not None:
            return found
        if isinstance(one, ast.Starred | ast.Slice) or cannot_be_moved(one):
            return None
        ones, others = self._values(one), list(self._values(other))
        pairs = [(d + e, x, y) for d, x in ones for e, y in others if d + e]
        for _, x, y in sorted(pairs, key=lambda pair: pair[0]):
            if (below := [] if same(x, y) else self._fields(x, y)) is not None:
                return [HostEdit(HostForm(one, x), HostForm(other, y)), *below]
        return None

    def _values(self, node: ast.expr, depth: int = 0) -> Iterator[tuple[int, ast.expr]]:
        """What an expression may put something around, and how deep it lies."""
        if isinstance(node, ast.Lambda | ast.Starred):
            return
        if isinstance(node, ast.Constant):  # the value only where there is no other
            depth += _DEEPEST
        if isinstance(node, ast.Name) and node.id in self._imported:
            return
        yield depth, node
        if depth >= _DEEPEST:
            return
        inner: list[ast.expr] = []
        if isinstance(node, ast.Call):
            inner = [
                *node.args,
                *([node.func.value] if isinstance(node.func, ast.Attribute) else ()),
            ]
        elif isinstance(node, ast.Subscript):
            inner = [node.value]
        for each in inner:
            yield from self._values(each, depth + 1)
