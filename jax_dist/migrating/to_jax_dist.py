"""`jax.pmap` as `jax_dist.pmap`: the name changes, and a bare `jax.jit` around it goes.

Inside a jit, pmap could neither place its arguments nor lift what the function captures.
"""

import ast
from collections.abc import Iterator

from jax_dist.checker import bare_jits, pmaps
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.pmaps import Site
from jax_dist.migrating.outcomes import Left

_NEW = "jax_dist.pmap"


def fix(module: Module, site: Site) -> Fix | None:
    """The fix of one reference to `jax.pmap`; None where another place's fix does it.

    Args:
      module: the file.
      site: one of `pmaps.sites(module)`.

    Raises:
      Left: the name cannot be changed there.
    """
    if is_identity(module, site):
        raise Left(
            "pmap is compared, or asked about itself, so another function would answer differently",
            "Decide by hand which of the two functions is meant.",
        )
    imported = _import_of(module, site.reference)
    if imported is None:
        return None
    unjitted = bare_jits.without(module, site)
    if not isinstance(imported, ast.alias) or _stays(module, imported):
        text, imports = module.name_for(_NEW, site.reference)
        edits = (Edit(*module.span(site.reference), text), *unjitted)
        return Fix("use jax_dist.pmap", Safety.SAFE, tuple(sorted(edits)), imports)
    # `from jax import pmap`: the name stays, and comes from elsewhere.
    edits = (*_import_edits(module, imported), *unjitted)
    return Fix("import pmap from jax_dist", Safety.SAFE, edits)


def said(module: Module, site: Site) -> str:
    """What is told of a place beyond that it is migrated."""
    if not bare_jits.without(module, site):
        return ""
    donates = any(name.startswith("donate") for name in site.arguments)
    return "the jit around it goes" + ("; what it donates is donated now" if donates else "")


def is_identity(module: Module, site: Site) -> bool:
    """Whether what matters is which function this is, and not what it does."""
    if site.form != "value":
        return _is_asked_for_its_type(module, site)
    inner: ast.AST = site.node
    for around in module.ancestors(site.node):
        match around:
            case ast.Compare():
                return True
            case ast.Call(func=ast.Name(id="isinstance" | "type" | "hasattr" | "getattr" | "id")):
                return True
            case ast.Call(func=function) if module.qualified_name(function) in _ABOUT:
                return True
            case ast.Attribute(attr=name) if around.value is inner and name.startswith("__"):
                return True
            case ast.stmt():
                return False
        inner = around
    return False


def _is_asked_for_its_type(module: Module, site: Site) -> bool:
    """`type(jax.pmap(f))`: what `jax_dist.pmap` gives has a type of its own."""
    call = module.parent(site.node)
    return (
        site.form == "call"
        and isinstance(call, ast.Call)
        and (module.text(call.func) == "type" and call.args == [site.node])
    )


_ABOUT = {"functools.wraps", "functools.update_wrapper", "inspect.signature", "inspect.getdoc"}


def _import_of(module: Module, reference: ast.expr) -> ast.alias | ast.expr | None:
    """The alias of `from jax import pmap`; the root name of `jax.pmap`; None for an alias."""
    root = reference
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        return None
    found = module.scope(root).lookup(root.id)
    if found is None or any(binding.kind != "import" for binding in found[1]):
        return None
    target = module.absolute(found[1][0].target)
    if target.partition(".")[0] != "jax":
        return None
    if root is reference:
        node = found[1][0].node
        return node if len(found[1]) == 1 and isinstance(node, ast.alias) else None
    return root


def _stays(module: Module, alias: ast.alias) -> bool:
    """Whether some use of the imported name must keep its meaning."""
    return any(
        is_identity(module, site)
        for site in pmaps.sites(module)
        if _import_of(module, site.reference) is alias
    )


def _import_edits(module: Module, alias: ast.alias) -> tuple[Edit, ...]:
    """`from jax import a, pmap as p` becomes `from jax import a` and `from jax_dist import ...`."""
    statement = module.statement(alias)
    assert isinstance(statement, ast.ImportFrom)
    start, end = module.span(statement)
    line = module.source.line_text(start)
    indent = line[: len(line) - len(line.lstrip())]
    new = f"from jax_dist import {module.text(alias)}"
    if len(statement.names) == 1:
        return (Edit(start, end, new),)
    return (*_taken_out(module, statement, alias), Edit(end, end, f"\n{indent}{new}"))


def _taken_out(module: Module, statement: ast.ImportFrom, alias: ast.alias) -> Iterator[Edit]:
    """The alias with the comma that belongs to it."""
    names = statement.names
    position = names.index(alias)
    if position + 1 < len(names):
        yield Edit(module.span(alias)[0], module.span(names[position + 1])[0], "")
    else:
        yield Edit(module.span(names[position - 1])[1], module.span(alias)[1], "")
