"""Which bindings of a name may hold where it is read: by the order of statements, and loops."""

import ast
from typing import TYPE_CHECKING, Any

from jax_dist.checker.model.scopes import Binding

if TYPE_CHECKING:
    from jax_dist.checker.model.semantic_model import Module


def reaching_inside(module: "Module", inner: ast.AST, bindings: list[Binding]) -> list[Binding]:
    """The same for a read inside a function, which may run at any time once it is made.

    Args:
      module: that holds the read.
      inner: the function, lambda or class.
      bindings: all that the scope around `inner` has of the name.
    """
    if len(bindings) == 1 or any(not hasattr(each.node, "lineno") for each in bindings):
        return bindings
    made = reaching(module, inner, bindings)
    later = [each for each in bindings if place(each.node) > place(inner)]
    return [each for each in bindings if each in made or each in later]


def reaching(module: "Module", node: ast.AST, bindings: list[Binding]) -> list[Binding]:
    """Drops what a later plain assignment, in a block around `node`, surely hides.

    Args:
      module: that holds the read.
      node: the read, or what is made of it.
      bindings: all that its scope has of the name.
    """
    if len(bindings) == 1:
        return bindings
    around = {id(each) for each in module.ancestors(node)}
    loops = [each for each in module.ancestors(node) if isinstance(each, ast.For | ast.While)]
    bindings = sorted(bindings, key=lambda each: place(each.node))
    bindings, loops, fresh = _since_target(node, bindings, loops)
    before = [each for each in bindings if place(each.node) < place(node)]
    before = [each for each in before if not _assigns_from(module, each, around)]
    after = [each for each in bindings if each not in before]
    back = [each for each in after if any(_holds(loop, each.node) for loop in loops)]
    for number in range(len(before) - 1, -1, -1):
        statement = module.statement(before[number].node)
        if id(module.parent(statement)) in around and _same_block(module, statement, node):
            hidden_in_loop = not back or any(_holds(loop, statement) for loop in loops)
            return [*before[number:], *([] if hidden_in_loop else back)]
    return [*fresh, *before, *back] or bindings


def _assigns_from(module: "Module", binding: Binding, around: set[int]) -> bool:
    """Whether the binding's value is computed from the read: `x = f(x)`."""
    statement = module.statement(binding.node)
    assigns = isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign)
    return assigns and id(statement) in around


def _since_target(
    node: ast.AST, bindings: list[Binding], loops: list[Any]
) -> tuple[list[Binding], list[Any], list[Binding]]:
    """`for x in xs:` binds again in each iteration: only what its body does to `x` comes after."""
    for number, loop in enumerate(loops):
        if not isinstance(loop, ast.For) or not any(_holds(each, node) for each in loop.body):
            continue
        fresh = [each for each in bindings if _holds(loop.target, each.node)]
        if fresh:
            inside = [each for each in bindings if _holds(loop, each.node)]
            return [each for each in inside if each not in fresh], loops[:number], fresh
    return bindings, loops, []


def place(node: Any) -> tuple[int, int]:
    """Where a node begins: line and column."""
    return (node.lineno, node.col_offset)


def _holds(around: Any, node: Any) -> bool:
    """Whether a node begins within another."""
    return place(around) <= place(node) < (around.end_lineno, around.end_col_offset)


def block_of(module: "Module", statement: ast.stmt) -> list[ast.stmt] | None:
    """The very list of statements that holds a statement; None where nothing of the kind does."""
    parent = module.parent(statement)
    for field in ("body", "orelse", "finalbody"):
        block = getattr(parent, field, None)
        if isinstance(block, list) and any(each is statement for each in block):
            return block
    return None


def _same_block(module: "Module", statement: ast.stmt, node: ast.AST) -> bool:
    """Whether `node` stands later in the very list of statements that holds `statement`."""
    block = block_of(module, statement)
    if block is None:
        return False
    around = {id(node), *(id(each) for each in module.ancestors(node))}
    return any(id(each) in around for each in block)
