"""JXD305: a shard_map that is called outside of any jit."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps, traced
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.traced import Application
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD305",
    name="shard-map-no-jit",
    what="Finds a `jax.shard_map` whose result is called outside any traced code: at module level, "
    "in `main`, or in a function that is only called from there.",
    why="Outside `jit`, each operation of the body is compiled and dispatched separately. A body "
    "with one psum took 132 ms for each call, and 0.36 ms with jit (jax 0.10.2, 8 simulated "
    "devices).",
    example="import jax\n\nf = jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec)\n"
    "y = f(x)\n",
    instead="import jax\n\n"
    "f = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec))\ny = f(x)\n",
    fix="Unsafe: jit around it gives the same values up to the order of operations, but traces "
    "the body once, so prints and other effects in it run once.",
    since="Any jax with shard_map.",
    source="https://docs.jax.dev/en/latest/notebooks/shard_map.html",
)

_DEEPEST = 3  # functions between the call and the level of the module


@rule(PAGE, triggers=(b"*shard_map*",))
def check(module: Module) -> Iterator[Found]:
    for application in traced.applications(module, "shard_map"):
        node = _mapped(module, application)
        calls = (call for call in _calls(module, application, node) if _eager(module, call))
        first = next(calls, None)
        if first is not None:
            name = module.text(first.func) if isinstance(first.func, ast.Name) else "its call"
            message = f"shard_map without jit: {name} runs one operation at a time"
            yield Found(application.node, message, _fix(module, application, node))


def _mapped(module: Module, application: Application) -> ast.expr | None:
    """The expression that is the mapped function; None for a decorated def."""
    if isinstance(application.fun, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    around = module.parent(application.node)
    if isinstance(around, ast.Call) and around.args[:1] == [application.fun]:
        return around  # partial(shard_map, ...)(f)
    return application.node


def _calls(module: Module, application: Application, node: ast.expr | None) -> Iterator[ast.Call]:
    if node is None:
        function = application.fun
        if any(traced.decorators(module, function)):
            return
        reads = module.reads(module.scope(function), function.name)
        held: list[ast.expr] = [read for read in reads if _is_only(module, read, function)]
    else:
        held = [node, *pmaps.reads_of(module, node)]
    for each in held:
        call = module.parent(each)
        if isinstance(call, ast.Call) and call.func is each:
            yield call


def _is_only(module: Module, read: ast.Name, function: ast.AST) -> bool:
    """Whether the name can be nothing else there: examples define `f` again and again."""
    return [binding.node for binding in module.reaching(read) or ()] == [function]


def _eager(module: Module, node: ast.AST, depth: int = 0) -> bool:
    """Whether it is sure that nothing traces the code at this place."""
    function = module.function(node)
    if function is None:
        return True
    if isinstance(function, ast.Lambda) or function.decorator_list or depth == _DEEPEST:
        return False
    if not isinstance(module.parent(function), ast.Module):
        return False
    if function.name == "main":
        return True
    scope = module.scope(function)
    reads = module.reads(scope, function.name)
    return bool(reads) and all(_called_eagerly(module, read, depth) for read in reads)


def _called_eagerly(module: Module, read: ast.expr, depth: int) -> bool:
    call = module.parent(read)
    is_called = isinstance(call, ast.Call) and call.func is read
    return is_called and _eager(module, call, depth + 1)


def _fix(module: Module, application: Application, node: ast.expr | None) -> Fix | None:
    jit, imports = module.name_for("jax.jit", application.node)
    if node is not None:
        start, end = module.span(node)
        edits = (Edit(start, start, f"{jit}("), Edit(end, end, ")"))
        return Fix("wrap it in jax.jit", Safety.UNSAFE, edits, imports)
    start, _ = module.span(application.node)
    code = module.source.code
    line = code.rfind(b"\n", 0, start) + 1
    indent = code[line:start].decode()
    if indent.strip() != "@":
        return None
    edit = Edit(line, line, f"{indent}{jit}\n")
    return Fix("wrap it in jax.jit", Safety.UNSAFE, (edit,), imports)
