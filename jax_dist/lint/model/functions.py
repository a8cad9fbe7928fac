"""The functions of a file: who reads them, what they return, how values unpack."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.semantic_model import Module


def reads(module: Module, function: scopes.Function) -> Sequence[ast.expr] | None:
    """Return the expressions that read a function by its name; None if it has none of its own.

    A method is read as `self.name` in its class. A lambda has no name, and a name that is bound
    more than once belongs to no function.
    """
    if isinstance(function, ast.Lambda):
        return None
    owner, scope = module.parent(function), module.scope(function)
    if isinstance(owner, ast.ClassDef):
        return module.self_attributes(owner, function.name, ast.Load)
    is_only_one = len(scope.bindings.get(function.name, ())) == 1
    return module.reads(scope, function.name) if is_only_one else None


def returned_values(function: scopes.Function) -> list[ast.expr]:
    """Return the values of a function's own `return` statements."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    statements = (node for node in own_nodes(function) if isinstance(node, ast.Return))
    return [statement.value for statement in statements if statement.value is not None]


def own_nodes(function: scopes.Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions and classes in it."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    waiting: list[ast.AST] = [*reversed(body)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, scopes.Function | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


# Steps down into a tree of values: an index of a tuple, a key of a dict, ".name" of an attribute.
Path: TypeAlias = tuple[int | str, ...]


def innermost(module: Module, fun: Any) -> scopes.Function | None:
    """Return the def or lambda `f` of `vmap(partial(f, ...))`, or of a name for such a call.

    None if the file does not show it, or a call around it is not one of the `TRANSPARENT`.
    """
    for _ in range(8):  # calls around it
        value = module.value(fun) if isinstance(fun, ast.Name) else None
        if isinstance(value, ast.Call):  # `g = partial(f, ...)`
            fun = value
        if not (isinstance(fun, ast.Call) and fun.args):
            break
        if module.qualified_name(fun.func) not in TRANSPARENT:
            return None
        fun = fun.args[0]
    return pmaps.definition(module, fun)


# Transformations whose first argument is the function that runs.
TRANSPARENT = frozenset(("functools.partial", "jax.vmap", "jax.jit", "jax.checkpoint"))


def part_of(node: ast.AST, path: Path) -> ast.expr | None:
    """Return the item of a literal at the first step of a path: of `(a, b)` at (1,), it is `b`.

    None if the path is empty, or the node is no tuple, list or dict with such an item.
    """
    if not path:
        return None
    step = path[0]
    if isinstance(node, ast.Dict):
        keys = [getattr(key, "value", None) for key in node.keys]
        return node.values[keys.index(step)] if step in keys else None
    if not isinstance(node, ast.Tuple | ast.List) or not isinstance(step, int):
        return None
    is_starred = any(isinstance(element, ast.Starred) for element in node.elts)
    is_inside = -len(node.elts) <= step < len(node.elts)
    return node.elts[step] if is_inside and not is_starred else None


def unpack_target(module: Module, target: ast.expr) -> tuple[ast.expr, Path] | None:
    """Return `(value, (1, 0))` for the target `b` of `a, (b, c) = value`.

    None behind a starred target, `*a, b`, and for one that no assignment binds: that of a loop.
    """
    path: list[int] = []
    node: ast.AST = target
    around = module.parent(node)
    while isinstance(around, ast.Tuple | ast.List):
        position = next(index for index, element in enumerate(around.elts) if element is node)
        if any(isinstance(element, ast.Starred) for element in around.elts[:position]):
            return None
        path.insert(0, position)
        node, around = around, module.parent(around)
    if isinstance(around, ast.Assign | ast.AnnAssign) and around.value is not None:
        return around.value, tuple(path)
    return None
