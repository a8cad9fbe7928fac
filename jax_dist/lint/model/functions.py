"""The functions of a file: who calls them and with what, what they return, how values unpack."""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.semantic_model import Module


def reads(module: Module, function: scopes.Function) -> Sequence[ast.expr] | None:
    """Return where this file reads a function by its name; None where it has none of its own."""
    owner = module.parent(function)
    if isinstance(function, ast.Lambda):
        if not (isinstance(owner, ast.Assign) and isinstance(owner.targets[0], ast.Name)):
            return None
        scope, name = module.scope(owner), owner.targets[0].id
    else:
        scope, name = module.scope(function), function.name
    if isinstance(owner, ast.ClassDef):
        return pmaps.self_attributes(module, owner, name, ast.Load)
    return module.reads(scope, name) if len(scope.bindings.get(name, ())) == 1 else None


def callers(module: Module, function: scopes.Function) -> list[ast.Call] | None:
    """Return every call of a function in this file; None where it is handed on, or has no name."""
    found = None if getattr(function, "decorator_list", ()) else reads(module, function)
    calls = [call for read in found or () if (call := module.call_of(read)) is not None]
    return calls if found is not None and len(calls) == len(found) else None


def argument_of(
    module: Module, call: ast.Call, function: scopes.Function, parameter: ast.arg
) -> ast.expr | None:
    """Return what a call gives a parameter; None where that cannot be read."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    positional = named[1:] if isinstance(module.parent(function), ast.ClassDef) else named
    for keyword in call.keywords:
        if keyword.arg == parameter.arg:
            return keyword.value
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            return None
        if position < len(positional) and positional[position] is parameter:
            return argument
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    with_default = named[len(named) - len(arguments.defaults) :] + arguments.kwonlyargs
    values = [*arguments.defaults, *arguments.kw_defaults]
    pairs = zip(with_default, values, strict=True)
    return next((value for each, value in pairs if each is parameter), None)


def returned(function: scopes.Function) -> list[ast.expr]:
    """Return the values of a function's own `return` statements."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    returns = [each for each in own_nodes(function) if isinstance(each, ast.Return)]
    return [each.value for each in returns if each.value is not None]


def own_nodes(function: scopes.Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions and classes in it."""
    is_lambda = isinstance(function, ast.Lambda)
    waiting: list[ast.AST] = [function.body] if is_lambda else [*function.body[::-1]]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, scopes.Function | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def is_in_body(module: Module, function: scopes.Function, child: Any) -> bool:
    """Return whether a child of a function is of its body: no decorator, default or annotation."""
    if isinstance(function, ast.Lambda):
        return child is function.body
    return module.scopes.fields.get(child) == "body"


# Down into a tree: a place in a tuple, a key of a dict, ".name" of an attribute.
Path: TypeAlias = tuple[int | str, ...]


def innermost(module: Module, fun: Any) -> scopes.Function | None:
    """Return the def or lambda behind `vmap(partial(f, ...))`, names for it on the way included."""
    for _ in range(8):
        if isinstance(fun, ast.Name) and isinstance(value := module.value(fun), ast.Call):
            fun = value
        if not (isinstance(fun, ast.Call) and fun.args):
            break
        if module.qualified_name(fun.func) not in TRANSPARENT:
            return None
        fun = fun.args[0]
    return pmaps.definition(module, fun)


TRANSPARENT = frozenset(("functools.partial", "jax.vmap", "jax.jit", "jax.checkpoint"))


def part_of(node: ast.AST, path: Path) -> ast.expr | None:
    """Return the first step of a path into a literal."""
    if not path:
        return None
    step = path[0]
    if isinstance(node, ast.Tuple | ast.List) and isinstance(step, int):
        if any(isinstance(each, ast.Starred) for each in node.elts):
            return None
        return node.elts[step] if -len(node.elts) <= step < len(node.elts) else None
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == step:
                return value
    return None


def unpacked(module: Module, target: ast.expr) -> tuple[ast.expr, Path] | None:
    """Return `(value, (1,))` of `b` in `a, b = value`; None for what is not so plain."""
    place: list[int] = []
    node: ast.AST = target
    around = module.parent(node)
    while isinstance(around, ast.Tuple | ast.List):
        position = next(number for number, each in enumerate(around.elts) if each is node)
        if any(isinstance(each, ast.Starred) for each in around.elts[:position]):
            return None
        place.insert(0, position)
        node, around = around, module.parent(around)
    if isinstance(around, ast.Assign | ast.AnnAssign) and around.value is not None:
        return around.value, tuple(place)
    return None
