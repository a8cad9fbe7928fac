"""Expressions around values: calls and their arguments, containers, and reads of lists."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.semantic_model import Module


def called_function(module: Module, call: ast.Call) -> ast.FunctionDef | None:
    """Return the def of this file that a call calls; None if it is elsewhere or unknown."""
    function = pmaps.definition(module, call.func)
    if isinstance(function, ast.FunctionDef) and module.holds(function):
        return function
    return None


def callers(module: Module, function: scopes.Function) -> list[ast.Call] | None:
    """Return every call of a function in this file; None if other code may call it too.

    That is so if it is decorated, has no name of its own, or is passed on as a value.
    """
    if getattr(function, "decorator_list", ()):
        return None
    function_reads = functions.reads(module, function)
    if function_reads is None:
        return None
    calls = [call for call in map(module.call_of, function_reads) if call is not None]
    return calls if len(calls) == len(function_reads) else None


def argument_of(
    module: Module, call: ast.Call, function: scopes.Function, parameter: ast.arg
) -> ast.expr | None:
    """Return what a call passes for `parameter`, or else its default.

    None if it has neither, or if `*args` or `**kwargs` may hold it.
    """
    signature = function.args
    named = [*signature.posonlyargs, *signature.args]
    is_method = isinstance(module.parent(function), ast.ClassDef)
    positional = named[1:] if is_method else named  # `self` is not passed
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
    with_default = named[len(named) - len(signature.defaults) :] + signature.kwonlyargs
    defaults = [*signature.defaults, *signature.kw_defaults]
    return dict(zip(with_default, defaults, strict=True)).get(parameter)


def parameter_of(module: Module, argument: ast.expr, call: ast.Call) -> ast.arg | None:
    """Return the parameter that gets an argument of a call.

    None if the function, or one of its calls, is not in this file.
    """
    function = called_function(module, call)
    if function is None or callers(module, function) is None:
        return None
    for parameter in scopes.parameters(function.args):
        if argument_of(module, call, function, parameter) is argument:
            return parameter
    return None


def returned_to(module: Module, node: ast.expr) -> tuple[list[ast.Call], int | None]:
    """Return the calls that return a node, and its index in a returned tuple (None: no tuple).

    There are none if the node is not returned, or not to this file alone.
    """
    statement, index = module.parent(node), None
    if isinstance(statement, ast.Tuple) and isinstance(module.parent(statement), ast.Return):
        statement, index = module.parent(statement), statement.elts.index(node)
    function = module.function(node)
    if not isinstance(statement, ast.Return) or not isinstance(function, ast.FunctionDef):
        return [], None
    return callers(module, function) or [], index


def list_reads(module: Module, listed: ast.Name) -> list[ast.Call] | None:
    """Return the calls `get_metrics(listed)` of Flax; None if other code reads the list too."""
    scope_and_bindings = module.scope(listed).lookup(listed.id)
    lists = (b for b in module.reaching(listed) or () if not isinstance(b.value, ast.Call))
    bindings = {id(binding.node) for binding in lists}  # not `metrics = get_metrics(metrics)`
    reads: list[ast.Call] = []
    for load in module.reads(scope_and_bindings[0], listed.id) if scope_and_bindings else ():
        if bindings.isdisjoint(id(binding.node) for binding in module.reaching(load) or ()):
            continue  # of another value of that name
        parent: Any = module.parent(load)
        is_argument = isinstance(parent, ast.Call) and parent.args == [load]
        name = module.qualified_name(parent.func) if is_argument else ""
        if name == "flax.training.common_utils.get_metrics":
            reads.append(parent)
            continue
        is_method = isinstance(parent, ast.Attribute) and parent.attr in ("append", "clear")
        if not is_method and not isinstance(parent, ast.If | ast.UnaryOp):
            return None
    return reads or None


def loop_item(module: Module, load: ast.expr) -> ast.Name | None:
    """Return the target `y` of `for name, y in x.items()`, where `load` is `x`; else None."""
    items = module.parent(load)
    if not isinstance(items, ast.Attribute) or items.attr != "items":
        return None
    match getattr(module.parent(module.parent(items)), "target", None):
        case ast.Tuple(elts=[_, ast.Name() as item]):
            return item
    return None


def waits(module: Module, call: ast.Call) -> bool:
    """Return whether a call only waits for a value to be computed."""
    is_waiting = module.qualified_name(call.func) == "jax.block_until_ready"
    return is_waiting or [word.arg for word in call.keywords] == ["wait_for"]


def parts_of(module: Module, node: ast.expr) -> Iterator[ast.expr]:
    """Yield the parts of a tuple, list or dict, nested ones too; of all else the node itself."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Dict(values=parts):
            pass
        case ast.Call(args=[], keywords=words) if words and _makes_dict(module, node):
            parts = [word.value for word in words]
        case _:
            yield node
            return
    for part in parts:
        yield from parts_of(module, part)


def _makes_dict(module: Module, call: ast.Call) -> bool:
    """Return whether a call is `dict(...)`, or Flax's `FrozenDict(...)` or the like."""
    is_dict = module.builtin(call.func) == "dict"
    return is_dict or (module.qualified_name(call.func) or "").startswith("flax.core.")


def container_around(module: Module, node: ast.expr) -> ast.expr | None:
    """Return the tuple, list or dict that has an expression as a part; None if there is none."""
    parent = module.parent(node)
    if isinstance(parent, ast.keyword):
        parent = module.parent(parent)
        return parent if isinstance(parent, ast.Call) and _makes_dict(module, parent) else None
    is_store = isinstance(getattr(parent, "ctx", None), ast.Store)
    return parent if isinstance(parent, ast.Tuple | ast.List | ast.Dict) and not is_store else None


def results_of(function: scopes.Function) -> list[ast.expr] | None:
    """Return all that a function may return; None if it is decorated."""
    return None if getattr(function, "decorator_list", ()) else functions.returned_values(function)
