"""Whether a place may be run under a transformation: what it is given are no arrays then."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import stacking
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.migrating import escapes

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
        yield from escapes.attributes(module, function.name)
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
