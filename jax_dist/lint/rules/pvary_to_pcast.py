"""JXD107: `lax.pvary` in place of `lax.pcast`."""

import ast

from jax_dist.lint.rules import Edit, Findings, Module, Rule, _renames
from jax_dist.lint.rules._old_names import PVARY
from jax_dist.lint.rules._renames import Rename


@Rule(
    "JXD107",
    "pvary-to-pcast",
    what="`jax.lax.pvary`, under any alias, and its imports.",
    why="It was removed in jax 0.10.0: an AttributeError.",
    instead="x = jax.lax.pcast(x, 'i', to='varying')",
    fix="safe",
    triggers=(b"*pvary",),
)
def pvary_to_pcast(module: Module) -> Findings:
    yield from _renames.renamed(module, PVARY, _with_to)


def _with_to(module: Module, entry: Rename, function: ast.expr) -> list[Edit] | None:
    """Add `to='varying'` behind the last argument of a call."""
    del entry
    match module.call_of(function):
        case (
            ast.Call(args=[_, ast.expr() as last], keywords=[])
            | ast.Call(args=[_], keywords=[ast.keyword(arg="axis_name") as last])
        ) if not isinstance(last, ast.Starred | ast.GeneratorExp):
            quote = "'" if b"'" in module.source.code else '"'
            end = module.span(last)[1]
            return [Edit(end, end, f", to={quote}varying{quote}")]
    return None
