"""JXD107: `lax.pvary` in place of `lax.pcast`."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _renames


@Rule(
    "JXD107",
    "pvary-to-pcast",
    what="`jax.lax.pvary`, under any alias, and its imports.",
    why="It was removed in jax 0.10.0: an AttributeError.",
    instead="x = jax.lax.pcast(x, 'i', to='varying')",
    fix="safe",
    triggers=(b"pvary",),
    needs=(0, 8, 2),
)
def pvary_to_pcast(module: Module) -> Findings:
    message = "jax.lax.pvary was removed in jax 0.10.0: use jax.lax.pcast(x, axis, to='varying')"
    for alias, reads in _renames.imports_of(module, "jax.lax.pvary"):
        yield Found(alias, message, _import_of_pcast(module, alias, reads))
    for use in _renames.spelled(module, "jax.lax.pvary"):
        call, end = _varying(module, use), module.span(use)[1]
        edits = (Edit(end - len("pvary"), end, "pcast"), call) if call else ()
        yield Found(use, message, Fix("use jax.lax.pcast", Safety.SAFE, edits) if edits else None)


def _import_of_pcast(module: Module, alias: ast.AST, reads: list[ast.Name]) -> Fix | None:
    """Return the import, and all calls: the new function wants one more argument."""
    calls = [call for read in reads if (call := _varying(module, read)) is not None]
    if not isinstance(alias, ast.alias) or len(calls) < len(reads):
        return None
    edit = Edit(*module.span(alias), f"pcast as {alias.asname or 'pvary'}")
    return Fix("import jax.lax.pcast", Safety.SAFE, (edit, *calls))


def _varying(module: Module, function: ast.expr) -> Edit | None:
    """Add `to='varying'` behind the last argument of a call of `function`."""
    match module.call_of(function):
        case (
            ast.Call(args=[_, ast.expr() as last], keywords=[])
            | ast.Call(args=[_], keywords=[ast.keyword(arg="axis_name") as last])
        ) if not isinstance(last, ast.Starred | ast.GeneratorExp):
            quote = "'" if b"'" in module.source.code else '"'
            end = module.span(last)[1]
            return Edit(end, end, f", to={quote}varying{quote}")
    return None
