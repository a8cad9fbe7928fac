"""Where a value escapes to: names, callers, other files; and where it is read again."""

import ast
import dataclasses
import os
from typing import Any

from jax_dist.checker.model.functions import is_self
from jax_dist.checker.model.scopes import NameScope
from jax_dist.checker.model.semantic_model import Module


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """It flows on to where it is looked at again, or nothing is done that depends on its shape."""

    reads: tuple[ast.expr, ...] = ()  # where: each of them must be known to be this value
    caution: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Escaped:
    """Something is done that is not followed."""

    why: str


def from_target(module: Module, target: ast.expr, binding: ast.AST) -> Kept | Escaped:
    """Out of what stands on the left of an assignment: anything but a name loses the value.

    `binding` is the node of the binding that it makes: the statement, or the name in a tuple.
    """
    if not isinstance(target, ast.Name):
        text = " ".join(module.text(target).split())
        return Escaped(f"line {target.lineno} keeps it in {text}")
    scope = module.scope(target)
    if scope is module.scopes.module and is_used_elsewhere(module, target.id):
        return Escaped(f"other files may use {target.id}, which line {target.lineno} sets")
    return from_binding(module, scope, target.id, binding)


def from_binding(module: Module, scope: NameScope, name: str, binding: ast.AST) -> Kept | Escaped:
    """Out of a name that has got it, in the reads which that binding may reach."""
    line = getattr(binding, "lineno", 0)
    if scope.is_class:
        return Escaped(f"line {line} keeps it in a class")
    setting = (each for each in module.once(_with_outer_names) if name in each.outer)
    nonlocals = (each for each in setting if name in each.bindings)
    if name in scope.outer or any((each.lookup(name) or (None,))[0] is scope for each in nonlocals):
        return Escaped(f"line {line} keeps it in {name}, which several functions set")
    for each in scope.bindings.get(name, ()):
        if isinstance(each.node, ast.Name) and isinstance(module.parent(each.node), ast.AugAssign):
            return Escaped(f"line {each.node.lineno} changes {name} in place")
    reads = [
        read
        for read in module.reads(scope, name)
        if any(each.node is binding for each in module.reaching(read) or ())
    ]
    return Kept(tuple(reads))


def _with_outer_names(module: Module) -> list[NameScope]:
    """The scopes that set names of others; found once, for files with very many functions."""
    return [scope for scope in module.scopes.all if scope.outer]


def callers(module: Module, function: Any) -> list[ast.Call] | None:
    """The calls of a function in this file; None where it is also handed on, or hidden."""
    if isinstance(function, ast.Lambda):
        return None
    if isinstance(module.parent(function), ast.ClassDef):
        reads = _reads_of_method(module, function)
    else:
        scope = module.scope(function)
        if len(scope.bindings.get(function.name, ())) != 1:
            return None
        reads = []
        for read in module.reads(scope, function.name):
            call = module.parent(read)
            name = module.qualified_name(call.func) if isinstance(call, ast.Call) else None
            if name != "absl.app.run":  # what `main` returns is the exit status there
                reads.append(read)
    if reads is None or function.decorator_list:  # a decorator may keep it, and call it later
        return None
    calls: list[ast.Call] = []
    for read in reads:
        call = module.parent(read)
        if not isinstance(call, ast.Call) or call.func is not read:
            return None
        calls.append(call)
    return calls


def _reads_of_method(module: Module, function: Any) -> list[ast.expr] | None:
    """Where the class says `self.name`; None where others may mean it by `x.name`."""
    owner, name = module.parent(function), function.name
    bases = getattr(owner, "bases", ())
    is_special = name.startswith("__") and name != "__init__"
    is_plain = all(isinstance(base, ast.Name | ast.Attribute) for base in bases)
    is_overridden = any(
        scope.is_class
        and scope.node is not owner
        and getattr(scope.node, "bases", ())
        and name in scope.bindings
        for scope in module.scopes.all
    )
    if is_special or not is_plain or is_overridden or attributes(module, name, ast.Store):
        return None
    reads = attributes(module, name)
    is_own = all(is_self(read) and module.class_of(read) is owner for read in reads)
    return [*reads] if is_own else None


def _attributes(module: Module) -> dict[tuple[str, type], list[ast.Attribute]]:
    """All that stands after a dot, by its name and by what is done there."""
    found: dict[tuple[str, type], list[ast.Attribute]] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute):
            found.setdefault((node.attr, type(node.ctx)), []).append(node)
    return found


def attributes(
    module: Module, name: str, context: type[ast.expr_context] = ast.Load
) -> list[ast.Attribute]:
    """Every `x.name` that is read, or set."""
    return module.once(_attributes).get((name, context), [])


def is_followed(module: Module, function: Any) -> bool:
    """Whether all calls of a function are seen, in this file, with all that they give it."""
    if not is_private(module, function):
        return False
    calls = callers(module, function)
    return calls is not None and not any(
        isinstance(each, ast.Starred) or (isinstance(each, ast.keyword) and each.arg is None)
        for call in calls
        for each in (*call.args, *call.keywords)
    )


def is_private(module: Module, function: Any) -> bool:
    """Whether no other file calls a function, by a name of this file or as a method."""
    is_inner = module.function(function) is not None
    return is_inner or not is_used_elsewhere(module, function.name)


def is_used_elsewhere(module: Module, name: str) -> bool:
    """Whether another file may mean a name of this one, or an attribute of its objects."""
    graph = module.graph
    if graph is None:
        return False
    find = graph.users if name in module.scopes.module.bindings else graph.readers
    return any(True for _ in find(os.path.abspath(module.source.path), name))
