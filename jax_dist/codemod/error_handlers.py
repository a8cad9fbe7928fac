"""What may end an error that a mapped function raises, so that nobody hears of it.

A `jit(shard_map)` raises where a call has fewer slices than devices, and jax.pmap does not: behind
a handler the call would be passed over.
"""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps, scopes
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod import imports
from jax_dist.codemod.results import ProjectContext

# Of libraries: blocks that end an error, and decorators that call again.
_ENDING = frozenset(("suppress", "ExitStack", "AsyncExitStack", "retry", "on_exception"))


def around(module: Module, context: ProjectContext, site: Site) -> str:
    """Why nobody would hear of a call that does not fit; "" where the error would be seen."""
    kept = module.once(_kept)
    for held in pmaps.held_by(module, site):
        if kept and _is_handed_on(module, held):
            return f"line {kept} takes what it raises of sizes for a result"
        inner: ast.AST = held
        for outer in module.ancestors(held):
            handlers = outer.handlers if isinstance(outer, ast.Try) else []
            if any(map(_catches, handlers)) and inner in getattr(outer, "body", ()):
                return f"line {handlers[0].lineno} would catch what it raises of sizes"
            for given in _run_by(outer, inner):
                if _ends(module, context, given):
                    return f"line {given.lineno} would end what it raises of sizes"
            inner = outer
    return ""


def _kept(module: Module) -> int:
    """A line of the file that takes errors for results; 0 if none."""
    return next((each.lineno for each in module.nodes(ast.Call) if _keeps(each)), 0)


def _keeps(call: ast.Call) -> bool:
    """Whether it takes errors for results, as of futures and tasks."""
    words = {word.arg for word in call.keywords}
    is_asked = scopes.last_name(call.func) == "exception" and not (call.args or words)
    return is_asked or "return_exceptions" in words


def _is_handed_on(module: Module, held: ast.expr) -> bool:
    """Whether others may call a mapped function, or a function that calls it."""
    if module.call_of(held) is None and not isinstance(module.parent(held), ast.Assign):
        return True
    for outer in module.ancestors(held):
        if isinstance(outer, ast.Lambda | ast.AsyncFunctionDef):
            return True
        if isinstance(outer, ast.FunctionDef):
            reads = module.reads(module.scope(outer), outer.name)
            if any(module.call_of(each) is None for each in reads):
                return True
    return False


def _run_by(outer: ast.AST, inner: ast.AST) -> Iterator[ast.expr]:
    """What is entered around a block, decorates a function, or is given it."""
    match outer:
        case ast.With() | ast.AsyncWith():
            yield from (item.context_expr for item in outer.items)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from outer.decorator_list
        case ast.Call() if outer.func is not inner:
            yield outer.func


def _ends(module: Module, context: ProjectContext, given: ast.expr) -> bool:
    """Whether a context manager or a function may end an error, by its name or its own text."""
    called = given.func if isinstance(given, ast.Call) else given
    name = scopes.last_name(called)
    if name in _ENDING:
        return True
    home = imports.definer(module, context.project, called)
    where = (None if home is None else context.module(home)) or module
    bound = where.scopes.module.bindings.get(name, ())
    return any(_handles(each.node) or where.once(_kept) for each in bound)


def _handles(definition: ast.AST) -> bool:
    for node in ast.walk(definition):
        if isinstance(node, ast.ExceptHandler) and _catches(node):
            return True
        if isinstance(node, ast.Call) and _keeps(node):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__exit__":
            returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
            if any(value is not None for value in returned):
                return True
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler ends a ValueError."""
    named = [] if handler.type is None else ast.walk(handler.type)
    names = {scopes.last_name(each) for each in named}
    is_again = any(isinstance(e, ast.Raise) and e.exc is None for e in ast.walk(handler))
    wanted = {"ValueError", "Exception", "BaseException"}
    return not is_again and (handler.type is None or bool(names & wanted))
