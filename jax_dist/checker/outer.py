"""What of jax traces a function: the transformations and loops around a place in a file."""

import ast
from collections.abc import Iterator

from jax_dist.checker import functions, scopes
from jax_dist.checker.modules import Module

# By name: which positional arguments are traced.
OUTER: dict[str, tuple[int, ...]] = {
    "jax.jit": (0,),
    "jax.experimental.pjit.pjit": (0,),
    "jax.grad": (0,),
    "jax.value_and_grad": (0,),
    "jax.lax.scan": (0,),
    "jax.lax.while_loop": (0, 1),
    "jax.lax.fori_loop": (2,),
    "jax.lax.cond": (1, 2),
    "jax.lax.map": (0,),
}


def given_to(module: Module, function: ast.AST) -> tuple[str, ast.Call] | None:
    """The transformation that an expression is handed to right where it stands."""
    call = module.parent(function)
    if not isinstance(call, ast.Call) or call.func is function:
        return None
    meaning = module.meaning(call.func)
    if meaning is None:
        return None
    for position, argument in enumerate(call.args, start=len(meaning.args)):
        if argument is function and position in OUTER.get(meaning.name, ()):
            return meaning.name, call
    return None


def decorators(module: Module, function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """`(name, decorator)` of the transformations that decorate a def, outermost first."""
    for decorator in getattr(function, "decorator_list", ()):
        meaning = module.meaning(decorator)
        if meaning is None and isinstance(decorator, ast.Call):
            meaning = module.meaning(decorator.func)  # @jax.jit(donate_argnums=0)
        if meaning is not None and meaning.name in OUTER:
            yield meaning.name, decorator


def around(module: Module, node: ast.AST) -> str | None:
    """What traces the code at a place; None where this file does not show it."""
    for each in module.ancestors(node):
        if isinstance(each, scopes.Function):
            found = _tracing(module, each)
            if found is not None and not _is_outside(module, node, each):
                return found
    return None


def _found(module: Module) -> dict[scopes.Function, str | None]:
    """What traces each function, as far as it was asked for."""
    del module
    return {}


def _tracing(module: Module, function: scopes.Function) -> str | None:
    found = module.once(_found)
    if function not in found:
        found[function] = _looked_up(module, function)
    return found[function]


def _looked_up(module: Module, function: scopes.Function) -> str | None:
    for name, _ in decorators(module, function):
        return name
    for read in _reads(module, function):
        given = given_to(module, read)
        if given is not None:
            return given[0]
    return None


def _reads(module: Module, function: scopes.Function) -> list[ast.expr]:
    if isinstance(function, ast.Lambda):
        return [function]
    owner = module.parent(function)
    if isinstance(owner, ast.ClassDef):
        if f"self.{function.name}".encode() not in module.source.python:
            return []  # most methods; looking for attributes walks over all classes
        return list(module.once(functions.self_reads)[owner].get(function.name, []))
    scope = module.scope(function)
    if len(scope.bindings.get(function.name, ())) != 1:
        return []
    return list(module.reads(scope, function.name))


def _is_outside(module: Module, node: ast.AST, function: scopes.Function) -> bool:
    """Whether the node is a decorator, default or annotation of the function: not in its body."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    chain = {id(node), *(id(each) for each in module.ancestors(node))}
    return not any(id(each) in chain for each in body)
