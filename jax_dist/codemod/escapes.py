"""Where a value escapes to: names, callers, other files; and where it is read again."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import stacking
from jax_dist.checker.model.flow import Origin
from jax_dist.checker.model.functions import is_self
from jax_dist.checker.model.scopes import NameScope
from jax_dist.checker.model.semantic_model import PARTIAL, Module


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
    nonlocals = (each for each in module.scopes.all if name in each.outer and name in each.bindings)
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


def by_text(module: Module) -> str:
    """Where names are read by their text, which is not followed; "" where nothing does that."""
    for scope in module.scopes.all:
        for name in ("locals", "globals", "vars", "exec", "eval"):
            for load in scope.loads.get(name, ()):
                call = module.parent(load)
                is_call = isinstance(call, ast.Call) and call.func is load
                if is_call and name == "vars" and call.args:  # type: ignore[union-attr]
                    continue
                if is_call and scope.lookup(name) is None:
                    return f"line {load.lineno} calls {name}"
    for name in ("f_locals", "f_globals", "__globals__"):
        for node in attributes(module, name):
            return f"line {node.lineno} reads {name}"
    return ""


def stays_inside(module: Module, origin: Origin) -> bool:
    """Whether the functions it came through are called from this file only, in plain words."""
    return all(
        isinstance(function, ast.Lambda) or is_followed(module, function)
        for function in origin.through
    )


def given_parameters(module: Module, node: ast.expr) -> set[ast.AST]:
    """The parameters of functions that other files may call, whose values a name may hold."""
    found: set[ast.AST] = set()
    waiting, seen = [node], set()
    while waiting:
        name = waiting.pop()
        if not isinstance(name, ast.Name) or name in seen:
            continue
        seen.add(name)
        for binding in module.reaching(name) or ():
            if binding.kind == "parameter":
                function: Any = module.parent(module.parent(binding.node))
                if not isinstance(function, ast.Lambda) and not is_followed(module, function):
                    found.add(binding.node)
            elif binding.kind == "assign" and binding.value is not None:
                waiting.append(binding.value)
    return found


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


_TRANSFORM = ("jax.", "flax.linen.", "equinox.", "haiku.")
_RUN = (*stacking.TREE_MAPS, "jax.pure_callback", "jax.debug.callback")


def may_be_traced(module: Module, node: ast.AST) -> bool:
    """Whether a function around a place, or one that calls it, is given to jax.grad or the like."""
    waiting: list[ast.AST] = [node]
    seen: set[ast.AST] = set()
    while waiting:
        function = module.function(waiting.pop())
        if function is None or function in seen:
            continue
        seen.add(function)
        waiting.append(function)
        if any(_transforms(module, each) for each in getattr(function, "decorator_list", ())):
            return True
        for read in _reads(module, function):
            call, given = module.parent(read), read
            while isinstance(call, ast.Call) and module.qualified_name(call.func) in PARTIAL:
                call, given = module.parent(call), call
            if isinstance(call, ast.Call) and call.func is given:
                waiting.append(call)
            elif isinstance(call, ast.Call) and _transforms(module, call.func):
                return True
    return False


def _reads(module: Module, function: Any) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function
        around = module.parent(function)
        targets = around.targets if isinstance(around, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Name):
                yield from module.reads(module.scope(target), target.id)
    elif isinstance(module.parent(function), ast.ClassDef):
        yield from attributes(module, function.name)
    else:
        yield from module.reads(module.scope(function), function.name)


def _transforms(module: Module, function: ast.expr) -> bool:
    """Whether it traces what it is given; a decorator may bind arguments first."""
    if isinstance(function, ast.Call):
        if module.qualified_name(function.func) in PARTIAL and function.args:
            function = function.args[0]
        else:
            function = function.func
    name = module.qualified_name(function) or ""
    return name.startswith(_TRANSFORM) and name not in _RUN
