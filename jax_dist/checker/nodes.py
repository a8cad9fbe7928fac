"""Nodes of a file near some text: the walk leaves out whatever covers no line of interest.

A walk over a whole tree costs half as much as parsing it; rules that look for `[0]` or `reshape`
look at few lines.
"""

import ast
import bisect
import re
from typing import Any, TypeVar

from jax_dist.checker.modules import Module

Node = TypeVar("Node", bound=ast.AST)

_LEAVES = (ast.Name, ast.Constant, ast.alias, ast.expr_context)


def on_lines(module: Module, kind: type[Node], pattern: re.Pattern[bytes]) -> list[Node]:
    """Nodes that cover a line on which `pattern` is found, in order of place; others may be too.

    Args:
      module: the file.
      kind: the class of nodes that are wanted.
      pattern: what one of their lines holds.
    """
    starts = module.source.line_starts
    offsets = (match.start() for match in pattern.finditer(module.source.python))
    lines = sorted({bisect.bisect_right(starts, offset) for offset in offsets})
    found: list[Any] = []
    stack: list[Any] = [module.tree] if lines else []
    while stack:
        node = stack.pop()
        if isinstance(node, kind):
            found.append(node)
        for name in node._fields:
            child: Any = getattr(node, name, None)
            if isinstance(child, list):
                stack += [each for each in child if _covers(each, lines)]
            elif _covers(child, lines):
                stack.append(child)
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return found


def _covers(node: Any, lines: list[int]) -> bool:
    """Whether a node that may hold others stands on one of the lines; decorators go first."""
    if not isinstance(node, ast.AST) or isinstance(node, _LEAVES):
        return False
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return True  # arguments, keywords, a comprehension
    for decorator in getattr(node, "decorator_list", ()):
        first = min(first, decorator.lineno)
    place = bisect.bisect_left(lines, first)
    return place < len(lines) and lines[place] <= last
