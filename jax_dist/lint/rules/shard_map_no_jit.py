"""JXD305: a `shard_map` that is called outside `jit`."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_DEEPEST = 3  # functions between the call and the level of the module


@Rule(
    "JXD305",
    "shard-map-no-jit",
    what="A `jax.shard_map` whose result is called outside any traced code: at module level, in "
    "`main`, or in a function that is only called from there.",
    why="Each operation of the body is compiled and dispatched by itself: a body with one psum "
    "took 132 ms for each call, and 0.36 ms with jit (jax 0.10.2, 8 simulated devices). The fix "
    "is unsafe: prints and other effects in the body then run once.",
    instead="f = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec))",
    fix="unsafe",
    triggers=(b"*shard_map",),
)
def shard_map_no_jit(module: Module) -> Findings:
    for application in traced.applications(module, *traced.SHARD_MAP):
        is_def = isinstance(application.fun, ast.FunctionDef | ast.AsyncFunctionDef)
        mapped = application.node
        reads = _reads_of_def(module, application) if is_def else pmaps.reads_of(module, mapped)
        for read in reads if is_def else (mapped, *reads):
            call = module.call_of(read)
            if call is not None and _is_eager(module, call):
                name = read.id if isinstance(read, ast.Name) else "its call"
                message = f"shard_map without jit: {name} runs one operation at a time"
                yield Found(application.node, message, _jit_around(module, mapped, is_def=is_def))
                break


def _reads_of_def(module: Module, application: Site) -> Iterator[ast.expr]:
    """Yield the reads of a decorated def that no other decorator changes."""
    function = application.fun
    if any(traced.decorators(module, function)):
        return
    for read in module.reads_of(function, function.name):
        # It can be nothing else there: examples define `f` again and again.
        if [binding.node for binding in module.reaching(read) or ()] == [function]:
            yield read


def _is_eager(module: Module, node: ast.AST, depth: int = 0) -> bool:
    """Return whether it is sure that nothing traces the code at this place."""
    function = module.function(node)
    if function is None:
        return True
    if isinstance(function, ast.Lambda) or function.decorator_list or depth == _DEEPEST:
        return False
    if not isinstance(module.parent(function), ast.Module):
        return False
    if function.name == "main":
        return True
    calls = list(map(module.call_of, module.reads(module.scope(function), function.name)))
    return bool(calls) and all(
        call is not None and _is_eager(module, call, depth + 1) for call in calls
    )


def _jit_around(module: Module, node: ast.expr, *, is_def: bool) -> Fix | None:
    jit, imports = module.name_for("jax.jit", node)
    if is_def:
        indent, _ = module.margins(node)
        line = module.offset(node.lineno, 0)
        edits = (Edit(line, line, f"{indent}{jit}\n"),)
        return Fix("wrap it in jax.jit", Safety.UNSAFE, edits, imports)
    start, end = module.span(node)
    edits = (Edit(start, start, f"{jit}("), Edit(end, end, ")"))
    return Fix("wrap it in jax.jit", Safety.UNSAFE, edits, imports)
