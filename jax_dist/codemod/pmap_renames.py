"""`jax.pmap` under a new name: `jax_dist.pmap`, or `mapped` of the file's helpers.

Both take what pmap takes and give what it gives, so only the name changes, in whatever form it is
used. A bare `jax.jit` around it goes, for inside a jit neither could place its arguments.
"""

import ast
from collections.abc import Callable, Iterator

from jax_dist.checker.model import pmaps
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod.names import Namer
from jax_dist.codemod.results import Left


def fix(
    module: Module, site: Site, namer: Namer, stays: Callable[[Site], bool] = lambda site: False
) -> Fix | None:
    """The fix of one reference to `jax.pmap`; None where another place's fix does it.

    Args:
      module: the file.
      site: one of `pmaps.sites(module)`.
      namer: says how the new name is written.
      stays: whether a site of the file must keep its meaning.

    Raises:
      Left: the name cannot be changed there.
    """
    if is_asked_about(module, site):
        raise Left(
            "pmap is asked about itself, and another function would answer differently",
            "Decide by hand which of the two functions is meant.",
        )
    imported = _import_of(module, site.reference)
    if imported is None:
        return None
    unjitted = pmaps.without(module, site)
    if isinstance(imported, ast.alias) and not _must_stay(module, imported, stays):
        # `from jax import pmap`: the name stays, and comes from elsewhere.
        line = namer.import_as(imported.asname or imported.name)
        if line is not None:
            return _fix_of_import(module, imported, line, namer.source, unjitted)
    name = namer.named(module, "pmap", site.reference)
    new = renamed(module.text(site.reference), name.text)
    made = (Edit(*module.span(site.reference), new), *name.edits, *unjitted)
    return Fix(f"use {namer.title}", Safety.SAFE, tuple(sorted(made)), name.imports)


def renamed(old: str, new: str) -> str:
    """A dotted name in the place of another, with the comments between the parts of that."""
    if "#" not in old:
        return new
    first, *more = [line.partition("#") for line in old.split("\n")]
    kept = [f"{new}  #{first[2]}" if first[1] else new]
    for code, mark, comment in more:
        indent = code[: len(code) - len(code.lstrip())]
        kept.append(f"{indent}{mark}{comment}")
    return "\n".join(kept)


def handed_on(module: Module) -> Iterator[ast.alias]:
    """`from jax import pmap` in a file that does not use the name itself."""
    scope = module.scopes.module
    for name, bindings in scope.bindings.items():
        for binding in bindings:
            is_pmap = binding.kind == "import" and binding.target in pmaps.PMAP
            if is_pmap and isinstance(binding.node, ast.alias) and not module.reads(scope, name):
                yield binding.node


def fix_of_import(module: Module, alias: ast.alias, namer: Namer) -> Fix:
    """The fix of `from jax import pmap` itself. Raises Left."""
    line = namer.import_as(alias.asname or alias.name)
    if line is None:
        raise Left(
            "other files get pmap from this one, which has its helpers inside",
            "Import pmap in the files that use it, then migrate again.",
        )
    return _fix_of_import(module, alias, line, namer.source)


def said(module: Module, site: Site) -> str:
    """What is told of a place beyond that it is migrated."""
    if not pmaps.without(module, site):
        return ""
    donates = any(name.startswith("donate") for name in site.arguments)
    return "the jit around it goes" + ("; what it donates is donated now" if donates else "")


def is_asked_about(module: Module, site: Site) -> bool:
    """Whether it matters which function this is, beyond that it is equal to itself."""
    if site.form != "value":
        call = module.parent(site.node)  # `type(jax.pmap(f))`: the type of what is given differs
        is_type = isinstance(call, ast.Call) and module.text(call.func) == "type"
        return is_type and site.form == "call"
    inner: ast.AST = site.node
    for around in _within_statement(module, site.node):
        match around:
            case ast.Call(func=ast.Name(id="isinstance" | "type" | "hasattr" | "getattr" | "id")):
                return True
            case ast.Call(func=function) if module.qualified_name(function) in _ABOUT:
                return True
            case ast.Attribute(attr=name) if around.value is inner and name.startswith("__"):
                return True
        inner = around
    return False


_ABOUT = {"functools.wraps", "functools.update_wrapper", "inspect.signature", "inspect.getdoc"}


def replaced_by(module: Module) -> list[ast.expr]:
    """What in a file has `jax.pmap` replaced while it runs: assignments, mocks, chex's fakes."""
    return module.once(_replaced_by)


def _replaced_by(module: Module) -> list[ast.expr]:
    found = [
        node
        for name in module.used_names("chex")
        for node in module.uses(name)
        if name.rpartition(".")[2].startswith("fake_pmap")  # also within chex
    ]
    for node in module.scopes.nodes:
        match node:
            case ast.Attribute(attr="pmap", ctx=ast.Store()):
                if module.qualified_name(node.value) == "jax":
                    found.append(node)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in _REPLACING:
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                owners = [module.qualified_name(each) for each in node.args[:1]]
                if "jax.pmap" in texts or ("pmap" in texts and "jax" in owners):
                    found.append(node)
    return found


_REPLACING = ("patch", "object", "setattr", "replace")


def is_compared(module: Module, site: Site) -> bool:
    """`f is jax.pmap`, `f in (jax.jit, jax.pmap)`."""
    return site.form == "value" and any(
        isinstance(each, ast.Compare) for each in _within_statement(module, site.node)
    )


def may_be_compared(module: Module, site: Site) -> bool:
    """Whether the function itself goes on from there, so that it may meet a comparison."""
    return site.form in ("value", "alias") or is_compared(module, site)


def meetings(module: Module) -> Iterator[tuple[int, bool]]:
    """Where a file hands `jax.pmap` on as a value: `(line, whether it is compared there)`."""
    for site in pmaps.sites(module):
        if site.form == "value":
            yield site.reference.lineno, is_compared(module, site)  # type: ignore[attr-defined]


def _within_statement(module: Module, node: ast.AST) -> Iterator[ast.AST]:
    for around in module.ancestors(node):
        if isinstance(around, ast.stmt):
            return
        yield around


def _import_of(module: Module, reference: ast.expr) -> ast.alias | ast.expr | None:
    """The alias of `from jax import pmap`; `jax` of `jax.pmap`; None where pmap has an alias."""
    if isinstance(reference, ast.Attribute):
        home = module.qualified_name(reference.value) or ""
        return reference.value if home.partition(".")[0] == "jax" else None
    if not isinstance(reference, ast.Name):
        return None
    found = module.scope(reference).lookup(reference.id)
    if found is None or len(found[1]) != 1:
        return None
    binding = found[1][0]
    is_direct = binding.kind == "import" and binding.target in pmaps.PMAP
    return binding.node if is_direct and isinstance(binding.node, ast.alias) else None


def _must_stay(module: Module, alias: ast.alias, stays: Callable[[Site], bool]) -> bool:
    """Whether some use of the imported name must keep its meaning."""
    known = module.once(_staying)
    if alias not in known:
        known[alias] = any(
            is_asked_about(module, site) or stays(site)
            for site in pmaps.sites(module)
            if _import_of(module, site.reference) is alias
        )
    return known[alias]


def _staying(module: Module) -> dict[ast.alias, bool]:
    """What `_must_stay` found already."""
    del module
    return {}


def _fix_of_import(
    module: Module, alias: ast.alias, new: str, source: str, more: tuple[Edit, ...] = ()
) -> Fix:
    """`from jax import a, pmap` becomes `from jax import a`, and the new import joins it."""
    statement = module.statement(alias)
    assert isinstance(statement, ast.ImportFrom)
    start, end = module.span(statement)
    imports: tuple[str, ...] = ()
    if len(statement.names) == 1:
        edits = (Edit(start, end, new),)
    elif module.parent(statement) is module.tree:
        edits, imports = tuple(_taken_out(module, statement, alias)), (new,)
    else:
        line = module.source.line_text(start)
        indent = line[: len(line) - len(line.lstrip())]
        edits = (*_taken_out(module, statement, alias), Edit(end, end, f"\n{indent}{new}"))
    return Fix(f"import pmap from {source}", Safety.SAFE, (*edits, *more), imports)


def _taken_out(module: Module, statement: ast.ImportFrom, alias: ast.alias) -> Iterator[Edit]:
    """The alias with the comma that belongs to it."""
    names = statement.names
    position = names.index(alias)
    if position + 1 < len(names):
        yield Edit(module.span(alias)[0], module.span(names[position + 1])[0], "")
    else:
        yield Edit(module.span(names[position - 1])[1], module.span(alias)[1], "")
