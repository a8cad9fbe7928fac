"""Flow of values in a file: calls and their arguments, containers, and reads of lists."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.semantic_model import Module

_GET_METRICS = "flax.training.common_utils.get_metrics"


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, by position and by name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def called_function(module: Module, node: ast.AST) -> ast.FunctionDef | None:
    """Return the def `f` of this file for a call `f(x)`; None if it is elsewhere or unknown."""
    function = pmaps.definition(module, node.func) if isinstance(node, ast.Call) else None
    return function if isinstance(function, ast.FunctionDef) and module.holds(function) else None


def find_all_calls(module: Module, function: Any) -> list[ast.Call] | None:
    """Return every call of a def in this file; None if other code may call it too."""
    # That is so if it is decorated, has no name of its own, or is passed on as a value.
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    reads = functions.reads(module, function)
    calls = [call for call in map(module.call_of, reads or ()) if call is not None]
    return calls if reads is not None and len(calls) == len(reads) else None


def results_of(function: scopes.Function) -> list[ast.expr]:
    """Return the expressions that a function may return; [] if a decorator may change them."""
    is_decorated = getattr(function, "decorator_list", ())  # a lambda has none
    return [] if is_decorated else functions.returned_values(function)


def argument_of(
    module: Module, call: ast.Call, function: scopes.Function, parameter: ast.arg
) -> ast.expr | None:
    """Return what a call passes for a parameter, or its default; None if that is not known."""
    signature = function.args
    positional = [*signature.posonlyargs, *signature.args]
    with_default = positional[len(positional) - len(signature.defaults) :] + signature.kwonlyargs
    if isinstance(module.parent(function), ast.ClassDef):
        positional = positional[1:]  # a method's `self` is not passed
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
    defaults = [*signature.defaults, *signature.kw_defaults]
    return dict(zip(with_default, defaults, strict=True)).get(parameter)


def parameter_of(module: Module, argument: ast.expr, call: Any) -> ast.arg | None:
    """Return the `p` of `def f(p)` for the `x` of `f(x)`; None if other files may call `f`."""
    function = called_function(module, call)
    if function is None or find_all_calls(module, function) is None:
        return None
    parameters = scopes.parameters(function.args)
    passed = (p for p in parameters if argument_of(module, call, function, p) is argument)
    return next(passed, None)


def find_calls_returning(module: Module, node: ast.expr) -> tuple[list[ast.Call], int | None]:
    """Return the calls that return the value of an expression, and its index in their tuple."""
    # For `x` of `return n, x` in `def f`, these are all calls `f()` and 1; for `return x` the index
    # is None. `([], None)` if `x` is not returned, or if other files may call `f`.
    statement, index = module.parent(node), None
    if isinstance(statement, ast.Tuple) and isinstance(module.parent(statement), ast.Return):
        index, statement = statement.elts.index(node), module.parent(statement)
    is_returned = isinstance(statement, ast.Return)
    calls = find_all_calls(module, module.function(node)) if is_returned else None
    return (calls, index) if calls else ([], None)


def get_metrics_calls(module: Module, item: ast.expr) -> list[ast.Call]:
    """Return the calls of Flax's `get_metrics(xs)` for the item `x` of `xs.append(x)`."""
    # [] if anything else reads `xs` but `xs.append(x)`, `xs.clear()`, `if xs:` and `not xs`.
    match module.parent(item):
        case ast.Call(func=ast.Attribute(value=ast.Name() as metrics, attr="append")):
            lookup = module.scope(metrics).lookup(metrics.id)
        case _:
            return []
    # `xs = []` binds the name to the list, and `xs = get_metrics(xs)` to another value.
    bindings = (b for b in module.reaching(metrics) or () if not isinstance(b.value, ast.Call))
    list_bindings = {binding.node for binding in bindings}
    calls: list[ast.Call] = []
    for read in module.reads(lookup[0], metrics.id) if lookup else ():
        bindings_read = {binding.node for binding in module.reaching(read) or ()}
        if not bindings_read & list_bindings:  # it reads the other value
            continue
        match module.parent(read):
            case ast.Call(func=func, args=[argument]) as call if (
                argument is read and module.qualified_name(func) == _GET_METRICS
            ):
                calls.append(call)
            case ast.Attribute(attr="append" | "clear") | ast.If() | ast.UnaryOp():
                pass
            case _:
                return []
    return calls


def loop_item(module: Module, read: ast.expr) -> ast.Name | None:
    """Return the target `y` of `for name, y in x.items()`, where `read` is `x`; else None."""
    items = module.parent(read)
    loop = module.parent(module.parent(items)) if scopes.last_name(items) == "items" else None
    match getattr(loop, "target", None):
        case ast.Tuple(elts=[_, ast.Name() as item]):
            return item
    return None


def only_waits(module: Module, call: ast.Call) -> bool:
    """Return whether a call waits for arrays: `block_until_ready(x)`, `timer(wait_for=x)`."""
    is_of_jax = module.qualified_name(call.func) == "jax.block_until_ready"
    return is_of_jax or [keyword.arg for keyword in call.keywords] == ["wait_for"]


def elements_of(module: Module, node: ast.expr) -> Iterator[ast.expr]:
    """Yield the elements of a tuple, list or dict as written, nested ones too; else the node."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Dict(values=elements):
            pass
        case ast.Call(args=[], keywords=keywords) if keywords and _makes_dict(module, node):
            elements = [keyword.value for keyword in keywords]
        case _:
            yield node
            return
    for element in elements:
        yield from elements_of(module, element)


def _makes_dict(module: Module, call: ast.Call) -> bool:
    """Return whether a call is `dict(...)`, or Flax's `FrozenDict(...)` or the like."""
    is_dict = module.builtin(call.func) == "dict"
    return is_dict or (module.qualified_name(call.func) or "").startswith("flax.core.")


def _container_of(module: Module, node: ast.expr) -> ast.expr | None:
    """Return the tuple, list or dict of which an expression is an element; None without one."""
    match module.parent(node):
        case ast.keyword() as keyword:
            call = module.parent(keyword)
            return call if isinstance(call, ast.Call) and _makes_dict(module, call) else None
        case ast.Tuple(ctx=ast.Load()) | ast.List(ctx=ast.Load()) | ast.Dict() as container:
            return container
    return None


def receiving_call(module: Module, node: ast.expr) -> tuple[ast.Call | None, ast.expr]:
    """Return the call that gets `x`, or None, and its argument: the dict, for `f({"w": x})`."""
    argument: Any = node
    while (container := _container_of(module, argument)) is not None:
        argument = container
    call = module.parent(argument)
    if isinstance(call, ast.keyword):
        call = module.parent(call)
    if isinstance(call, ast.Call) and call.func is not argument:
        return call, argument
    return None, argument
