"""The targets that change names only: `jax_dist.pmap`, or `mapped` of the vendored module.

Both take and return what pmap does, so the code around them stays, but for a bare `jax.jit` around
a pmap: inside a jit neither could place its arguments. Each target takes what the others wrote.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any

from jax_dist import _codes
from jax_dist.lint import new_imports
from jax_dist.lint.engine import linter
from jax_dist.lint.findings import Code, Edit, Finding, Fix, Safety
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
_JIT_OF_PMAP: frozenset[Code] = frozenset((_codes.JIT_OF_PMAP,))


class Renaming:
    """The changes of names in one file: pmap becomes the function of "jax_dist" or "vendored".

    `vendored` is the name by which the file imports the vendored module, such as "pkg._mapped".
    """

    def __init__(self, module: Module, target: Target, vendored: str):
        self._module, self._vendored = module, vendored
        self._target: Target = target

    def plan(self, jax: Version | None) -> list[PlannedPlace]:
        """Return the places of names to change, each with its fix, and of those to leave.

        They are of pmaps, of `jax.jit` around one, of `device_put_replicated` and its like, and of
        names that jax removed. The code must run on a jax as old as `jax`; None: the newest.
        """
        references = pmaps.sites(self._module, replaced_names(self._module, "pmap", self._target))
        jits_around_pmaps = places_of_rules(self._module, jax, _JIT_OF_PMAP)
        return [
            *map(self._plan_pmap, references),
            *(place for place in jits_around_pmaps if place.fix is not None),
            *self._plan_device_puts(),
            *self._plan_other_pmaps(),
            *places_of_rules(self._module, jax),
        ]

    def _plan_pmap(self, site: Site) -> PlannedPlace:
        """Return the place of a reference, such as `jax.pmap` in `jax.pmap(f)`, with its fix."""
        module, reference = self._module, site.reference
        # Python 3.11 knows no positions in an f-string.
        if any(isinstance(node, ast.JoinedStr) for node in module.ancestors(reference)):
            error = CannotMigrate("pmap is inside an f-string", "Take it out of the string.")
            return PlannedPlace.leave(module, reference, error)
        fix = self._fix_reference(reference)
        remark = "an alias, which changes where it is defined" if fix is None else ""
        fields = {"reason": remark, "form": self._target, "is_mapped": site.is_application}
        return PlannedPlace(Place.make(module, reference, _codes.PMAP_CALL, **fields), fix)

    def _fix_reference(self, reference: ast.expr) -> Fix | None:
        """Return the fix of `jax.pmap`, or of the import for a `pmap`; None for an alias."""
        module, old_names = self._module, replaced_names(self._module, "pmap", self._target)
        if isinstance(reference, ast.Attribute):
            dotted = f"{module.qualified_name(reference.value)}.{reference.attr}"
            return self._rename(reference, "pmap") if dotted in old_names else None
        _, bindings = module.scope(reference).lookup(getattr(reference, "id", "")) or (None, [])
        if len(bindings) == 1 and module.absolute(bindings[0].target) in old_names:
            return self._fix_import(bindings[0].node)
        return None

    def _fix_import(self, alias: Any) -> Fix:
        """Return the fix of `from jax import pmap`: `from pkg._mapped import mapped as pmap`."""
        statement = self._module.statement(alias)
        assert isinstance(statement, ast.ImportFrom)
        is_library = self._target == "jax_dist"
        home, function = ("jax_dist", "pmap") if is_library else (self._vendored, "mapped")
        name = alias.asname or alias.name
        new_import = f"from {home} import {function}" + (f" as {name}" if name != function else "")
        title = "import pmap from elsewhere"
        if len(statement.names) == 1:
            edit = Edit(*self._module.span(statement), new_import)
            return Fix(title, Safety.SAFE, (edit,))
        edits = new_imports.remove_items(self._module, statement.names, [alias])
        return Fix(title, Safety.SAFE, tuple(edits), (new_import,))

    def _plan_device_puts(self) -> Iterator[PlannedPlace]:
        """Yield each use of `device_put_replicated` and `device_put_sharded`, to be renamed."""
        for function in ("device_put_replicated", "device_put_sharded"):
            for node in self._module.uses(*replaced_names(self._module, function, self._target)):
                place = Place.make(self._module, node, _codes.REMOVED_DEVICE_PUT, form=self._target)
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
        """Return a free name for a vendored function, or the one it has already, with its import.

        Such as `("mapped", ("from _mapped import mapped",))`.
        """
        bound = {
            name
            for scope in self._module.scopes.all
            for name, bindings in scope.bindings.items()
            if [binding.target for binding in bindings] != [f"{self._vendored}.{function}"]
        }
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        name = next((name for name in names if name not in bound), names[-1])
        alias = "" if name == function else f" as {name}"
        return name, (f"from {self._vendored} import {function}{alias}",)

    def _plan_other_pmaps(self) -> Iterator[PlannedPlace]:
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
    """Return a place for each finding of the lint rules `codes`; see `Renaming.plan` for `jax`."""
    # Safe fixes are made, and those that remove a jit around a pmap; other findings are left.
    return [plan_finding(finding) for finding in linter.check_module(module, codes, jax)]


def plan_finding(finding: Finding) -> PlannedPlace:
    """Return the place of a finding of lint, with its fix if a migration makes that."""
    start, fix = finding.start, finding.fix
    where = finding.path, start.line, start.cell, finding.code
    text, reason = finding.line_text.strip(), finding.message
    if fix is not None and (fix.safety is Safety.SAFE or finding.code in _JIT_OF_PMAP):
        return PlannedPlace(Place(*where, "done", text, reason), fix)
    return PlannedPlace(Place(*where, "left", text, reason, fix.title if fix else ""))


def axes_of_batch_norms(module: Module) -> list[PlannedPlace]:
    """Return each `BatchNorm(axis_name="batch")`, with the removal of the axis."""
    # In plain jit, its statistics are those of the whole batch, for which pmap needed the axis.
    places: list[PlannedPlace] = []
    for call in module.nodes(ast.Call):
        names = map(module.qualified_name, [call.func, *call.args[:1]])  # the second of a partial
        if any(name and name.endswith(".BatchNorm") for name in names):
            for keyword in (x for x in call.keywords if x.arg == "axis_name"):
                fix = Fix("drop the axis", Safety.UNSAFE, tuple(remove_argument(module, keyword)))
                place = Place.make(module, keyword, _codes.PMAP_CALL, form="jit")
                places.append(PlannedPlace(place, fix))
    return places


def remove_argument(module: Module, keyword: ast.keyword) -> list[Edit]:
    """Return the edits that remove an argument by name from its call."""
    call: Any = module.parent(keyword)
    arguments, (before, after) = [*call.args, *call.keywords], module.margins(keyword)
    if not before.strip() and re.match(r",?\s*(#|$)", after):  # on lines of its own
        return [module.line_edit(keyword)]
    if arguments == [keyword]:
        return [Edit(module.span(call.func)[1], module.span(call)[1], "()")]
    if not before.strip() and after.startswith(")") and "#" in module.text(call):
        return [Edit(*module.span(keyword), "")]  # a comment of another argument stays
    return new_imports.remove_items(module, arguments, [keyword])


def replaced_names(module: Module, function: str, target: Target) -> tuple[str, ...]:
    """Return the dotted names that a target replaces, for "pmap" or a "device_put_..." function.

    They are "jax.pmap" and what other targets write: "jax_dist.pmap", and "pkg._mapped.mapped" of
    a vendored module that the file uses.
    """
    names = [*pmaps.PMAP] if function == "pmap" else [f"jax.{function}"]
    if target != "jax_dist":
        names.append(f"jax_dist.{function}")
    if target != "vendored":
        vendored_function = "mapped" if function == "pmap" else function
        for name in module.used_names():
            home, _, last = name.rpartition(".")
            is_defined_here = home == module.name  # the file is the vendored module itself
            if is_vendored(name) and last == vendored_function and not is_defined_here:
                names.append(name)
    return tuple(names)


def is_vendored(dotted: str) -> bool:
    """Return whether a dotted name is of a vendored module's function: `pkg._mapped.mapped`."""
    return dotted.split(".")[-2:-1] == [VENDORED]
