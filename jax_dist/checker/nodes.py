"""Nodes of some kinds, found without walking the tree again."""

import ast
import re
from typing import TypeVar

from jax_dist.checker.modules import Module

Node = TypeVar("Node", bound=ast.AST)


def of_kind(
    module: Module, kinds: type[Node] | tuple[type[Node], ...], pattern: re.Pattern[bytes]
) -> list[Node]:
    """All nodes of some classes, in no order; none in a file whose text has no such pattern.

    Args:
      module: the file.
      kinds: the classes; not ast.Name or ast.Constant.
      pattern: what any node of interest holds.
    """
    if pattern.search(module.source.python) is None:
        return []
    if isinstance(kinds, tuple):
        return [node for node in module.scopes.nodes if node.__class__ in kinds]
    return [node for node in module.scopes.nodes if node.__class__ is kinds]
