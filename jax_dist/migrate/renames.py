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
from jax_dist.migrate.places import CannotMigrate, Place, PlannedPlace, Target
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
      vendored: the name by which the file imports the vendored module, such as "pkg._mapped".
    """

    def __init__(self, module: Module, target: Target, vendored: str):
        self._module, self._vendored = module, vendored
        self._target: Target = target

    def places(self, jax: Version | None) -> list[PlannedPlace]:
        """Return the uses of pmap and of removed names, each with its fix if there is one.

        The code must run on a jax as old as `jax`; None means the newest.
        """
        jits_around_pmaps = places_of_rules(self._module, jax, _JITS)
        return [
            *map(self._place_of_pmap, find_sites(self._module, self._target)),
            *(place for place in jits_around_pmaps if place.fix is not None),
            *self._places_of_device_puts(),
            *self._places_of_other_pmaps(),
            *places_of_rules(self._module, jax),
        ]

    def _place_of_pmap(self, site: Site) -> PlannedPlace:
        """Return the place of a reference to pmap, with the fix that renames it."""
        module, reference = self._module, site.reference
        # Python 3.11 knows no positions in an f-string.
        if any(isinstance(node, ast.JoinedStr) for node in module.ancestors(reference)):
            by_hand = "Take it out of the string, then migrate again."
            error = CannotMigrate("pmap is inside an f-string", by_hand)
            return PlannedPlace.leave(module, reference, error)
        fix = self._fix_reference(reference)
        reason = "an alias, which changes where it is defined" if fix is None else ""
        fields = {"reason": reason, "form": self._target, "is_mapped": site.is_application}
        return PlannedPlace(Place.make(module, reference, _codes.PMAP_CALL, **fields), fix)

    def _fix_reference(self, reference: ast.expr) -> Fix | None:
        """Return the fix of `jax.pmap` or of the import of `pmap`; None for a read of an alias."""
        module, names = self._module, names_of(self._module, "pmap", self._target)
        if isinstance(reference, ast.Attribute):
            dotted = f"{module.qualified_name(reference.value)}.{reference.attr}"
            return self._rename(reference, "pmap") if dotted in names else None
        lookup = module.scope(reference).lookup(getattr(reference, "id", ""))
        bindings = lookup[1] if lookup is not None else []
        is_import = len(bindings) == 1 and module.absolute(bindings[0].target) in names
        return self._fix_import(bindings[0].node) if is_import else None

    def _fix_import(self, alias: Any) -> Fix:
        """Return the fix that takes a name out of `from jax import pmap` and imports another."""
        statement = self._module.statement(alias)
        assert isinstance(statement, ast.ImportFrom)
        name, is_library = alias.asname or alias.name, self._target == "jax_dist"
        source, new = ("jax_dist", "pmap") if is_library else (self._vendored, "mapped")
        line = f"from {source} import {new}{'' if new == name else f' as {name}'}"
        if len(statement.names) == 1:
            edits, imports = [Edit(*self._module.span(statement), line)], ()
        else:
            edits, imports = new_imports.remove_names(self._module, statement, [alias]), (line,)
        return Fix("import pmap from elsewhere", Safety.SAFE, tuple(edits), imports)

    def _places_of_device_puts(self) -> Iterator[PlannedPlace]:
        """Yield each use of `device_put_replicated` and `device_put_sharded`, to be renamed."""
        for function in ("device_put_replicated", "device_put_sharded"):
            for node in self._module.uses(*names_of(self._module, function, self._target)):
                if isinstance(getattr(node, "ctx", None), ast.Store):
                    continue  # the file defines it itself
                code, form = _codes.REMOVED_DEVICE_PUT, self._target
                place = Place.make(self._module, node, code, form=form)
                yield PlannedPlace(place, self._rename(node, function))

    def _rename(self, node: ast.expr, function: str) -> Fix:
        """Return the fix from `jax.pmap` to `jax_dist.pmap` or `mapped`, with its import."""
        if self._target == "jax_dist":
            name, imports = self._module.name_for(f"jax_dist.{function}", node)
        else:
            name, imports = self._name_of_vendored("mapped" if function == "pmap" else function)
        edit = Edit(*self._module.span(node), name)
        return Fix(f"replace {function}", Safety.SAFE, (edit,), imports)

    def _name_of_vendored(self, function: str) -> tuple[str, tuple[str, ...]]:
        """Return a free name for a vendored function, with its import; or the one it has already.

        `("mapped", ("from _mapped import mapped",))`; below that import, `("mapped", ())`.
        """
        for name, bindings in self._module.scopes.module.bindings.items():
            if [binding.target for binding in bindings] == [f"{self._vendored}.{function}"]:
                return name, ()
        bound = {name for scope in self._module.scopes.all for name in scope.bindings}
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        name = next((name for name in names if name not in bound), names[-1])
        alias = "" if name == function else f" as {name}"
        return name, (f"from {self._vendored} import {function}{alias}",)

    def _places_of_other_pmaps(self) -> Iterator[PlannedPlace]:
        """Yield the uses of Equinox's filter_pmap and Flax NNX's pmap, which only jax_dist has."""
        for name, (function, instead) in OF_LIBRARIES.items():
            for node in self._module.uses(name):
                if self._target == "jax_dist":
                    place = Place.make(self._module, node, _codes.PMAP_CALL, form=self._target)
                    yield PlannedPlace(place, self._rename(node, function))
                else:
                    reason = f"{name} maps functions of modules, and plain JAX has no such function"
                    by_hand = f"Use {instead}, or migrate with --to jax_dist."
                    yield PlannedPlace.leave(self._module, node, CannotMigrate(reason, by_hand))


def places_of_rules(
    module: Module, jax: Version | None, codes: frozenset[Code] = CODES
) -> list[PlannedPlace]:
    """Return a place for each finding of the lint rules `codes`; see `Renames.places` for `jax`.

    Safe fixes are made, and those that remove a jit around a pmap; other findings are left.
    """
    places: list[PlannedPlace] = []
    for finding in linter.check_module(module, codes, jax):
        start, fix = finding.start, finding.fix
        where = finding.path, start.line, start.cell, finding.code
        text, reason = finding.line_text.strip(), finding.message
        if fix is not None and (fix.safety is Safety.SAFE or finding.code in _JITS):
            places.append(PlannedPlace(Place(*where, "done", text, reason), fix))
        else:
            by_hand = fix.title if fix is not None else ""
            places.append(PlannedPlace(Place(*where, "left", text, reason, by_hand)))
    return places


def names_of(module: Module, function: str, target: Target) -> tuple[str, ...]:
    """Return the dotted names that a target replaces, for "pmap" or a "device_put_..." function.

    They are "jax.pmap" and what other targets write: "jax_dist.pmap", "pkg._mapped.mapped".
    """
    names = [f"jax.{function}"] if function != "pmap" else [*pmaps.PMAP]
    if target != "jax_dist":
        names.append(f"jax_dist.{function}")
    if target != "vendored":
        vendored_function = "mapped" if function == "pmap" else function
        for name in module.used_names():
            file, _, last = name.rpartition(".")
            if is_vendored(name) and file != module.name and last == vendored_function:
                names.append(name)
    return tuple(names)


def find_sites(module: Module, target: Target) -> list[Site]:
    """Return every reference to a mapping function that `target` replaces, in order."""
    return pmaps.sites(module, names_of(module, "pmap", target))


def is_vendored(dotted: str) -> bool:
    """Return whether a dotted name is of a vendored module's function: `pkg._mapped.mapped`."""
    return dotted.split(".")[-2:-1] == [VENDORED]
