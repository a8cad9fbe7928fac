"""Migrate files together, to one target; a fix inside of another waits for the next round."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jax_dist.lint import new_imports
from jax_dist.lint.engine import linter
from jax_dist.lint.findings import choose_fixes
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, UnreadableError
from jax_dist.lint.rules import Version
from jax_dist.migrate import imports, renames, review, vendored
from jax_dist.migrate.places import Fallback, FileMigration, PlannedPlace, Target
from jax_dist.migrate.review import ChangedReads

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"_mapped", b"replicate", b"device_put_")
_ROUNDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class MigrationOptions:
    """The target of a migration, and what it is limited to."""

    to: Target = "jax_dist"
    jax: Version | None = None  # the oldest jax that the code must run on; None: the newest
    lines: Mapping[str, frozenset[int]] = dataclasses.field(default_factory=dict)  # by path
    drops_axis: bool = False  # of BatchNorm(axis_name="batch"), for plain jits alone
    # By path and line: other targets for the places that differed in a run.
    fallbacks: Mapping[str, Mapping[int, Fallback]] = dataclasses.field(default_factory=dict)


def migrate(
    paths: Sequence[str],
    options: MigrationOptions,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[FileMigration]:
    """Return the files with something to migrate and those with a problem; write nothing.

    A name that one file defines and another uses is migrated in both. `progress` is called with the
    number of files done, and of all.
    """
    project = Project(tuple(paths))
    migrated: list[FileMigration] = []
    has_batch_norms = False
    for number, path in enumerate(paths, start=1):
        try:
            data = sources.read_bytes(path)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            migrated.append(FileMigration(path, b"", b"", problem=problem))
            continue
        has_batch_norms = has_batch_norms or b"BatchNorm" in data
        words = (*_WORDS, b"BatchNorm") if options.drops_axis else _WORDS
        if any(word in data for word in words) or linter.likely(data, renames.CODES):
            result = migrate_text(path, data, options, project)
            if result is not None:
                migrated.append(result)
        progress(number, len(paths))
    # Batch norms over the mapped axis lose it if no function maps it any more: in a second pass.
    forms = {place.form for file in migrated for place in file.places if place.is_mapped}
    if has_batch_norms and forms == {"jit"} and not options.lines and not options.drops_axis:
        return migrate(paths, dataclasses.replace(options, drops_axis=True))
    return [*migrated, *vendored.new_modules(migrated)]


def migrate_text(
    path: str, data: bytes, options: MigrationOptions, project: Project | None = None
) -> FileMigration | None:
    """Return one file migrated; None if there is nothing to do in it and nothing to report."""
    project = project or Project()
    leave = lambda problem: FileMigration(path, data, data, problem=problem)
    try:
        module = project.module(linter.load(path, data))
    except UnreadableError as error:
        return leave(str(error))
    except ParseError as error:
        return leave(f"Python cannot parse it: line {error.line}: {error.message}")
    try:
        result = _File(module, options, project).migrate_file()
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        return leave(f"jax-dist failed on it ({type(error).__name__}: {error}); please report this")
    return result if result.places or result.changed else None


class _File:
    """The migration of one file, in rounds. Raises ParseError if a new text does not parse."""

    def __init__(self, module: Module, options: MigrationOptions, project: Project):
        self._original, self._options, self._project = module, options, project
        self._vendored_path, self._vendored_name = vendored.locate(module)
        self._lines = options.lines.get(module.source.path)  # the only ones to migrate; None: all
        # By line: the target of a place that differed in a run, None to leave it, and why.
        self._fallbacks = options.fallbacks.get(module.source.path, {})
        # One such place takes the whole file along, since its mapped functions share values.
        needs_vendored = any(target == "vendored" for target, _ in self._fallbacks.values())
        self._target: Target = "vendored" if needs_vendored else options.to

    def migrate_file(self) -> FileMigration:
        """Return the migrated file with its places, the uses of pmap and the like, by line."""
        source, module = self._original.source, self._original
        planned = self._plan_renames(module)  # whose lines are reported
        places = [place.place for place in planned]
        changed_reads: ChangedReads = {}
        if self._target in ("shard_map", "jit"):  # before names are changed in the new text
            module, rewritten, changed_reads = self._rewrite_mapped()
            places = [*(place.place for place in rewritten), *places]
        if module is not self._original:
            planned = self._plan_renames(module)  # whose fixes are those of the new text
        before, after = source.written(source.code), self._apply_fixes(module, planned)
        imports_vendored = f"from {self._vendored_name} import".encode() in after
        needs_vendored = self._target == "vendored" and after != before and imports_vendored
        errors = getattr(source, "unparsed", ())  # of cells of a notebook
        places += [renames.plan_finding(linter.syntax_error(source, x)).place for x in errors]
        return FileMigration(
            source.path,
            before,
            after,
            tuple(sorted(places, key=lambda place: (place.cell or 0, place.line))),
            needs_module=self._vendored_path if needs_vendored else "",
            changed_reads=changed_reads,
        )

    def _rewrite_mapped(self) -> tuple[Module, list[PlannedPlace], ChangedReads]:
        """Rewrite the mapped functions; return the new module, their places, and changed reads."""
        from jax_dist.migrate.shard_map.rewrite import rewrite  # only here: few runs need it

        module = self._original
        reasons = {line: reason for line, (_, reason) in self._fallbacks.items()}
        result = rewrite(module, self._project, self._target, self._lines, reasons)
        if result.fix is None:
            return module, result.places, {}
        source = module.source.edit(new_imports.place_imports(module, [result.fix]))
        if result.definitions:  # the text of functions and meshes that the new calls use
            source = new_imports.add_block(source, result.definitions)
        changed_reads = review.changed_reads(module, result.touched)
        return self._project.module(source), result.places, changed_reads

    def _apply_fixes(self, module: Module, planned: list[PlannedPlace]) -> bytes:
        """Return the bytes of the file with all fixes made, and those that they make possible."""
        for _ in range(_ROUNDS):
            fixes = [*dict.fromkeys(place.fix for place in planned if place.fix is not None)]
            if not fixes:
                break
            code = new_imports.place_imports(module, choose_fixes(fixes))
            module = self._project.module(module.source.edit(code))
            if self._lines is not None:  # by number in the old text: these are now other lines
                break
            planned = self._plan_renames(module)
        else:
            raise RuntimeError("the new text would change again each time")
        while (code := imports.tidy(self._original, module)) != module.source.code:
            module = self._project.module(module.source.edit(code))
        return module.source.written(module.source.code)

    def _plan_renames(self, module: Module) -> list[PlannedPlace]:
        """Return the places of names to change, such as `jax.pmap`, each with its fix if any."""
        if self._target in ("shard_map", "jit"):  # only of names that newer jax removed
            places = renames.places_of_rules(module, self._options.jax)
            places += renames.axes_of_batch_norms(module) if self._options.drops_axis else []
        else:
            renaming = renames.Renaming(module, self._target, self._vendored_name)
            places = renaming.plan(self._options.jax)
        if self._lines is not None:
            places = [planned for planned in places if planned.place.line in self._lines]
        left_lines = {line for line, (target, _) in self._fallbacks.items() if target is None}
        return [planned for planned in places if planned.place.line not in left_lines]
