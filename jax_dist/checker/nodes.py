"""Nodes of some kinds, found without walking the tree again."""

import ast
import re
from typing import Any, TypeVar

from jax_dist.checker.modules import Module

Node = TypeVar("Node", bound=ast.AST)


def _place(node: Any) -> tuple[int, int]:
    return (node.lineno, node.col_offset)


def of_kind(
    module: Module, kinds: type[Node] | tuple[type[Node], ...], pattern: re.Pattern[bytes]
) -> list[Node]:
    """All nodes of some classes, in order of place; none in a file whose text has no such pattern.

    Args:
      module: the file.
      kinds: the classes; not ast.Name or ast.Constant.
      pattern: what any node of interest holds.
    """
    if pattern.search(module.source.python) is None:
        return []
    if isinstance(kinds, tuple):
        found: Any = [node for node in module.scopes.nodes if node.__class__ in kinds]
    else:
        found = [node for node in module.scopes.nodes if node.__class__ is kinds]
    return sorted(found, key=_place)
