"""The functions of a file: who calls them and with what, what they return, what classes hold."""

import ast
from collections.abc import Iterable, Iterator

from jax_dist.checker.model import scopes
from jax_dist.checker.model.semantic_model import Module


def callers(module: Module, function: scopes.Function) -> list[ast.Call] | None:
    """Every call of a function in this file; None where it is handed on, or has no name."""
    if isinstance(function, ast.Lambda):
        around = module.parent(function)
        if not (isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Name)):
            return None
        scope, name = module.scope(around), around.targets[0].id
    elif function.decorator_list:
        return None
    else:
        owner = module.parent(function)
        if isinstance(owner, ast.ClassDef):
            reads: Iterable[ast.expr] = module.once(self_reads)[owner].get(function.name, [])
            return _calls(module, reads)
        scope, name = module.scope(function), function.name
    if len(scope.bindings.get(name, ())) != 1:
        return None
    return _calls(module, module.reads(scope, name))


def _calls(module: Module, reads: Iterable[ast.expr]) -> list[ast.Call] | None:
    calls: list[ast.Call] = []
    for read in reads:
        call = module.parent(read)
        if not (isinstance(call, ast.Call) and call.func is read):
            return None
        calls.append(call)
    return calls


def argument_of(
    module: Module, call: ast.Call, function: scopes.Function, parameter: ast.arg
) -> ast.expr | None:
    """What a call gives a parameter; None where that cannot be read."""
    positional = [*function.args.posonlyargs, *function.args.args]
    if isinstance(module.parent(function), ast.ClassDef):
        positional = positional[1:]
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
    return _default_of(function.args, parameter)


def _default_of(arguments: ast.arguments, parameter: ast.arg) -> ast.expr | None:
    positional = [*arguments.posonlyargs, *arguments.args]
    with_default = positional[len(positional) - len(arguments.defaults) :]
    for each, default in zip(with_default, arguments.defaults, strict=True):
        if each is parameter:
            return default
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if each is parameter:
            return default
    return None


def results_of(function: scopes.Function) -> list[ast.expr] | None:
    """What a function may return; None where its decorators or its kind hide that."""
    if isinstance(function, ast.AsyncFunctionDef):
        return None
    if not isinstance(function, ast.Lambda) and function.decorator_list:
        return None
    if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in own_nodes(function)):
        return None
    return returned(function)


def returned(function: scopes.Function) -> list[ast.expr]:
    """The values of a function's own `return` statements."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    returns = [each for each in own_nodes(function) if isinstance(each, ast.Return)]
    return [each.value for each in returns if each.value is not None]


def yields_of(function: scopes.Function) -> list[ast.expr]:
    """What a generator function yields."""
    found = [each for each in own_nodes(function) if isinstance(each, ast.Yield)]
    return [each.value for each in found if each.value is not None]


def own_nodes(function: scopes.Function) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes in it."""
    waiting: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else []
    if not isinstance(function, ast.Lambda):
        waiting = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, scopes.Function | ast.ClassDef):
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def self_stores(module: Module) -> dict[ast.ClassDef, dict[str, list[ast.Attribute]]]:
    return _self_attributes(module, ast.Store)


def self_reads(module: Module) -> dict[ast.ClassDef, dict[str, list[ast.Attribute]]]:
    return _self_attributes(module, ast.Load)


def _self_attributes(
    module: Module, context: type[ast.expr_context]
) -> dict[ast.ClassDef, dict[str, list[ast.Attribute]]]:
    """Where each class says `self.x`, by `x`."""
    found: dict[ast.ClassDef, dict[str, list[ast.Attribute]]] = {}
    for node in module.scopes.of:
        if not isinstance(node, ast.ClassDef):
            continue
        of_class = found.setdefault(node, {})
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, context) and is_self(each):
                of_class.setdefault(each.attr, []).append(each)
    return found


def all_nodes(function: scopes.Function) -> Iterator[ast.AST]:
    """The nodes of a function's body, with those of functions in it."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    for each in body:
        yield from ast.walk(each)


def calls_of_names(module: Module) -> list[ast.Call]:
    """Every call of a plain name, in order of place."""
    found: list[ast.Call] = []
    for scope in module.scopes.all:
        for loads in scope.loads.values():
            for load in loads:
                call = module.parent(load)
                if isinstance(call, ast.Call) and call.func is load:
                    found.append(call)
    return sorted(found, key=scopes.place)
