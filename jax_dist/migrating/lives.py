"""Whether the part of one device is still used when the whole has been donated."""

import ast
from collections.abc import Iterable
from typing import Any

from jax_dist.checker.model import flow, functions, pmaps, reaching_definitions, scopes
from jax_dist.checker.model.semantic_model import Module

# What these give is no view of the array.
_COPIES = frozenset(
    ("jax.device_get", "numpy.asarray", "numpy.array", "copy.deepcopy")
    + ("jax.numpy.array", "jax.numpy.copy")
)
_COPYING_BUILTINS = frozenset(("float", "int", "bool", "str", "repr", "print", "len"))

_KEEPING = frozenset(("append", "appendleft", "extend", "insert", "add", "put", "update"))
_DEEPEST = 3


def outlives(module: Module, first: ast.expr, donating: Iterable[ast.Call]) -> bool:
    """Whether a value may be used after one of the calls that donate what it is a part of.

    Args:
      module: the file.
      first: `x[0]`, `unreplicate(x)`.
      donating: the calls that donate `x`, or what it becomes.
    """
    return not _is_used_up(module, first, 0) and any(
        _is_later(module, first, each) for each in donating
    )


def _is_used_up(module: Module, first: ast.expr, depth: int) -> bool:
    """Whether the statement keeps nothing of it but a copy."""
    node: ast.AST = first
    for around in module.ancestors(first):
        match around:
            case ast.Call(func=function) if node is not function:
                name = module.qualified_name(function)
                if name in _COPIES:
                    return True
                is_builtin = isinstance(function, ast.Name) and function.id in _COPYING_BUILTINS
                if is_builtin and name is None:
                    return True
                called = pmaps.definition(module, function)
                if called is not None:
                    return depth < _DEEPEST and _is_used_up_by(module, around, called, node, depth)
            case ast.FormattedValue() | ast.If() | ast.While() | ast.Assert():
                return True
            case ast.Yield() | ast.NamedExpr():
                return False
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in _KEEPING:
                return False
            case ast.Expr():
                return True
            case ast.stmt():
                return False
        node = around
    return False


def _is_used_up_by(module: Module, call: Any, called: Any, argument: Any, depth: int) -> bool:
    """Whether a function of this file keeps nothing of an argument."""
    given = argument.value if isinstance(argument, ast.keyword) else argument
    for parameter in scopes.parameters(called.args):
        if functions.argument_of(module, call, called, parameter) is given:
            reads = module.reads(module.scopes.of[called], parameter.arg)
            return all(_is_used_up(module, read, depth + 1) for read in reads)
    return False


def _is_later(module: Module, first: ast.expr, call: ast.Call) -> bool:
    """Whether the call may run after: further down, in the same loop, or in another function."""
    if module.function(first) is not module.function(call):
        return True
    if module.statement(first) is module.statement(call):
        return _shares_loop(module, first, call)
    is_below = reaching_definitions.place(call) > reaching_definitions.place(first)
    return is_below or _shares_loop(module, first, call) or _comes_back(module, call)


def _comes_back(module: Module, call: ast.Call) -> bool:
    """Whether the next call of the function around may give it what this one has left."""
    around = module.function(call)
    return any(
        any(each is around for each in origin.through)
        for argument in call.args
        for origin in flow.of(module).origins(argument)
    )


def _shares_loop(module: Module, one: ast.AST, other: ast.AST) -> bool:
    loops = [each for each in module.ancestors(one) if isinstance(each, ast.For | ast.While)]
    return any(each is around for around in module.ancestors(other) for each in loops)
