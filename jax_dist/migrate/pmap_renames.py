"""`jax.pmap` under a new name: `jax_dist.pmap`, or `mapped` of the file's helpers.

Both take what pmap takes and give what it gives, so only the name changes, in whatever form it is
used. A bare `jax.jit` around it goes, for inside a jit neither could place its arguments.

What stands beside it changes too: removed names, `device_put`, and the pmaps of other libraries.
The checker's own fixes do the first. `x[0]` of what a mapped function gives stays, for the first
shard (JXD202, JXD203) is another place, and nothing at all inside a trace.
"""

import ast
import os
from collections.abc import Callable, Iterator, Sequence

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.findings import Code, Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Version
from jax_dist.migrate import codegen, imports
from jax_dist.migrate.codegen import LibraryNames, Namer
from jax_dist.migrate.pmap_facts import PmapFacts
from jax_dist.migrate.results import UNPROVED, Left, PlaceResult, PlannedPlace

_RENAMES: tuple[Code, ...] = (
    _codes.REMOVED_SHARDING_CLASS,
    _codes.REMOVED_PMAP_CONFIG,
    _codes.EXPERIMENTAL_SHARD_MAP,
    _codes.PJIT_TO_JIT,
    _codes.PVARY_TO_PCAST,
    _codes.REMOVED_NAME,
    _codes.SPEC_TUPLE_COMPARE,
)
# Not JXD302: what this writes has a mesh of its own, and a mesh of the file may be meant so.
_IDIOMS: tuple[Code, ...] = (_codes.ALL_GATHER_THEN_REDUCE,)

CODES = frozenset(_RENAMES + _IDIOMS)  # all that is asked for


def fix(
    module: Module, site: Site, namer: Namer, stays: Callable[[Site], bool] = lambda site: False
) -> Fix | None:
    """The fix of one reference to `jax.pmap`; None where another place's fix does it.

    `stays` says whether a site of the file must keep its meaning. Raises Left.
    """
    if _is_asked_about(module, site):
        raise Left(
            "pmap is asked about itself, and another function would answer differently",
            "Decide by hand which of the two functions is meant.",
        )
    imported = _import_of(module, site.reference)
    if imported is None:
        return None
    unjitted = _unjitted(module, site)
    if isinstance(imported, ast.alias) and not _must_stay(module, imported, stays):
        # `from jax import pmap`: the name stays, and comes from elsewhere.
        line = namer.import_as(imported.asname or imported.name)
        if line is not None:
            return _fix_of_import(module, imported, line, namer.source, unjitted)
    name = namer.named(module, "pmap", site.reference)
    new = _renamed(module.text(site.reference), name.text)
    made = (Edit(*module.span(site.reference), new), *name.edits, *unjitted)
    return Fix(f"use {namer.title}", Safety.SAFE, tuple(sorted(made)), name.imports)


def written_out(module: Module, site: Site, namer: Namer, facts: PmapFacts | None) -> Fix:
    """The fix of a use of an alias that stays as it is where it is defined. Raises Left."""
    call = site.node
    if facts is None or not isinstance(call, ast.Call) or site.unknown:
        raise Left(UNPROVED)
    written = {*ast.walk(call)}
    own = [name for name, value in site.arguments.items() if value not in written]
    name = namer.named(module, "pmap", site.reference)
    edits = [Edit(*module.span(site.reference), name.text), *name.edits]
    if more := "".join(f", {each}={facts.text_of(site, each)}" for each in own):
        given = [*call.args, *(word.value for word in call.keywords)]
        end = max(module.span(each)[1] for each in given)
        edits.append(Edit(end, end, more))
    return Fix(f"use {namer.title}", Safety.SAFE, tuple(sorted(edits)), name.imports)


def _unjitted(module: Module, site: Site) -> tuple[Edit, ...]:
    """The edits that leave out the jit of `jit(pmap(f))`, or of `@jit` over `@pmap`.

    Args:
      module: the file.
      site: one place that maps.

    Returns:
      Nothing where there is no such jit, where it has arguments of its own, and where a comment
      would go with it.
    """
    around = module.parent(site.node)
    if site.form == "call" and isinstance(around, ast.Call) and around.args == [site.node]:
        return pmaps.unjitted(module, around, site.node)
    if site.form != "call" and site.is_application and isinstance(around, ast.FunctionDef):
        place = around.decorator_list.index(site.node)
        return pmaps.unjitted(module, around.decorator_list[place - 1], site.node) if place else ()
    return ()


def _renamed(old: str, new: str) -> str:
    """A dotted name in the place of another, with the comments between the parts of that."""
    if "#" not in old:
        return new
    first, *more = [line.partition("#") for line in old.split("\n")]
    kept = [f"{new}  #{first[2]}" if first[1] else new]
    for code, mark, comment in more:
        kept.append(f"{codegen.indentation(code)}{mark}{comment}")
    return "\n".join(kept)


def said(module: Module, site: Site) -> str:
    """What is told of a place beyond that it is migrated."""
    if not _unjitted(module, site):
        return ""
    donates = any(name.startswith("donate") for name in site.arguments)
    return "the jit around it goes" + ("; what it donates is donated now" if donates else "")


def _is_asked_about(module: Module, site: Site) -> bool:
    """Whether it matters which function this is, beyond that it is equal to itself."""
    if site.form != "value":
        call = module.parent(site.node)  # `type(jax.pmap(f))`: the type of what is given differs
        is_type = isinstance(call, ast.Call) and module.text(call.func) == "type"
        return is_type and site.form == "call"
    inner: ast.AST = site.node
    for around in module.ancestors(site.node):
        match around:
            case ast.stmt():
                break
            case ast.Call(func=ast.Name(id="isinstance" | "type" | "hasattr" | "getattr" | "id")):
                return True
            case ast.Call(func=function) if module.qualified_name(function) in _ABOUT:
                return True
            case ast.Attribute(attr=name) if around.value is inner and name.startswith("__"):
                return True
        inner = around
    return False


_ABOUT = {"functools.wraps", "functools.update_wrapper", "inspect.signature", "inspect.getdoc"}


def check_not_replaced(module: Module, name: str, *, by_chex: bool = False) -> None:
    """Raises Left where the file has a function of another package replaced while it runs.

    Args:
      module: the file.
      name: of the function, such as "jax.pmap".
      by_chex: chex's fakes of `jax.pmap` count too; they replace jax_dist.pmap as well.
    """
    fakes = module.once(_fakes) if by_chex else ()
    for node in (*fakes, *module.once(_replacements).get(name, ())):
        raise Left(
            f"the file has {name} replaced while it runs, and the new function would not be",
            "Replace the new function there too.",
            f"{module.text(node)} in line {node.lineno}",
        )


def _fakes(module: Module) -> list[ast.expr]:
    """Where a file uses `chex.fake_pmap` and its like, also within chex."""
    return [
        node
        for name in module.used_names("chex")
        for node in module.uses(name)
        if name.rpartition(".")[2].startswith("fake_pmap")
    ]


def _replacements(module: Module) -> dict[str, list[ast.expr]]:
    """By the name of what is replaced: where a file sets, deletes or mocks it."""
    found: dict[str, list[ast.expr]] = {}
    for node in module.scopes.nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                found.setdefault(f"{module.qualified_name(node.value)}.{name}", []).append(node)
            case ast.Call(func=ast.Attribute(attr=how) | ast.Name(id=how)) if how in _REPLACING:
                constants = [each.value for each in node.args if isinstance(each, ast.Constant)]
                texts = [each for each in constants if isinstance(each, str)]
                owner = module.qualified_name(node.args[0]) if node.args else None
                # `patch("jax.pmap")`, or `patch.object(jax, "pmap")`.
                for name in (*texts, *(f"{owner}.{text}" for text in texts)):
                    found.setdefault(name, []).append(node)
    return found


_REPLACING = ("patch", "object", "setattr", "replace")


def _import_of(module: Module, reference: ast.expr) -> ast.alias | ast.expr | None:
    """The alias of `from jax import pmap`; `jax` of `jax.pmap`; None where pmap has an alias.

    Of `from jax import *`, the name itself.
    """
    if isinstance(reference, ast.Attribute):
        home = module.qualified_name(reference.value) or ""
        return reference.value if home.partition(".")[0] == "jax" else None
    if not isinstance(reference, ast.Name):
        return None
    found = module.scope(reference).lookup(reference.id)
    if found is None and module.scopes.module.star_imports == ["jax"]:
        return reference
    if found is None or len(found[1]) != 1:
        return None
    binding = found[1][0]
    is_direct = binding.kind == "import" and binding.target in pmaps.PMAP
    return binding.node if is_direct and isinstance(binding.node, ast.alias) else None


def _must_stay(module: Module, alias: ast.alias, stays: Callable[[Site], bool]) -> bool:
    """Whether some use of the imported name must keep its meaning."""
    known = module.memo(_must_stay)
    if alias not in known:
        known[alias] = any(
            _is_asked_about(module, site) or stays(site)
            for site in pmaps.sites(module)
            if _import_of(module, site.reference) is alias
        )
    return known[alias]


def _fix_of_import(
    module: Module, alias: ast.alias, new: str, source: str, more: tuple[Edit, ...] = ()
) -> Fix:
    """`from jax import a, pmap` becomes `from jax import a`, and the new import joins it."""
    statement = module.statement(alias)
    assert isinstance(statement, ast.ImportFrom)
    start, end = module.span(statement)
    added: tuple[str, ...] = ()
    if len(statement.names) == 1:
        edits = (Edit(start, end, new),)
    elif module.parent(statement) is module.tree:
        edits, added = (imports.without(module, statement, alias),), (new,)
    else:
        indent = codegen.indentation(module.source.line_text(start))
        edits = (imports.without(module, statement, alias), Edit(end, end, f"\n{indent}{new}"))
    return Fix(f"import pmap from {source}", Safety.SAFE, (*edits, *more), added)


# --- what stands beside


def places_beside(
    module: Module,
    namer: Namer,
    of_pmaps: Sequence[PlannedPlace],
    freed: dict[ast.expr, PlannedPlace],
    target: Version | None,
    *,
    to_library: bool,
    slow_idioms: bool,
) -> list[PlannedPlace]:
    """What becomes of imports of pmap, removed functions, other pmaps, and what rules mend.

    Args:
      module: the file.
      namer: names the new functions.
      of_pmaps: the places of `jax.pmap`; what a rule finds inside of one is that place.
      freed: the places that do without the device axis, by node; each is one here.
      target: the oldest jax that the code must run on; None: the newest.
      to_library: the new text may use jax_dist's own.
      slow_idioms: whether these go too.
    """
    found = [*_of_imports(module, namer), *_of_puts(module, namer, freed), *freed.values()]
    found += _of_other_pmaps(module, to_library=to_library)
    covered = [place.span for place in (*of_pmaps, *found)]  # `unreplicate(x)` is found twice
    for place in _of_rules(module, target, slow_idioms=slow_idioms):
        low, high = place.span
        is_within = (low == start or (start <= low and high <= end) for start, end in covered)
        if not any(is_within):
            found.append(place)
    return found


def _of_imports(module: Module, namer: Namer) -> Iterator[PlannedPlace]:
    """`from jax import pmap` in a file that does not use the name itself, for others import it."""
    scope, path = module.scopes.module, os.path.abspath(module.source.path)
    graph = module.graph
    for name, bindings in scope.bindings.items():
        for binding in bindings:
            alias = binding.node
            is_pmap = binding.kind == "import" and binding.target in pmaps.PMAP
            if not is_pmap or not isinstance(alias, ast.alias) or alias.asname == alias.name:
                continue
            is_used = graph is not None and any(True for _ in graph.users(path, name))
            if module.reads(scope, name) or not is_used:
                continue
            namer.needs(frozenset(("full",)))  # whatever the other files need
            line = namer.import_as(name)
            if line is None:
                why = Left(
                    "other files get pmap from this one, which has its helpers inside",
                    "Import pmap in the files that use it, then migrate again.",
                )
                yield PlannedPlace.left(module, alias, _codes.PMAP_CALL, why)
            else:
                new = _fix_of_import(module, alias, line, namer.source)
                said = "other files import it from here"
                yield PlannedPlace.done(module, alias, _codes.PMAP_CALL, new, said)


def _of_rules(module: Module, target: Version | None, *, slow_idioms: bool) -> list[PlannedPlace]:
    """The places of a file that rules find and mend; slow idioms too, where these go."""
    unsafe = _IDIOMS if slow_idioms else ()
    found: list[PlannedPlace] = []
    for finding in linter.check_module(module, frozenset(_RENAMES + unsafe), target):
        fix = finding.fix
        is_safe = fix is not None and fix.safety is Safety.SAFE
        is_wanted = fix is not None and fix.safety is Safety.UNSAFE and finding.code in unsafe
        outcome = PlaceResult(
            finding.path,
            finding.start.line,
            finding.start.cell,
            finding.code,
            "done" if is_safe or is_wanted else "left",
            finding.line_text.strip(),
            finding.message,
            "" if fix is None or is_safe or is_wanted else fix.title,
        )
        new = fix if is_safe or is_wanted else None
        found.append(PlannedPlace(outcome, finding.span, new))
    return found


# Not flax.jax_utils.replicate and unreplicate: they work on what mapped functions take and give,
# and only the installed flax says whether a Python number in a state becomes weakly typed.
REMOVED: dict[str, Code] = {
    "jax.device_put_replicated": _codes.REMOVED_DEVICE_PUT_REPLICATED,
    "jax.device_put_sharded": _codes.REMOVED_DEVICE_PUT_SHARDED,
}


def _of_puts(
    module: Module, namer: Namer, freed: dict[ast.expr, PlannedPlace]
) -> Iterator[PlannedPlace]:
    """What becomes of each use of a function that was removed; what is in `freed` is taken out."""
    for name, code in REMOVED.items():
        for node in module.uses(name):
            place = freed.pop(module.parent(node), None)  # type: ignore[call-overload]
            try:
                yield place or PlannedPlace.done(
                    module, node, code, _of_put(module, name, node, namer)
                )
            except Left as left:
                yield PlannedPlace.left(module, node, code, left)


def _of_put(module: Module, name: str, node: ast.expr, namer: Namer) -> Fix:
    """Calls what takes its place. Raises Left where it is called in another way, or not at all."""
    check_not_replaced(module, name)
    call = module.parent(node)
    words = call.keywords if isinstance(call, ast.Call) and call.func is node else ()
    has_other_name = name == "jax.device_put_replicated" and isinstance(namer, LibraryNames)
    if has_other_name and any(word.arg in ("x", None) for word in words):
        raise Left(
            "its first argument is given by name, and has another name in the replacement",
            "Give it by position, then migrate again.",
        )
    if isinstance(call, ast.Compare):
        raise Left(
            "the function itself is compared",
            "Decide by hand which of the two functions is meant.",
        )
    new = namer.named(module, name.removeprefix("jax."), node)
    edit = Edit(*module.span(node), _renamed(module.text(node), new.text))
    return Fix(f"replace {name}", Safety.UNSAFE, tuple(sorted((edit, *new.edits))), new.imports)


_OF_LIBRARIES = {  # and what takes the place in plain JAX, by hand
    "equinox.filter_pmap": ("filter_pmap", "equinox.filter_shard_map"),
    "flax.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
    "flax.experimental.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
}
_OF_NNX_ALONE = ("transform_metadata", "graph", "graph_updates")


def _of_other_pmaps(module: Module, *, to_library: bool) -> Iterator[PlannedPlace]:
    """What becomes of each use of them; `to_library`: the new text may use jax_dist's own."""
    for name in _OF_LIBRARIES:
        for node in module.uses(name):
            try:
                fix = _of_library(module, node, name, to_library=to_library)
                yield PlannedPlace.done(module, node, _codes.PMAP_CALL, fix)
            except Left as left:
                yield PlannedPlace.left(module, node, _codes.PMAP_CALL, left)


def _of_library(module: Module, node: ast.expr, name: str, *, to_library: bool) -> Fix:
    ours, by_hand = _OF_LIBRARIES[name]
    check_not_replaced(module, name)
    if not to_library:
        raise Left(
            f"{name} maps functions of modules, and plain JAX has no such function",
            f"Use {by_hand}, or migrate with --to jax_dist.",
        )
    call = module.parent(node)
    words = [word.arg for word in call.keywords] if isinstance(call, ast.Call) else []
    unknown = [word for word in words if word in _OF_NNX_ALONE]
    if unknown and ours == "nnx_pmap":
        raise Left(
            f"jax_dist.{ours} takes no {', '.join(unknown)}",
            "Leave it out, then migrate again; or use flax.nnx.shard_map.",
        )
    new = LibraryNames().named(module, ours, node)
    edits = (Edit(*module.span(node), new.text), *new.edits)
    return Fix(f"use jax_dist.{ours}", Safety.SAFE, tuple(sorted(edits)), new.imports)
