"""Migrate files together, to one target.

A fix inside of another waits for the next round. The last text must parse.
"""

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
from jax_dist.migrate.places import Back, FileMigration, PlannedPlace, Span, Target, unparsed_cells

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"_mapped", b"replicate", b"device_put_")
_ROUNDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class MigrationOptions:
    """The target of a migration, and what it is limited to."""

    to: Target = "jax_dist"
    jax: Version | None = None  # the oldest jax that the code must run on; None: the newest
    lines: Mapping[str, frozenset[int]] = dataclasses.field(default_factory=dict)  # by path
    # By path and line: the places that differed in a run, and the target to use for them instead.
    back: Mapping[str, Mapping[int, Back]] = dataclasses.field(default_factory=dict)


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
    for number, path in enumerate(paths, start=1):
        try:
            data = sources.read_bytes(path)
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            migrated.append(FileMigration(path, b"", b"", problem=problem))
            continue
        if any(word in data for word in _WORDS) or linter.likely(data, renames.CODES):
            result = migrate_text(path, data, options, project)
            if result is not None:
                migrated.append(result)
        progress(number, len(paths))
    return [*migrated, *vendored.new_modules(migrated)]


def migrate_text(
    path: str, data: bytes, options: MigrationOptions, project: Project | None = None
) -> FileMigration | None:
    """Return one file migrated; None if there is nothing to do in it and nothing to report.

    An error in jax_dist itself leaves the file as it was, with the error as its problem.
    """
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
    """One file while it is migrated, in rounds. Raises ParseError if a new text does not parse."""

    def __init__(self, module: Module, options: MigrationOptions, project: Project):
        self._first, self._options, self._project = module, options, project
        self._home_path, self._home = vendored.home_of(module)
        path = module.source.path
        self._back = options.back.get(path, {})
        self._chosen = options.lines.get(path)
        # One place that goes back takes the file along, since its mapped functions share values.
        is_back = any(form == "vendored" for form, _ in self._back.values())
        self._to: Target = "vendored" if is_back else options.to

    def migrate_file(self) -> FileMigration:
        """Return the migrated file with its places, the uses of pmap and the like, by line."""
        source, module = self._first.source, self._first
        planned: list[PlannedPlace] = []
        touched: Mapping[int, Sequence[Span]] = {}
        if self._to in ("shard_map", "jit"):
            module, planned, touched = self._rewrite_mapped(module)
        renamed = self._places(self._first)  # reported by the lines of the old text
        places = [*(p.place for p in (*planned, *renamed)), *unparsed_cells(source)]
        if module is not self._first:
            renamed = self._places(module)  # fixed in the rewritten text
        before, after = source.written(source.code), self._apply_fixes(module, renamed)
        needs_module = self._to == "vendored" and after != before
        needs_module = needs_module and f"from {self._home} import".encode() in after
        return FileMigration(
            source.path,
            before,
            after,
            tuple(sorted(places, key=lambda place: (place.cell or 0, place.line))),
            needs_module=self._home_path if needs_module else "",
            touched=touched,
        )

    def _rewrite_mapped(
        self, module: Module
    ) -> tuple[Module, list[PlannedPlace], Mapping[int, Sequence[Span]]]:
        """Return the file with its mapped functions rewritten, their places, and `touched`."""
        from jax_dist.migrate.shard_map.rewrite import rewrite  # only here: few runs need it

        shard_map_lines = {line: reason for line, (_, reason) in self._back.items()}
        result = rewrite(module, self._project, self._to, self._chosen, shard_map_lines)
        if result.fix is None:
            return module, result.places, {}
        source = module.source.edit(new_imports.place_imports(module, [result.fix]))
        if result.definitions:
            source = new_imports.add_block(source, result.definitions)
        touched = review.touched_lines(module, result.touched)
        return self._project.module(source), result.places, touched

    def _apply_fixes(self, module: Module, planned: list[PlannedPlace]) -> bytes:
        """Return the file's bytes with the fixes of all places made, round by round."""
        for _ in range(_ROUNDS):
            fixes = [*dict.fromkeys(place.fix for place in planned if place.fix is not None)]
            if not fixes:
                return self._tidy(module)
            placed = new_imports.place_imports(module, choose_fixes(fixes))
            module = self._project.module(module.source.edit(placed))
            if self._chosen is not None:  # these lines are of the first text: one round only
                return self._tidy(module)
            planned = self._places(module)
        raise RuntimeError("the new text would change again each time")

    def _tidy(self, module: Module) -> bytes:
        """Return the bytes of a migrated file, without imports and definitions now unused."""
        source = module.source
        if module is not self._first:
            while (code := imports.tidy(self._first, module)) != source.code:
                source = source.edit(code)
                module = self._project.module(source)
        return source.written(source.code)

    def _places(self, module: Module) -> list[PlannedPlace]:
        """Return the places (uses of pmap and the like) that need new names only, with fixes."""
        if self._to in ("shard_map", "jit"):
            places = renames.places_of_rules(module, self._options.jax)
        else:
            places = renames.Renames(module, self._to, self._home).places(self._options.jax)
        if self._chosen is not None:
            places = [place for place in places if place.place.line in self._chosen]
        stay = {line for line, (form, _) in self._back.items() if form is None}
        return [place for place in places if place.place.line not in stay]
