"""JXD305: a `shard_map` that is called outside `jit`."""

import ast

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_DEEPEST = 3  # functions between the call and the level of the module


@Rule(
    "JXD305",
    what="A `jax.shard_map` whose result is called outside any traced code: at module level, in "
    "`main`, or in a function that is only called from there.",
    why="Each operation of the body is compiled and dispatched by itself: a body with one psum "
    "took 132 ms for each call, and 0.36 ms with jit (jax 0.10.2, 8 simulated devices). The fix "
    "is unsafe: prints and other effects in the body then run once.",
    instead="f = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=spec, out_specs=spec))",
    triggers=(b"shard_map",),
)
def shard_map_no_jit(module: Module) -> Findings:
    for site in pmaps.applications(module, traced.SHARD_MAP):
        is_def = isinstance(site.fun, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_def and any(traced.decorators(module, site.fun)):
            continue
        for mapped in pmaps.find_results(module, site):  # `shard_map(f)`, and the names for it
            call = module.call_of(mapped)
            if call is not None and _is_eager(module, call):
                name = mapped.id if isinstance(mapped, ast.Name) else "its call"
                message = f"shard_map without jit: {name} runs one operation at a time"
                yield Found(site.node, message, _jit_around(module, site.node, is_def=is_def))
                break


def _is_eager(module: Module, node: ast.AST, depth: int = 0) -> bool:
    """Return whether a node is on the module's level, in `main`, or in a function called there."""
    function = module.function(node)
    if function is None:
        return True
    if isinstance(function, ast.Lambda) or function.decorator_list or depth == _DEEPEST:
        return False  # it may be traced
    if not isinstance(module.parent(function), ast.Module):
        return False
    if function.name == "main":
        return True
    reads = module.reads(module.scope(function), function.name)
    calls = [module.call_of(read) for read in reads]  # None where it is passed on, as in jit(f)
    return bool(calls) and all(call and _is_eager(module, call, depth + 1) for call in calls)


def _jit_around(module: Module, node: ast.expr, *, is_def: bool) -> Fix:
    """Return the fix that jits `shard_map(f)`, or the def that the decorator `node` maps."""
    jit, imports = module.name_for("jax.jit", node)
    if is_def:
        indent, _ = module.margins(node)
        start = module.offset(node.lineno, 0)
        edits = (Edit(start, start, f"{indent}{jit}\n"),)
    else:
        start, end = module.span(node)
        edits = (Edit(start, start, f"{jit}("), Edit(end, end, ")"))
    return Fix("wrap it in jax.jit", Safety.UNSAFE, edits, imports)
