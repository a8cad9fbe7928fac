"""Where a value escapes to: names, callers, other files; and where it is read again."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import stacking
from jax_dist.checker.model.flow import Origin
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
    """Out of a name on the left of an assignment.

    Args:
      module: the file.
      target: what stands there; anything but a name loses the value.
      binding: the node of the binding that it makes: the statement, or the name in a tuple.
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
    if name in scope.outer or _is_bound_inside(module, scope, name):
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


def _is_bound_inside(module: Module, scope: NameScope, name: str) -> bool:
    """Whether a function within sets the name of `scope`, as `nonlocal` or `global`."""
    for inner in module.once(_with_outer_names):
        if name in inner.outer and name in inner.bindings:
            found = inner.lookup(name)
            if found is not None and found[0] is scope:
                return True
    return False


def _with_outer_names(module: Module) -> list[NameScope]:
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
        reads = [each for each in module.reads(scope, function.name) if not _is_run(module, each)]
    if reads is None or function.decorator_list:  # a decorator may keep it, and call it later
        return None
    calls: list[ast.Call] = []
    for read in reads:
        call = module.parent(read)
        if not isinstance(call, ast.Call) or call.func is not read:
            return None
        calls.append(call)
    return calls


def _is_run(module: Module, read: ast.expr) -> bool:
    """`app.run(main)`: what main returns is the exit status."""
    call = module.parent(read)
    return isinstance(call, ast.Call) and module.qualified_name(call.func) == "absl.app.run"


def _reads_of_method(module: Module, function: Any) -> list[ast.expr] | None:
    """Where the class says `self.name`; None where others may mean it by `x.name`."""
    owner = module.parent(function)
    bases = getattr(owner, "bases", ())
    is_special = function.name.startswith("__") and function.name != "__init__"
    is_plain = all(isinstance(base, ast.Name | ast.Attribute) for base in bases)
    if is_special or not is_plain or _is_replaced(module, function):
        return None
    reads: list[ast.expr] = []
    for node in attributes(module, function.name):
        is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if not is_self or module.class_of(node) is not owner:
            return None
        reads.append(node)
    return reads


def _is_replaced(module: Module, function: Any) -> bool:
    """Whether a class of this file, or an assignment, gives a method's name another meaning."""
    owner = module.parent(function)
    for scope in module.scopes.all:
        is_other = scope.is_class and scope.node is not owner and getattr(scope.node, "bases", ())
        if is_other and function.name in scope.bindings:
            return True
    return any(store.attr == function.name for store in module.once(_stores))


def _stores(module: Module) -> list[ast.Attribute]:
    return [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]


def _attributes(module: Module) -> dict[str, list[ast.Attribute]]:
    """All that is read after a dot, by its name."""
    found: dict[str, list[ast.Attribute]] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.setdefault(node.attr, []).append(node)
    return found


def attributes(module: Module, name: str) -> list[ast.Attribute]:
    """Every `x.name` that is read."""
    return module.once(_attributes).get(name, [])


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
        isinstance(function, ast.Lambda)
        or (is_private(module, function) and are_seen(module, function))
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
                if not isinstance(function, ast.Lambda) and not (
                    is_private(module, function) and are_seen(module, function)
                ):
                    found.add(binding.node)
            elif binding.kind == "assign" and binding.value is not None:
                waiting.append(binding.value)
    return found


def are_seen(module: Module, function: Any) -> bool:
    """Whether all calls of a function are seen, with all that they give it."""
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


# --- other files


def is_used_elsewhere(module: Module, name: str) -> bool:
    """Whether another file may mean a name of this one, or an attribute of its objects."""
    graph = module.graph
    if graph is None:
        return False
    find = graph.users if name in module.scopes.module.bindings else graph.readers
    return any(True for _ in find(os.path.abspath(module.source.path), name))


def user_of_result(module: Module, name: str) -> str:
    """The file that calls a function of this one and uses what it returns; "" where none does."""
    if module.graph is None:
        return ""
    found = module.graph.users_of_result(os.path.abspath(module.source.path), name)
    return next(map(os.path.basename, found), "")


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
