"""Expressions around values: parts of arguments, containers, and reads of lists."""

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
    """Return all that a function may return; None if it is decorated, async or a generator."""
    if isinstance(function, ast.AsyncFunctionDef):
        return None
    if not isinstance(function, ast.Lambda) and function.decorator_list:
        return None
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in functions.own_nodes(function)):
        return None
    return functions.returned(function)
