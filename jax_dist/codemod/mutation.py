"""Whether a function changes a tree in place that it is given, so that no copy will do."""

import ast
import os
from typing import Any

from jax_dist.checker.model import functions, pmaps, scopes
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module

_CHANGING = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
_ATTRIBUTE_SETTERS = ("setattr", "delattr")
_DEEPEST = 4  # calls that are followed


def why_not_copied(module: Module, project: Project, node: ast.expr, depth: int = 0) -> str:
    """Why an argument of a call must be the value itself; "" where a copy does as well.

    Args:
      module: the file.
      project: where functions of other files are looked up. Of those that are in none of its files
        nothing is said.
      node: what is read.
      depth: how many calls there are around.
    """
    around = module.parent(node)
    call = module.parent(around) if isinstance(around, ast.keyword) else around
    if not isinstance(call, ast.Call) or call.func is node or depth > _DEEPEST:
        return ""
    text = module.text(call.func)
    if text in _ATTRIBUTE_SETTERS:
        return f"{text} changes it in line {node.lineno}"
    home, function = _callee(module, project, call)
    if function is None:
        is_hidden = not isinstance(call.func, ast.Name | ast.Attribute)
        if is_hidden and isinstance(module.parent(call), ast.Expr):
            return f"{text} of line {node.lineno} may change it"
        return ""
    for parameter in scopes.parameters(function.args):
        is_given = functions.argument_of(home, call, function, parameter) is node
        if is_given and _is_changed(home, project, function, parameter.arg, depth):
            return f"{text} changes it in place ({os.path.basename(home.source.path)})"
    return ""


def _callee(module: Module, project: Project, call: ast.Call) -> tuple[Module, Any]:
    """The function that is called, and its file; None where the project does not show it."""
    found = pmaps.definition(module, call.func)
    if found is not None:
        return module, found
    name = module.qualified_name(call.func) or ""
    place, _, last = name.rpartition(".")
    path = project.file(place, os.path.dirname(os.path.abspath(module.source.path)))
    home = None if path is None else project.parsed(path)
    bindings = [] if home is None else home.scopes.module.bindings.get(last, [])
    if home is None or len(bindings) != 1 or bindings[0].kind != "def":
        return module, None
    return home, bindings[0].node


def _is_changed(module: Module, project: Project, function: Any, name: str, depth: int) -> bool:
    """Whether the text of a function stores into a parameter, or calls what changes it."""
    scope = module.scopes.of[function]
    stores = (binding.node for binding in scope.bindings.get(name, ()))
    if any(isinstance(module.parent(each), ast.AugAssign) for each in stores):
        return True
    for read in module.reads(scope, name):
        top, around = read, module.parent(read)
        while isinstance(around, ast.Attribute | ast.Subscript) and around.value is top:
            if not isinstance(around.ctx, ast.Load):
                return True
            top, around = around, module.parent(around)
        is_called = isinstance(around, ast.Call) and around.func is top
        if is_called and isinstance(top, ast.Attribute) and top.attr in _CHANGING:
            return True
        if why_not_copied(module, project, top, depth + 1):
            return True
    return False
