"""A `jax.jit` that says nothing more, right around a pmap, which compiles by itself."""

import ast

from jax_dist.checker.findings import Edit
from jax_dist.checker.modules import Module
from jax_dist.checker.pmaps import Site

_JIT = "jax.jit"


def without(module: Module, site: Site) -> tuple[Edit, ...]:
    """The edits that leave out the jit of `jit(pmap(f))`, or of `@jit` over `@pmap`.

    Args:
      module: the file.
      site: one place that maps.

    Returns:
      Nothing where there is no such jit, where it has arguments of its own, and where a comment
      would go with it.
    """
    around = module.parent(site.node)
    if site.form == "call":
        is_jit = isinstance(around, ast.Call) and around.args == [site.node]
        return unwrapped(module, around, site.node) if is_jit else ()  # type: ignore[arg-type]
    if site.is_application and isinstance(around, ast.FunctionDef):
        place = around.decorator_list.index(site.node)
        return undecorated(module, around.decorator_list[place - 1]) if place else ()
    return ()


def unwrapped(module: Module, call: ast.Call, inner: ast.expr) -> tuple[Edit, ...]:
    """`jit(f)` as `f`; nothing where that would lose something."""
    if module.qualified_name(call.func) != _JIT or len(call.args) != 1 or call.keywords:
        return ()
    (start, end), (inner_start, inner_end) = module.span(call), module.span(inner)
    code = module.source.code
    if b"#" in code[start:inner_start] + code[inner_end:end]:
        return ()
    return (Edit(start, inner_start, ""), Edit(inner_end, end, ""))


def undecorated(module: Module, decorator: ast.expr) -> tuple[Edit, ...]:
    """A decorator `@jit`, with its line; nothing where it has arguments, or is not alone there."""
    if module.qualified_name(decorator) != _JIT:
        return ()
    start, end = module.span(decorator)
    code = module.source.code
    line, after = code.rfind(b"\n", 0, start) + 1, code.find(b"\n", end)
    if code[line:start].strip() != b"@" or code[end:after].strip():
        return ()
    return (Edit(line, after + 1, ""),)
