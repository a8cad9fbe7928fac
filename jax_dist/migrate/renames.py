"""The targets that change names only: `jax_dist.pmap`, or `mapped` of the vendored module.

Both take and return what pmap does, so the code around them stays. One thing is removed:
a bare `jax.jit` around a pmap, since inside a jit neither could place its arguments. Removed names
of JAX, and the pmaps of other libraries, change with it.
"""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.model import new_imports
from jax_dist.lint.model.findings import Code, Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Version
from jax_dist.lint.rules.pmap_call import OF_LIBRARIES
from jax_dist.migrate import sites
from jax_dist.migrate.names import LIBRARY, Names
from jax_dist.migrate.places import Left, Place, PlannedPlace, Target

# The rules whose safe fixes a migration makes too.
CODES: frozenset[Code] = frozenset(
    (_codes.EXPERIMENTAL_SHARD_MAP, _codes.PJIT_TO_JIT, _codes.REMOVED_NAME)
)
_JITS: frozenset[Code] = frozenset((_codes.JIT_OF_PMAP,))


class Renames:
    """The places of one file whose names change: pmap becomes the function of a target."""

    def __init__(self, module: Module, target: Target, names: Names):
        self._module, self._names = module, names
        self._target: Target = target

    def places(self, jax: Version | None) -> list[PlannedPlace]:
        """Return the places, for code that must run on a jax as old as `jax` (None: the newest)."""
        jits = places_of_rules(self._module, jax, _JITS)
        return [
            *map(self._place_of_site, sites.find(self._module, self._target)),
            *(place for place in jits if place.fix is not None),
            *self._places_of_puts(),
            *self._places_of_other_pmaps(),
            *places_of_rules(self._module, jax),
        ]

    # --- references to pmap

    def _place_of_site(self, site: Site) -> PlannedPlace:
        """Return the place of one reference to pmap; `fix` is None if another place has it."""
        module, reference = self._module, site.reference
        if any(isinstance(node, ast.JoinedStr) for node in module.ancestors(reference)):
            why = Left(
                "pmap is inside an f-string",  # where Python 3.11 knows no positions
                "Take it out of the string, then migrate again.",
            )
            return PlannedPlace.at(module, reference, _codes.PMAP_CALL, left=why)
        fix = self._fix(site)
        remark = "" if fix is not None else "an alias, which changes where it is defined"
        place = module, reference, _codes.PMAP_CALL, fix
        is_mapped, form = site.is_application, self._target
        return PlannedPlace.at(*place, reason=remark, form=form, is_mapped=is_mapped)

    def _fix(self, site: Site) -> Fix | None:
        """Return the fix of one reference; None if it names an alias, whose definition is fixed."""
        module, reference = self._module, site.reference
        if isinstance(reference, ast.Attribute):
            home = module.qualified_name(reference.value) or ""
            if home.partition(".")[0] not in ("jax", "jax_dist") and not sites.is_home(home):
                return None
            return self._renamed(reference, "pmap", self._names)
        is_name = isinstance(reference, ast.Name)
        bound = module.scope(reference).lookup(reference.id) if is_name else None
        if bound is None or len(bound[1]) != 1 or not self._imports_pmap(bound[1][0].target):
            return None
        return self._fix_of_import(bound[1][0].node)

    def _imports_pmap(self, dotted: str) -> bool:
        """Return whether an import of a dotted name imports a pmap that the target replaces."""
        return dotted in sites.names_of(self._module, "pmap", self._target)

    def _fix_of_import(self, alias: Any) -> Fix:
        """Return the fix that imports pmap from the target's module instead of `alias` from jax."""
        statement = self._module.statement(alias)
        assert isinstance(statement, ast.ImportFrom)
        line = self._names.import_as(alias.asname or alias.name)
        if len(statement.names) == 1:
            edits, added = [Edit(*self._module.span(statement), line)], ()
        else:
            edits, added = new_imports.remove_names(self._module, statement, [alias]), (line,)
        return Fix("import pmap from elsewhere", Safety.SAFE, tuple(edits), added)

    # --- other functions

    def _places_of_puts(self) -> Iterator[PlannedPlace]:
        """Yield each use of a function that JAX removed, under a new name."""
        for function in ("device_put_replicated", "device_put_sharded"):
            for node in self._module.uses(*sites.names_of(self._module, function, self._target)):
                if isinstance(getattr(node, "ctx", None), ast.Store):
                    continue  # the file defines it itself
                fix = self._renamed(node, function, self._names)
                place = self._module, node, _codes.REMOVED_DEVICE_PUT, fix
                yield PlannedPlace.at(*place, form=self._target)

    def _renamed(self, node: ast.expr, function: str, names: Names) -> Fix:
        """Return the fix that writes one of the new functions in the place of a node."""
        name, imports = names.name_for(self._module, function, node)
        edit = Edit(*self._module.span(node), name)
        return Fix(f"replace {function}", Safety.SAFE, (edit,), imports)

    def _places_of_other_pmaps(self) -> Iterator[PlannedPlace]:
        """Yield the uses of `equinox.filter_pmap` and the pmaps of Flax NNX."""
        for name, (ours, by_hand) in OF_LIBRARIES.items():
            for node in self._module.uses(name):
                why = None
                if self._target != "jax_dist":
                    why = Left(
                        f"{name} maps functions of modules, and plain JAX has no such function",
                        f"Use {by_hand}, or migrate with --to jax_dist.",
                    )
                fix = self._renamed(node, ours, LIBRARY) if why is None else None
                place = self._module, node, _codes.PMAP_CALL, fix, why
                yield PlannedPlace.at(*place, form=self._target)


def places_of_rules(
    module: Module, jax: Version | None, codes: frozenset[Code] = CODES
) -> list[PlannedPlace]:
    """Return the places that the rules of `codes` find; their safe fixes, and of jits, are made."""
    places: list[PlannedPlace] = []
    for finding in linter.check_module(module, codes, jax):
        fix = finding.fix
        is_made = fix is not None and (fix.safety is Safety.SAFE or finding.code in _JITS)
        place = Place(
            finding.path,
            finding.start.line,
            finding.start.cell,
            finding.code,
            "done" if is_made else "left",
            finding.line_text.strip(),
            finding.message,
            "" if fix is None or is_made else fix.title,
        )
        places.append(PlannedPlace(place, finding.span, fix if is_made else None))
    return places
