"""Migrate files together, to one target.

Fixes inside of other fixes wait for the next round. The last text must parse, and must read no name
before that is bound.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.engine import linter
from jax_dist.lint.model import new_imports, sources
from jax_dist.lint.model.findings import choose_fixes
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError
from jax_dist.lint.rules import Version
from jax_dist.migrate import imports, renames, review, sites, vendored
from jax_dist.migrate.names import LibraryNames, VendoredNames
from jax_dist.migrate.places import (
    Back,
    FileMigration,
    Place,
    PlannedPlace,
    Span,
    Target,
    UnsafeTextError,
    unparsed_cells,
)
from jax_dist.migrate.project_files import ProjectFiles

_Progress: TypeAlias = Callable[[int, int], None]  # files done, files in all

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"_mapped", b"replicate", b"device_put_")
_ROUNDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class MigrationOptions:
    """A target, and what limits it."""

    to: Target = "jax_dist"
    jax: Version | None = None  # the oldest jax that the code must run on; None: the newest
    lines: Mapping[str, frozenset[int]] = dataclasses.field(default_factory=dict)  # by path
    # By path and line: what a run has shown to need another form.
    back: Mapping[str, Mapping[int, Back]] = dataclasses.field(default_factory=dict)


def migrate(
    paths: Sequence[str],
    options: MigrationOptions,
    *,
    progress: _Progress = lambda done, total: None,
) -> list[FileMigration]:
    """Return the files with something to migrate and those with a problem; write nothing.

    Args:
      paths: the files. A name that one defines and another uses is migrated in both.
      options: the target.
      progress: is called with the number of files done, and of all.
    """
    files = ProjectFiles(paths)
    migrated: list[FileMigration] = []
    for number, path in enumerate(paths, start=1):
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            migrated.append(FileMigration(path, b"", b"", problem=problem))
            continue
        is_named = any(word in data for word in _WORDS)
        if not sources.looks_like_python(path, data) or is_named or _has_old_name(data):
            result = migrate_text(path, data, options, files)
            if result is not None:
                migrated.append(result)
        progress(number, len(paths))
    return [*migrated, *vendored.new_modules(migrated)]


def _has_old_name(data: bytes) -> bool:
    return bool(linter.likely(data, renames.CODES))


def migrate_text(
    path: str, data: bytes, options: MigrationOptions, files: ProjectFiles | None = None
) -> FileMigration | None:
    """Return one file migrated; None if there is nothing to do in it and nothing to report.

    An error of ours stays in its file: that is left whole, with the error as its problem.
    """
    try:
        source = linter.load(path, data)
        result = _File(source, options, files or ProjectFiles()).migrated()
    except UnreadableError as error:
        return FileMigration(path, data, data, problem=str(error))
    except ParseError as error:
        problem = f"Python cannot parse it: line {error.line}: {error.message}"
        return FileMigration(path, data, data, problem=problem)
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        problem = f"jax-dist failed on it ({type(error).__name__}: {error}); please report this"
        return FileMigration(path, data, data, problem=problem)
    return result if result.places or result.problem or result.changed else None


class _File:
    """One file while it is migrated, in rounds. Raises ParseError."""

    def __init__(self, source: Source, options: MigrationOptions, files: ProjectFiles):
        self._options, self._files = options, files
        self._first = files.project.module(source)
        self._namer: LibraryNames | VendoredNames = LibraryNames()
        self._home = vendored.home_of(self._first, files.project)
        self._back = options.back.get(source.path, {})
        # The whole file: its mapped functions share values.
        is_back = any(form == "vendored" for form, _ in self._back.values())
        self._to: Target = "vendored" if is_back else options.to
        if options.to != "jax_dist":
            self._namer = VendoredNames(self._home)
        self._chosen = options.lines.get(source.path)

    def migrated(self) -> FileMigration:
        """Return the file with its places."""
        source = self._first.source
        touched: Mapping[int, Sequence[Span]] = {}
        before = source.written(source.code)
        module, planned = self._first, []
        try:
            if self._to in ("shard_map", "jit"):
                module, planned, touched = self._mapped_again(module)
            others = self._places(module)
            places = (*(p.place for p in (*planned, *others)), *unparsed_cells(source))
            after = self._rewritten(module, others)
        except UnsafeTextError as error:
            return FileMigration(source.path, before, before, problem=str(error))
        is_vendored = isinstance(self._namer, VendoredNames) and self._namer.is_used
        needs = self._home.path if is_vendored and after != before else ""
        more: dict[str, Any] = {"needs_module": needs, "touched": touched}
        return FileMigration(source.path, before, after, _in_order(places), **more)

    def _mapped_again(
        self, module: Module
    ) -> tuple[Module, list[PlannedPlace], Mapping[int, Sequence[Span]]]:
        """Return the file with its mapped functions by jax.shard_map, their places and reads."""
        from jax_dist.migrate.shard_map.rewrite import rewrite  # only here: few runs need it

        left: set[int] = set()
        if self._chosen is not None:
            lines = {
                module.source.position(module.span(site.reference)[0]).line
                for site in sites.find(module, self._to)
            }
            left = lines - self._chosen
        lower = {line: reason for line, (_, reason) in self._back.items()}
        result = rewrite(module, self._to, left, lower)
        if result.fix is None:
            return module, result.places, {}
        try:
            source = module.source.edited(new_imports.placed(module, [result.fix]))
            if result.definitions:
                source = new_imports.with_block(source, result.definitions)
            touched = review.touched_lines(module, result.touched)
            return self._files.project.module(source), result.places, touched
        except (ParseError, ValueError) as error:
            raise UnsafeTextError(
                f"the new text would not parse ({error}); please report it"
            ) from error

    def _rewritten(self, module: Module, planned: list[PlannedPlace]) -> bytes:
        """Return the new bytes. Raises UnsafeTextError."""
        try:
            for _ in range(_ROUNDS):
                fixes = list(dict.fromkeys(place.fix for place in planned if place.fix is not None))
                if not fixes:
                    return self._finished(module)
                placed = new_imports.placed(module, choose_fixes(fixes))
                module = self._files.project.module(module.source.edited(placed))
                if self._chosen is not None:  # by lines of the first text
                    return self._finished(module)
                planned = self._places(module)
        except (ParseError, ValueError) as error:  # or cells could not be told apart any more
            raise UnsafeTextError(
                f"the new text would not parse ({error}); please report it"
            ) from error
        raise UnsafeTextError("the new text would change again each time; please report this")

    def _finished(self, module: Module) -> bytes:
        if module is self._first:
            return module.source.written(module.source.code)
        source = module.source.edited(imports.tidied(self._first, module, self._files))
        before = imports.read_too_early(self._first.tree)
        for name, line in imports.read_too_early(sources.parse(source.python)).items():
            if name not in before:
                raise UnsafeTextError(
                    f"its line {line} would read {name} before that is imported, for jax is "
                    "imported below: move the import of jax up, then migrate again"
                )
        return source.written(source.code)

    def _places(self, module: Module) -> list[PlannedPlace]:
        """Return the places whose names change, in the file as it is now."""
        to = self._to
        if to in ("shard_map", "jit"):
            places = renames.places_of_rules(module, self._options.jax)
        else:
            places = [
                renames.place_of(module, site, to, self._namer, self._files)
                for site in sites.find(module, to)
            ]
            covered = [place.span for place in places]
            places += renames.places_beside(
                module, to, self._namer, covered, self._files, self._options.jax
            )
        if self._chosen is not None:
            places = [place for place in places if place.place.line in self._chosen]
        stay = {line for line, (form, _) in self._back.items() if form is None}
        return [place for place in places if place.place.line not in stay]


def _in_order(places: Sequence[Place]) -> tuple[Place, ...]:
    return tuple(sorted(places, key=lambda place: (place.cell or 0, place.line)))
