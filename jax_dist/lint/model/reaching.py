"""Which bindings of a name may hold where it is read: by the order of statements, and by loops."""

import ast
from typing import Any

from jax_dist.lint.model.scopes import Binding, NameScope, Scopes, place


def bindings_of(tree: Scopes, node: ast.Name) -> list[Binding] | None:
    """The bindings that may hold where a name is read; None: the file has none."""
    scope = tree.scope(node)
    found = scope.lookup(node.id)
    if found is None:
        return None
    home, bindings = found
    outer = [each for each in bindings if each.kind == "outer"]  # they may run at any time
    own = [each for each in bindings if each.kind != "outer"] if outer else bindings
    return [*_in_order(tree, node, scope, home, own), *outer]


def _in_order(
    tree: Scopes, node: ast.Name, scope: NameScope, home: NameScope, bindings: list[Binding]
) -> list[Binding]:
    """Those that may hold by the order of statements, for a read in `scope` of a name of `home`."""
    if home is scope or home is scope.around_comprehensions:
        return _reaching(tree, node, bindings)
    inner: ast.AST = node  # the function, lambda or class of `home`'s own level around it
    for around in tree.ancestors(node):
        made = tree.of.get(around)
        if made is home:
            break
        if made is not None:
            inner = around
    return _reaching_inside(tree, inner, bindings)


def _reaching_inside(tree: Scopes, inner: ast.AST, bindings: list[Binding]) -> list[Binding]:
    """The same for a read inside a function, which may run at any time once it is made."""
    if len(bindings) == 1 or any(not hasattr(each.node, "lineno") for each in bindings):
        return bindings
    made = _reaching(tree, inner, bindings)
    later = [each for each in bindings if place(each.node) > place(inner)]
    return [each for each in bindings if each in made or each in later]


def _reaching(tree: Scopes, node: ast.AST, bindings: list[Binding]) -> list[Binding]:
    """Drops what a later plain assignment, in a block around `node`, surely hides."""
    if len(bindings) == 1:
        return bindings
    around = {id(node), *map(id, tree.ancestors(node))}
    loops = [each for each in tree.ancestors(node) if isinstance(each, ast.For | ast.While)]
    bindings = sorted(bindings, key=lambda each: place(each.node))
    bindings, loops, fresh = _since_target(node, bindings, loops)
    assigns = (ast.Assign, ast.AnnAssign, ast.AugAssign)
    # Not one whose value is computed from the read: `x = f(x)`.
    computing = {id(each) for each in tree.ancestors(node) if isinstance(each, assigns)}
    before = [each for each in bindings if place(each.node) < place(node)]
    before = [each for each in before if id(tree.statement(each.node)) not in computing]
    after = [each for each in bindings if each not in before]
    back = [each for each in after if any(_holds(loop, each.node) for loop in loops)]
    for number in range(len(before) - 1, -1, -1):
        statement = tree.statement(before[number].node)
        if id(tree.parents[statement]) not in around:
            continue
        # Where the read stands later in the very list of statements that holds it.
        if any(id(each) in around for each in tree.block_of(statement)):
            hidden_in_loop = not back or any(_holds(loop, statement) for loop in loops)
            return [*before[number:], *([] if hidden_in_loop else back)]
    return [*fresh, *before, *back] or bindings


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


def _holds(around: Any, node: Any) -> bool:
    """Whether a node begins within another."""
    return place(around) <= place(node) < (around.end_lineno, around.end_col_offset)
