"""Whether all that calls a function is seen in its file."""

import ast
from typing import Any

from jax_dist.checker.modules import Module
from jax_dist.checker.origins import Origin
from jax_dist.migrating import neighbours, onward


def is_known_outside(module: Module, function: Any) -> bool:
    """Whether other files can name a function, as a name of this file or as a method."""
    return module.function(function) is None


def stays_inside(module: Module, origin: Origin) -> bool:
    """Whether the functions it came through are called from this file only, in plain words."""
    return all(
        isinstance(function, ast.Lambda)
        or (is_private(module, function) and are_seen(module, function))
        for function in origin.through
    )


def may_be_given(module: Module, node: ast.expr) -> bool:
    """Whether a name may hold what another file gives to a parameter."""
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
                    return True
            elif binding.kind == "assign" and binding.value is not None:
                waiting.append(binding.value)
    return False


def are_seen(module: Module, function: Any) -> bool:
    """Whether all calls of a function are seen, with all that they give it."""
    calls = onward.callers(module, function)
    return calls is not None and not any(
        isinstance(each, ast.Starred) or (isinstance(each, ast.keyword) and each.arg is None)
        for call in calls
        for each in (*call.args, *call.keywords)
    )


def is_private(module: Module, function: Any) -> bool:
    """Whether no other file is likely to call a function: none says its name and its file's."""
    return not is_known_outside(module, function) or not neighbours.is_said(module, function.name)
