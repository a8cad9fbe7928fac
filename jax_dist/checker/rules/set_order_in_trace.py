"""JXD404: iterating a set while tracing."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker.model import semantic_model, traced
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

_LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FOR = re.compile(rb"\bfor\b")

PAGE = Page(
    code="JXD404",
    name="set-order-in-trace",
    what="Finds loops over a set in functions passed to pmap, shard_map or jit. jit is checked "
    "only in files that also mention pmap or shard_map.",
    why="The order of a set of strings differs in each process (PYTHONHASHSEED), and so does the "
    "order of the operations: the persistent cache misses in every run (measured, jax "
    "0.10.2), and processes that must run the same program run different ones.",
    example="step = jax.pmap(lambda x: sum(x[name] for name in {'a', 'b'}))\n",
    instead="step = jax.pmap(lambda x: sum(x[name] for name in sorted({'a', 'b'})))\n",
    fix="Unsafe: elements that cannot be compared cannot be sorted, and the order of a sum may "
    "change its last digits.",
    since="Any jax.",
    source="Measured on jax 0.10.2.",
)


@rule(PAGE, triggers=traced.TRIGGERS)
def check(module: Module) -> Iterator[Found]:
    functions = {each.function for each in traced.traced(module)}
    for node in _loops(module) if functions else ():
        if not _is_set(module, node.iter) or functions.isdisjoint(_around(module, node)):
            continue
        if isinstance(node, ast.comprehension) and _is_order_lost(module, node):
            continue
        start, end = module.span(node.iter)
        edits = (Edit(start, start, "sorted("), Edit(end, end, ")"))
        fix = Fix("sort the set", Safety.UNSAFE, edits)
        yield Found(node.iter, "the order of a set differs in each process", fix)


def _around(module: Module, node: ast.AST) -> Iterator[ast.AST]:
    """The functions in whose bodies a node stands."""
    function = module.function(node)
    while function is not None:
        yield function
        function = module.function(function)


def _loops(module: Module) -> Iterator[ast.For | ast.comprehension]:
    for node in semantic_model.of_kind(module, _LOOPS, _FOR):
        if isinstance(node, ast.For):
            yield node
        else:
            yield from node.generators


def _is_set(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        hidden = module.scope(node.func).lookup(node.func.id) is not None
        return node.func.id in ("set", "frozenset") and not hidden
    if isinstance(node, ast.Name):
        values = module.values(node)
        sets = (ast.Set, ast.SetComp, ast.Call)
        if not values or not all(isinstance(value, sets) for value in values):
            return False
        return all(_is_set(module, value) for value in values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return _is_set(module, node.left) and _is_set(module, node.right)
    return False


def _is_order_lost(module: Module, node: ast.comprehension) -> bool:
    """Whether the comprehension makes a set again, or what takes it does not mind the order."""
    around = module.parent(node)
    if isinstance(around, ast.SetComp):
        return True
    taker = module.parent(around)
    return (
        isinstance(taker, ast.Call)
        and isinstance(taker.func, ast.Name)
        and taker.func.id in ("sorted", "set", "frozenset", "any", "all", "len")
    )
