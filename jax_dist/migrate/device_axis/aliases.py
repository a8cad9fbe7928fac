"""What may share its memory or its containers with a value, so that a copy is needed.

A value without the device axis is often the state itself, where pmap's `x[0]` was a copy: a later
call may take its memory, and the text may change its containers in place.
"""

import ast
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.device_axis.flow_uses import KEEPING, Use
from jax_dist.migrate.recorded_flow import FileFlow

_ON_HOST = frozenset(("jax.device_get", "numpy.asarray", "numpy.array"))
# What these give is no view of the array.
_COPIES = _ON_HOST | {"copy.deepcopy", "jax.numpy.array", "jax.numpy.copy"}
# No view of an argument: `reshape` and its like may give one.
_MAKING = frozenset(
    ("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like")
    + ("arange", "linspace", "eye", "identity", "array", "copy", "stack", "concatenate")
)
_CHANGING = KEEPING | frozenset(("clear", "pop", "popitem", "remove", "setdefault", "sort"))
_COPYING_BUILTINS = frozenset(("float", "int", "bool", "str", "repr", "print", "len"))
_DEEPEST = 3


def is_used_up(module: Module, first: ast.expr, depth: int = 0) -> bool:
    """Whether the statement keeps nothing of `x[0]` or `unreplicate(x)` but a copy."""
    node: ast.AST = first
    for around in module.ancestors(first):
        match around:
            case ast.Call(func=function) if node is not function:
                is_builtin = module.builtin(function) in _COPYING_BUILTINS
                if is_builtin or module.qualified_name(function) in _COPIES:
                    return True
                called = pmaps.definition(module, function)
                if called is not None:
                    return depth < _DEEPEST and _is_used_up_by(module, around, called, node, depth)
            case ast.FormattedValue() | ast.If() | ast.While() | ast.Assert():
                return True
            case ast.Yield() | ast.NamedExpr():
                return False
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in KEEPING:
                return False
            case ast.Expr():
                return True
            case ast.stmt():
                return False
        node = around
    return False


def is_read(module: Module, first: ast.expr) -> bool:
    """Whether `x[0]` or a part of it is given to what reads it on the host."""
    node, around = first, module.parent(first)
    while isinstance(around, ast.Attribute | ast.Subscript) and around.value is node:
        if isinstance(around, ast.Attribute) and around.attr in ("item", "tolist"):
            return module.call_of(around) is not None
        if isinstance(around, ast.Subscript) and not isinstance(around.slice, ast.Constant):
            return False  # an array as index may lie on all devices
        node, around = around, module.parent(around)
    if not isinstance(around, ast.Call) or node not in around.args:
        return isinstance(around, ast.FormattedValue)
    is_builtin = module.builtin(around.func) in _COPYING_BUILTINS
    return is_builtin or module.qualified_name(around.func) in _ON_HOST


def _is_used_up_by(module: Module, call: Any, called: Any, argument: Any, depth: int) -> bool:
    """Whether a function of this file keeps nothing of an argument."""
    given = argument.value if isinstance(argument, ast.keyword) else argument
    for parameter in scopes.parameters(called.args):
        if functions.argument_of(module, call, called, parameter) is given:
            reads = module.reads(module.scopes.of[called], parameter.arg)
            return all(is_used_up(module, read, depth + 1) for read in reads)
    return False


def may_be_changed(flow: FileFlow, use: Use) -> bool:
    """Whether containers that were new may be changed later: then they must not be the state's."""
    module = flow.module
    if flow.is_array(use.of) or not isinstance(use.node, ast.Call) or is_used_up(module, use.node):
        return False
    root = use.of
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if isinstance(root, ast.Call):
        return False  # nothing else has it
    match module.statement(use.node):
        case ast.Return() if isinstance(root, ast.Name):
            found = module.scope(root).lookup(root.id)  # a name of the function ends with it
            return found is None or found[0] is module.scopes.module
        case ast.Assign(targets=[ast.Name(id=name) as target], value=value) if value is use.node:
            if isinstance(use.of, ast.Name) and use.of.id == name:
                return False
            holders = flow.holders(flow.serials(use.of))
            reads = module.reads(module.scope(target), name)
            only_read = (_is_only_read(module, each) for each in reads)
            return any(_is_changed(module, each) for each in holders) or not all(only_read)
    return True


def is_new(module: Module, value: ast.expr) -> bool:
    """Whether an expression makes all arrays that it holds: nothing else has their memory."""
    match value:
        case ast.Dict(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(is_new(module, each) for each in parts)
        case ast.Call(func=function):
            root, _, last = (module.qualified_name(function) or "").rpartition(".")
            is_making = root in ("jax.numpy", "numpy") and last in _MAKING
            return is_making or root in ("jax.random", "numpy.random")
    return False


def _is_changed(module: Module, held: ast.AST) -> bool:
    """Whether the text changes a container in place: `x["w"] = w`, `x.append(w)`."""
    match module.parent(held):
        case ast.Attribute(attr=name, value=value) as around if value is held:
            is_called = module.call_of(around) is not None and name in _CHANGING
            return is_called or not isinstance(around.ctx, ast.Load)
        case ast.Subscript(value=value, ctx=context) if value is held:
            return not isinstance(context, ast.Load)
    return False


def _is_only_read(module: Module, read: ast.expr) -> bool:
    """Whether an expression with the name goes to jax alone, which makes new containers."""
    node, around = read, module.parent(read)
    while isinstance(around, ast.Attribute | ast.Subscript) and around.value is node:
        if not isinstance(around.ctx, ast.Load):
            return False
        node, around = around, module.parent(around)
    if isinstance(around, ast.keyword):
        around = module.parent(around)
    if not isinstance(around, ast.Call) or around.func is node:
        return False
    called = pmaps.definition(module, around.func)
    marks = [] if called is None else [*getattr(called, "decorator_list", [])]
    marks += [
        part for each in marks if isinstance(each, ast.Call) for part in (each.func, *each.args)
    ]
    names = {module.qualified_name(each) for each in marks}
    name = module.qualified_name(around.func) or ""
    return name.startswith("jax.") or "jax.jit" in names
