"""The targets that change names only: `jax_dist.pmap`, or `mapped` of the vendored module.

Both take and return what pmap does, so the code around them stays. Each target takes what the
others wrote: `jax_dist.pmap`, and `mapped` of a vendored module. One thing is removed:
a bare `jax.jit` around a pmap, since inside a jit neither could place its arguments. Removed names
of JAX, and the pmaps of other libraries, change with it.
"""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist import _codes
from jax_dist.lint import new_imports
from jax_dist.lint.engine import linter
from jax_dist.lint.findings import Code, Edit, Fix, Safety
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Version
from jax_dist.lint.rules.pmap_call import OF_LIBRARIES
from jax_dist.migrate.places import Left, Place, PlannedPlace, Target
from jax_dist.migrate.verify.recording.calls import VENDORED

# The rules whose safe fixes a migration makes too.
CODES: frozenset[Code] = frozenset(
    (_codes.EXPERIMENTAL_SHARD_MAP, _codes.PJIT_TO_JIT, _codes.REMOVED_NAME)
)
_JITS: frozenset[Code] = frozenset((_codes.JIT_OF_PMAP,))


class Renames:
    """The places of one file whose names change: pmap becomes the function of a target.

    Args:
      module: the file.
      target: "jax_dist" or "vendored".
      home: the name by which the file imports the vendored module, such as "pkg._mapped".
    """

    def __init__(self, module: Module, target: Target, home: str):
        self._module, self._home = module, home
        self._target: Target = target

    def places(self, jax: Version | None) -> list[PlannedPlace]:
        """Return the places, for code that must run on a jax as old as `jax` (None: the newest)."""
        jits = places_of_rules(self._module, jax, _JITS)
        return [
            *map(self._place_of_site, find_sites(self._module, self._target)),
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
            return PlannedPlace.locate(module, reference, _codes.PMAP_CALL, left=why)
        fix = self._fix(site)
        remark = "" if fix is not None else "an alias, which changes where it is defined"
        place = module, reference, _codes.PMAP_CALL, fix
        is_mapped, form = site.is_application, self._target
        return PlannedPlace.locate(*place, reason=remark, form=form, is_mapped=is_mapped)

    def _fix(self, site: Site) -> Fix | None:
        """Return the fix of one reference; None if it names an alias, whose definition is fixed."""
        module, reference = self._module, site.reference
        names = names_of(module, "pmap", self._target)
        if isinstance(reference, ast.Attribute):
            dotted = f"{module.qualified_name(reference.value)}.{reference.attr}"
            return self._rename(reference, "pmap") if dotted in names else None
        bound = module.scope(reference).lookup(getattr(reference, "id", ""))
        bindings = bound[1] if bound is not None else []
        if len(bindings) != 1 or module.absolute(bindings[0].target) not in names:
            return None
        return self._fix_of_import(bindings[0].node)

    def _fix_of_import(self, alias: Any) -> Fix:
        """Return the fix that imports pmap from the target's module instead of `alias` from jax."""
        statement = self._module.statement(alias)
        assert isinstance(statement, ast.ImportFrom)
        bound = alias.asname or alias.name
        source, new = ("jax_dist", "pmap") if self._target == "jax_dist" else (self._home, "mapped")
        line = f"from {source} import {new}{'' if new == bound else f' as {bound}'}"
        if len(statement.names) == 1:
            edits, added = [Edit(*self._module.span(statement), line)], ()
        else:
            edits, added = new_imports.remove_names(self._module, statement, [alias]), (line,)
        return Fix("import pmap from elsewhere", Safety.SAFE, tuple(edits), added)

    # --- other functions

    def _places_of_puts(self) -> Iterator[PlannedPlace]:
        """Yield each use of a function that JAX removed, under a new name."""
        for function in ("device_put_replicated", "device_put_sharded"):
            for node in self._module.uses(*names_of(self._module, function, self._target)):
                if isinstance(getattr(node, "ctx", None), ast.Store):
                    continue  # the file defines it itself
                fix = self._rename(node, function)
                place = self._module, node, _codes.REMOVED_DEVICE_PUT, fix
                yield PlannedPlace.locate(*place, form=self._target)

    def _rename(self, node: ast.expr, function: str) -> Fix:
        """Return the fix that writes one of the new functions in the place of a node."""
        if self._target == "jax_dist":
            name, imports = self._module.name_for(f"jax_dist.{function}", node)
        else:
            name, imports = self._name_in_home("mapped" if function == "pmap" else function)
        edit = Edit(*self._module.span(node), name)
        return Fix(f"replace {function}", Safety.SAFE, (edit,), imports)

    def _name_in_home(self, function: str) -> tuple[str, tuple[str, ...]]:
        """Return the file's name for a function of the vendored module, with the import it needs.

        That is the name that it has already, or else a free one.
        """
        for name, bindings in self._module.scopes.module.bindings.items():
            if [binding.target for binding in bindings] == [f"{self._home}.{function}"]:
                return name, ()
        bound = {name for scope in self._module.scopes.all for name in scope.bindings}
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        free_name = next((name for name in names if name not in bound), names[-1])
        alias = "" if free_name == function else f" as {free_name}"
        return free_name, (f"from {self._home} import {function}{alias}",)

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
                fix = self._rename(node, ours) if why is None else None
                place = self._module, node, _codes.PMAP_CALL, fix, why
                yield PlannedPlace.locate(*place, form=self._target)


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
        places.append(PlannedPlace(place, fix if is_made else None))
    return places


def names_of(module: Module, function: str, target: Target) -> tuple[str, ...]:
    """Return the dotted names, in jax, jax_dist or a vendored module, that `target` replaces.

    Args:
      module: the file.
      function: "pmap", "device_put_replicated" or "device_put_sharded".
      target: what they become; its own name for the function is not replaced.
    """
    names = [f"jax.{function}"] if function != "pmap" else [*pmaps.PMAP]
    if target != "jax_dist":
        names.append(f"jax_dist.{function}")
    if target != "vendored":
        vendored_function = "mapped" if function == "pmap" else function
        for name in module.used_names():
            home, _, last = name.rpartition(".")
            if is_vendored(name) and home != module.name and last == vendored_function:
                names.append(name)
    return tuple(names)


def find_sites(module: Module, target: Target) -> list[Site]:
    """Return every reference to a mapping function that `target` replaces, in order."""
    return pmaps.sites(module, names_of(module, "pmap", target))


def is_vendored(dotted: str) -> bool:
    """Return whether a dotted name is of a function of a vendored module: `pkg._mapped.mapped`."""
    return dotted.split(".")[-2:-1] == [VENDORED]
