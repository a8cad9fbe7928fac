"""What may end an error that a mapped function raises, so that nobody hears of it.

A `jit(shard_map)` raises where a call has fewer slices than devices, and jax.pmap does not: behind
a handler the call would be passed over. So it would be in a thread or a task that nobody asks.
"""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import callers, imports
from jax_dist.migrate.results import ProjectContext

# Of libraries: blocks that end an error, and decorators that call again.
_ENDING = frozenset(("suppress", "ExitStack", "AsyncExitStack", "retry", "on_exception", "subTest"))
# Methods that others call, and whose errors they pass over: loggers, the collection of garbage.
_UNHEARD = frozenset(("__str__", "__repr__", "__format__", "__del__"))
# What runs a function where its error ends nothing else.
_APART = frozenset(
    ("Thread", "Timer", "Process", "start_new_thread", "finalize", "add_done_callback")
    + ("call_soon", "call_soon_threadsafe", "call_later", "call_at")
)
# What keeps an error for those who ask, and how they do.
_LATER = {
    "submit": "result",
    "apply_async": "get",
    "map_async": "get",
    "starmap_async": "get",
    "run_in_executor": "await",
    "run_coroutine_threadsafe": "result",
    "create_task": "await",
    "ensure_future": "await",
    "map": "",  # of an executor: whoever takes the results
    "imap": "",
    "imap_unordered": "",
}
_JOINING = frozenset(("gather", "wait_for", "shield", "as_completed", "run_in_executor"))


def around(module: Module, context: ProjectContext, site: Site) -> str:
    """Why nobody would hear of a call that does not fit; "" where the error would be seen."""
    kept = module.once(_kept)
    for held in pmaps.held_by(module, site):
        if kept and _is_handed_on(module, held):
            return f"line {kept} takes what it raises of sizes for a result"
        if found := callers.first(module, context, held, _ended):
            line, how = found
            return f"{line} would {how} what it raises of sizes"
    return ""


def _ended(module: Module, context: ProjectContext, run: ast.expr) -> tuple[int, str] | None:
    """The line that ends what is raised where a function is run or handed on, and how."""
    for outer, inner, is_later in callers.around(module, run):
        handlers = outer.handlers if isinstance(outer, ast.Try | ast.TryStar) else []
        if any(map(_catches, handlers)) and inner in getattr(outer, "body", ()):
            return handlers[0].lineno, "catch"
        final = outer.finalbody if isinstance(outer, ast.Try | ast.TryStar) else []
        if inner not in final and (leaving := _leaving(final)):
            return leaving.lineno, "end"
        for given in _run_by(outer, inner):
            if _ends(module, context, given):
                return given.lineno, "end"
        match outer:
            case ast.Call() if outer.func is not inner and (
                _loses(module, outer, is_later=is_later)
                or (is_later and _hands_to_what_loses(module, context, outer, inner))
            ):
                return outer.lineno, "end"
            case ast.FunctionDef() if _is_unheard(module, outer):
                return outer.lineno, "end"
    return None


def _leaving(statements: list[ast.stmt]) -> ast.stmt | None:
    """A statement by which a `finally` is left, and an error with it."""
    waiting: list[tuple[ast.AST, bool]] = [(each, False) for each in statements]
    while waiting:
        node, is_looped = waiting.pop(0)
        if isinstance(node, ast.Return):
            return node
        if isinstance(node, ast.Break | ast.Continue) and not is_looped:
            return node
        if isinstance(node, scopes.Function | ast.ClassDef):
            continue
        below = is_looped or isinstance(node, ast.For | ast.AsyncFor | ast.While)
        waiting += [(each, below) for each in ast.iter_child_nodes(node)]
    return None


def _is_unheard(module: Module, function: ast.FunctionDef) -> bool:
    """Whether others call a method, and pass over what it raises."""
    owner = module.parent(function)
    if not isinstance(owner, ast.ClassDef):
        return False
    return function.name in _UNHEARD or (function.name == "run" and _is_thread(owner))


def _is_thread(owner: ast.ClassDef) -> bool:
    return any(scopes.last_name(base) in _APART for base in owner.bases)


def _loses(module: Module, call: ast.Call, *, is_later: bool) -> bool:
    """Whether a call runs what it is given where nobody hears of its error.

    Args:
      module: the file.
      call: which is given a function or a coroutine.
      is_later: whether it is a function.
    """
    name = scopes.last_name(call.func)
    if name in _APART or module.qualified_name(call.func) == "atexit.register":
        return is_later
    how = _LATER.get(name)
    if how is None or not (is_later or how == "await"):
        return False
    if not isinstance(module.parent(call), ast.Expr):
        return bool(how) and how not in module.once(_asked)
    if name == "map":  # that of a pool waits, and raises
        return b"Executor" in module.source.code
    return name != "create_task" or b"TaskGroup" not in module.source.code  # which raises


def _asked(module: Module) -> frozenset[str]:
    """How a file asks futures and tasks for their results."""
    calls = {scopes.last_name(each.func) for each in module.nodes(ast.Call)}
    found = calls & {"result", "get"}
    for node in module.nodes(ast.Await):
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if called is None or scopes.last_name(called) in _JOINING:
            found.add("await")
    return frozenset(found | ({"await"} if "result" in found else set()))


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
    if scopes.last_name(called) in _ENDING:
        return True
    where, found = _defined(module, context, called)
    return any(_handles(each) or where.once(_kept) for each in found)


def _defined(
    module: Module, context: ProjectContext, called: ast.expr
) -> tuple[Module, list[ast.AST]]:
    """What the project binds to the name of what is called, and the file that does."""
    home = imports.definer(module, context.project, called)
    where = (None if home is None else context.module(home)) or module
    bound = where.scopes.module.bindings.get(scopes.last_name(called), ())
    return where, [each.node for each in bound]


def _handles(definition: ast.AST) -> bool:
    for node in ast.walk(definition):
        if isinstance(node, ast.ExceptHandler) and _catches(node):
            return True
        if isinstance(node, ast.Try | ast.TryStar) and _leaving(node.finalbody):
            return True
        if isinstance(node, ast.Call) and _keeps(node):
            return True
        if isinstance(node, ast.FunctionDef) and node.name == "__exit__":
            returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return))
            if any(value is not None for value in returned):
                return True
    return False


def _hands_to_what_loses(
    module: Module, context: ProjectContext, call: ast.Call, given: ast.AST
) -> bool:
    """Whether what is called runs a function that it is given where nobody hears of its error."""
    where, found = _defined(module, context, call.func)
    for definition in found:
        if isinstance(definition, ast.ClassDef) and _is_thread(definition):
            return True
        names = callers.carriers(definition, callers.parameter(definition, call, given))
        for node in ast.walk(definition) if names else ():
            if isinstance(node, ast.Call) and where.holds(node):
                values = (*node.args, *(word.value for word in node.keywords))
                if any(callers.says(each, names) for each in values) and _loses(
                    where, node, is_later=True
                ):
                    return True
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a handler ends a ValueError."""
    named = [] if handler.type is None else ast.walk(handler.type)
    names = {scopes.last_name(each) for each in named}
    is_again = any(isinstance(e, ast.Raise) and e.exc is None for e in ast.walk(handler))
    is_again = is_again or _exits(handler.body[-1])
    wanted = {"ValueError", "Exception", "BaseException"}
    return not is_again and (handler.type is None or bool(names & wanted))


def _exits(statement: ast.stmt) -> bool:
    """Whether it ends the program with a code that says that it failed."""
    match statement:
        case ast.Expr(ast.Call() as call) | ast.Raise(ast.Call() as call):
            name = scopes.last_name(call.func)
        case _:
            return False
    code = call.args[0] if call.args else None
    is_failure = code is not None and getattr(code, "value", 1) not in (0, None, False)
    return name in ("exit", "_exit", "SystemExit") and is_failure
