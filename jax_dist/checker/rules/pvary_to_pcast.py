"""JXD107: `jax.lax.pvary`."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _renames, rule

PAGE = Page(
    code="JXD107",
    name="pvary-to-pcast",
    what="Finds `jax.lax.pvary`, under any alias, and its imports.",
    why="It was removed: jax 0.10.2 raises an AttributeError.",
    example="import jax\n\nx = jax.lax.pvary(x, 'i')\n",
    instead="import jax\n\nx = jax.lax.pcast(x, 'i', to='varying')\n",
    fix="Safe for calls, and for an import if all of its uses are calls: the same operation under "
    "its new name. None if the function is passed on.",
    since="jax 0.8.2: deprecated in favour of `pcast`; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)

_OLD = "jax.lax.pvary"
_MESSAGE = "jax.lax.pvary was removed in jax 0.10.0: use jax.lax.pcast(x, axis, to='varying')"


@rule(PAGE, triggers=(b"*pvary*",), needs=(0, 8, 2))
def check(module: Module) -> Iterator[Found]:
    for alias, reads in _renames.imports_of(module, _OLD):
        yield Found(alias, _MESSAGE, _import_fix(module, alias, reads))
    for use in _renames.spelled(module, _OLD):
        yield Found(use, _MESSAGE, _fix(module, use))


def _fix(module: Module, use: ast.expr) -> Fix | None:
    call = _call_edit(module, use)
    if call is None:
        return None
    end = module.span(use)[1]
    edits = (Edit(end - len("pvary"), end, "pcast"), call)
    return Fix("use jax.lax.pcast", Safety.SAFE, edits)


def _import_fix(module: Module, alias: ast.AST, reads: list[ast.Name]) -> Fix | None:
    """The import, and all calls: the new function wants one more argument."""
    calls = [_call_edit(module, read) for read in reads]
    if not isinstance(alias, ast.alias) or None in calls:
        return None
    new = "pcast as pvary" if alias.asname is None else f"pcast as {alias.asname}"
    edits = [Edit(*module.span(alias), new)]
    edits += [call for call in calls if call is not None]
    return Fix("import jax.lax.pcast", Safety.SAFE, tuple(edits))


def _call_edit(module: Module, function: ast.expr) -> Edit | None:
    """Adds `to='varying'` behind the last argument of a call of `function`."""
    match module.parent(function):
        case ast.Call(func=called, args=[_, ast.expr() as axis], keywords=[]) if called is function:
            last = axis
        case ast.Call(func=called, args=[_], keywords=[ast.keyword(arg="axis_name") as axis]) if (
            called is function
        ):
            last = axis
        case _:
            return None
    if isinstance(last, ast.Starred | ast.GeneratorExp):
        return None
    quote = "'" if b"'" in module.source.code else '"'
    end = module.span(last)[1]
    return Edit(end, end, f", to={quote}varying{quote}")
