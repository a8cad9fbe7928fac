"""The targets that change names only: `jax_dist.pmap`, or `mapped` of the vendored module.

Both take what pmap takes and give what it gives, so nothing around a place changes. One thing goes:
a bare `jax.jit` around a pmap, since inside a jit neither could place its arguments. Removed names
of JAX, and the pmaps of other libraries, change with it.
"""

import ast
import os
from collections.abc import Iterator, Sequence

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.findings import Code, Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Version
from jax_dist.lint.rules.pmap_call import OF_LIBRARIES
from jax_dist.migrate import imports, sites
from jax_dist.migrate.names import LibraryNames, Namer, indentation
from jax_dist.migrate.places import Left, Place, PlannedPlace, Target
from jax_dist.migrate.project_files import ProjectFiles

# The rules whose safe fixes a migration makes too.
CODES: frozenset[Code] = frozenset(
    (
        _codes.REMOVED_SHARDING_CLASS,
        _codes.REMOVED_PMAP_CONFIG,
        _codes.EXPERIMENTAL_SHARD_MAP,
        _codes.PJIT_TO_JIT,
        _codes.PVARY_TO_PCAST,
        _codes.REMOVED_NAME,
        _codes.SPEC_TUPLE_COMPARE,
    )
)
_BY_DEFINITION = "the definition of this alias is migrated"


def place_of(
    module: Module, site: Site, target: Target, namer: Namer, files: ProjectFiles
) -> PlannedPlace:
    """Return a reference to pmap under the name that `namer` has for it."""
    try:
        if any(isinstance(node, ast.JoinedStr) for node in module.ancestors(site.reference)):
            raise Left(
                "pmap is inside an f-string",  # where Python 3.11 knows no positions
                "Take it out of the string, then migrate again.",
            )
        fix = _fix(module, site, namer)
        remark = _remark(module, site) if fix is not None else _BY_DEFINITION
        home = None if fix is not None else files.definer(module, site.reference)
        if home is not None and files.shown and home not in files.shown:
            path = os.path.relpath(home)
            raise Left(
                "pmap is defined in a file that is not among the paths",
                f"Migrate that file too: jax-dist migrate {module.source.path} {path}",
            )
    except Left as left:
        return PlannedPlace.left(module, site.reference, _codes.PMAP_CALL, left)
    place = module, site.reference, _codes.PMAP_CALL, fix, remark, target
    return PlannedPlace.done(*place, is_mapped=site.is_application)


def _fix(module: Module, site: Site, namer: Namer) -> Fix | None:
    """Return the fix of one reference; None if another place's fix does it. Raises Left."""
    imported = _import_of(module, site.reference)
    if imported is None:
        return None
    unjitted = _unjitted(module, site)
    if isinstance(imported, ast.alias):
        # `from jax import pmap`: the name stays, and comes from elsewhere.
        line = namer.import_as(imported.asname or imported.name)
        return _fix_of_import(module, imported, line, namer.source, unjitted)
    name = namer.named(module, "pmap", site.reference)
    new = _renamed(module.text(site.reference), name.text)
    edits = (Edit(*module.span(site.reference), new), *name.edits, *unjitted)
    return Fix(f"use {namer.title}", Safety.SAFE, tuple(sorted(edits)), name.imports)


def _import_of(module: Module, reference: ast.expr) -> ast.alias | ast.expr | None:
    """Return the alias of `from jax import pmap`, or `jax` of `jax.pmap`; None for an alias.

    Of `from jax import *`, the name itself.
    """
    if isinstance(reference, ast.Attribute):
        home = module.qualified_name(reference.value) or ""
        is_home = home.partition(".")[0] in ("jax", "jax_dist") or sites.is_vendored(f"{home}.x")
        return reference.value if is_home else None
    if not isinstance(reference, ast.Name):
        return None
    bound = module.scope(reference).lookup(reference.id)
    if bound is None and module.scopes.module.star_imports == ["jax"]:
        return reference
    if bound is None or len(bound[1]) != 1:
        return None
    binding = bound[1][0]
    is_direct = binding.kind == "import" and _is_mapping(binding.target)
    return binding.node if is_direct and isinstance(binding.node, ast.alias) else None


def _is_mapping(dotted: str) -> bool:
    """Return whether an import of this name gives a mapping function itself."""
    return (
        dotted in pmaps.PMAP
        or dotted == "jax_dist.pmap"
        or (dotted.endswith(".mapped") and sites.is_vendored(dotted))
    )


def _fix_of_import(
    module: Module, alias: ast.alias, new: str, source: str, more: tuple[Edit, ...] = ()
) -> Fix:
    """Return the fix by which `from jax import a, pmap` becomes `from jax import a`."""
    statement = module.statement(alias)
    assert isinstance(statement, ast.ImportFrom)
    start, end = module.span(statement)
    added: tuple[str, ...] = ()
    if len(statement.names) == 1:
        edits = (Edit(start, end, new),)
    elif module.parent(statement) is module.tree:
        edits, added = (imports.without(module, statement, alias),), (new,)
    else:
        indent = indentation(module.source.line_text(start))
        edits = (imports.without(module, statement, alias), Edit(end, end, f"\n{indent}{new}"))
    return Fix(f"import pmap from {source}", Safety.SAFE, (*edits, *more), added)


def _unjitted(module: Module, site: Site) -> tuple[Edit, ...]:
    """Return the edits that leave out the jit of `jit(pmap(f))`, or of `@jit` over `@pmap`.

    Nothing if the jit has arguments of its own, or a comment would go with it.
    """
    around = module.parent(site.node)
    if site.form == "call" and isinstance(around, ast.Call) and around.args == [site.node]:
        return pmaps.unjitted(module, around, site.node)
    if site.form != "call" and site.is_application and isinstance(around, ast.FunctionDef):
        place = around.decorator_list.index(site.node)
        return pmaps.unjitted(module, around.decorator_list[place - 1], site.node) if place else ()
    return ()


def _renamed(old: str, new: str) -> str:
    """Return a dotted name in the place of another, with the comments inside that."""
    if "#" not in old:
        return new
    first, *more = [line.partition("#") for line in old.split("\n")]
    kept = [f"{new}  #{first[2]}" if first[1] else new]
    for code, mark, comment in more:
        kept.append(f"{indentation(code)}{mark}{comment}")
    return "\n".join(kept)


def _remark(module: Module, site: Site) -> str:
    if not _unjitted(module, site):
        return ""
    donates = any(name.startswith("donate") for name in site.arguments)
    return "the jit around it goes" + ("; what it donates is donated now" if donates else "")


# --- beside


def places_beside(
    module: Module,
    target: Target,
    namer: Namer,
    covered: Sequence[tuple[int, int]],
    files: ProjectFiles,
    jax: Version | None,
) -> list[PlannedPlace]:
    """Return the places of imports of pmap, removed functions, other pmaps, and fixed rules.

    Args:
      module: the file.
      target: what takes their place.
      namer: names the new functions.
      covered: the bytes of places that are known; what a rule finds inside is that place.
      files: the others of the project.
      jax: the oldest jax that the code must run on; None: the newest.
    """
    places = [
        *_of_imports(module, target, namer, files),
        *_of_puts(module, target, namer),
        *_of_other_pmaps(module, target),
    ]
    spans = [*covered, *(place.span for place in places)]
    for place in places_of_rules(module, jax):
        low = place.span[0]
        if not any(start <= low and (place.span[1] <= end or low == start) for start, end in spans):
            places.append(place)
    return places


def _of_imports(
    module: Module, target: Target, namer: Namer, files: ProjectFiles
) -> Iterator[PlannedPlace]:
    """Yield `from jax import pmap` of a file that only hands the name on."""
    scope, path = module.scopes.module, os.path.abspath(module.source.path)
    for name, bindings in scope.bindings.items():
        for binding in bindings:
            alias = binding.node
            is_source = binding.kind == "import" and binding.target in sites.names_of(
                module, "pmap", target
            )
            if not is_source or not isinstance(alias, ast.alias) or alias.asname == alias.name:
                continue
            if module.reads(scope, name) or not files.is_imported(path, name):
                continue
            new = _fix_of_import(module, alias, namer.import_as(name), namer.source)
            yield PlannedPlace.done(
                module, alias, _codes.PMAP_CALL, new, "other files import it from here", target
            )


def places_of_rules(module: Module, jax: Version | None) -> list[PlannedPlace]:
    """Return the places that the rules of `CODES` find, and fix."""
    places: list[PlannedPlace] = []
    for finding in linter.check_module(module, CODES, jax):
        fix = finding.fix
        is_safe = fix is not None and fix.safety is Safety.SAFE
        place = Place(
            finding.path,
            finding.start.line,
            finding.start.cell,
            finding.code,
            "done" if is_safe else "left",
            finding.line_text.strip(),
            finding.message,
            "" if fix is None or is_safe else fix.title,
        )
        places.append(PlannedPlace(place, finding.span, fix if is_safe else None))
    return places


_PUT_CODES: dict[str, Code] = {
    "device_put_replicated": _codes.REMOVED_DEVICE_PUT_REPLICATED,
    "device_put_sharded": _codes.REMOVED_DEVICE_PUT_SHARDED,
}


def _of_puts(module: Module, target: Target, namer: Namer) -> Iterator[PlannedPlace]:
    """Yield each use of a function that JAX removed, under a new name."""
    for function, code in _PUT_CODES.items():
        for node in module.uses(*sites.names_of(module, function, target)):
            try:
                fix = _of_put(module, function, node, namer)
                yield PlannedPlace.done(module, node, code, fix, form=target)
            except Left as left:
                yield PlannedPlace.left(module, node, code, left)


def _of_put(module: Module, function: str, node: ast.expr, namer: Namer) -> Fix:
    call = module.parent(node)
    words = call.keywords if isinstance(call, ast.Call) and call.func is node else ()
    if any(isinstance(around, ast.Assign) and node in around.targets for around in [call]):
        raise Left("the file defines it itself", "Leave it as it is.")
    has_other_name = function == "device_put_replicated" and isinstance(namer, LibraryNames)
    if has_other_name and any(word.arg in ("x", None) for word in words):
        raise Left(
            "its first argument is given by name, and has another name in the replacement",
            "Give it by position, then migrate again.",
        )
    new = namer.named(module, function, node)
    edit = Edit(*module.span(node), _renamed(module.text(node), new.text))
    edits = tuple(sorted((edit, *new.edits)))
    return Fix(f"replace jax.{function}", Safety.UNSAFE, edits, new.imports)


_OF_NNX_ALONE = ("transform_metadata", "graph", "graph_updates")


def _of_other_pmaps(module: Module, target: Target) -> Iterator[PlannedPlace]:
    for name, (ours, by_hand) in OF_LIBRARIES.items():
        for node in module.uses(name):
            try:
                if target != "jax_dist":
                    raise Left(
                        f"{name} maps functions of modules, and plain JAX has no such function",
                        f"Use {by_hand}, or migrate with --to jax_dist.",
                    )
                fix = _of_library(module, node, ours)
                yield PlannedPlace.done(module, node, _codes.PMAP_CALL, fix, form=target)
            except Left as left:
                yield PlannedPlace.left(module, node, _codes.PMAP_CALL, left)


def _of_library(module: Module, node: ast.expr, ours: str) -> Fix:
    call = module.parent(node)
    words = [word.arg for word in call.keywords] if isinstance(call, ast.Call) else []
    unknown = [word for word in words if word in _OF_NNX_ALONE]
    if unknown and ours == "nnx_pmap":
        raise Left(
            f"jax_dist.{ours} takes no {', '.join(filter(None, unknown))}",
            "Leave it out, then migrate again; or use flax.nnx.shard_map.",
        )
    new = LibraryNames().named(module, ours, node)
    edits = (Edit(*module.span(node), new.text), *new.edits)
    return Fix(f"use jax_dist.{ours}", Safety.SAFE, tuple(sorted(edits)), new.imports)
