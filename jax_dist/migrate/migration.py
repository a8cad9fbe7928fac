"""Files that are migrated together, and the helper modules that they need.

Every place of a file is migrated or left. A fix inside of another one waits for the next round; the
last text is proved to parse, and to read no name before that is bound.
"""

import ast
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from jax_dist import _codes
from jax_dist.lint.engine import linter
from jax_dist.lint.engine.linter import load
from jax_dist.lint.model import new_imports, pmaps, sources
from jax_dist.lint.model.findings import Fix, choose_fixes
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError
from jax_dist.lint.rules import Version
from jax_dist.migrate import (
    helper_files,
    helper_module,
    imports,
    named_calls,
    pmap_renames,
    site_parts,
)
from jax_dist.migrate.codegen import HelperNames, LibraryNames, Namer, Style, Texts
from jax_dist.migrate.pmap_facts import PmapFacts, Promises
from jax_dist.migrate.results import (
    AXIS_STAYS,
    UNPROVED,
    FileMigration,
    Form,
    Helpers,
    Left,
    PlannedPlace,
    ProjectContext,
    RefusedError,
    moved_limits,
    unparsed_cells,
)
from jax_dist.migrate.shard_map import DirectPlan

if TYPE_CHECKING:
    from jax_dist.migrate.recorded_flow import FileFlow, RecordedFlow

Target: TypeAlias = Literal["jax_dist", "jax", "global"]
_Progress: TypeAlias = Callable[[int, int], None]  # files done, files in all

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"replicate", b"device_put_")
_ROUNDS = 10
_BY_DEFINITION = "the definition of this alias is migrated"


@dataclasses.dataclass(frozen=True, slots=True)
class MigrationOptions:
    """What is asked for."""

    to: Target = "jax_dist"
    # The plainest form, where the text, a promise or a run shows that it holds.
    plainest: Form = Form.DIRECT
    slow_idioms: bool = False  # go too
    full_helpers: bool = False  # with "jax": `mapped` keeps the whole contract of jax.pmap
    promises: Promises = Promises()
    is_tried: bool = False  # a run of the program will show what the text leaves open
    flow: "RecordedFlow | None" = None  # which values carry the device axis, as a run has shown it
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    # The plainest forms that were not shown to fail, by path and line; line 0: the whole file.
    limits: Mapping[tuple[str, int], Form] = dataclasses.field(default_factory=dict)


def migrate(
    paths: Sequence[str],
    options: MigrationOptions,
    *,
    helpers: str = "",
    progress: _Progress = lambda done, total: None,
) -> tuple[list[FileMigration], ProjectContext]:
    """Migrates files together; nothing is written.

    Args:
      paths: the files. A name that one of them defines and another uses is migrated in both.
      options: what is asked for.
      helpers: the path of the module for all helpers; "" where each package has its own.
      progress: is told how far it is.

    Returns:
      The files with something to migrate, and those that could not be read, in the order given;
      then the helper modules. And the projects, for what a report says of them.
    """
    among = {os.path.abspath(path): path for path in paths}
    project = Project(tuple(paths))
    context = ProjectContext(project, helpers, among)
    held: dict[str, bytes] = {}
    found: dict[str, FileMigration] = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            problem = f"it cannot be read: {error.strerror or error}"
            found[path] = FileMigration(path, b"", b"", problem=problem)
        else:
            is_read = sources.looks_like_python(path, data)  # else it has no words, and a problem
            is_named = any(word in data for word in _WORDS)
            if not is_read or is_named or linter.wanted(data, pmap_renames.CODES):
                held[path] = data
    done = len(paths) - len(held)
    # Files outside of a package may import the module that those within it have asked for.
    inside = {path for path in held if context.homes.is_in_package(path)}
    for path in sorted(held, key=lambda path: path not in inside):
        migrated = of_text(path, held[path], context, options)
        if migrated is not None:
            found[path] = migrated
            if migrated.helpers is not None and path in inside:
                context.homes.migrated.add(migrated.helpers.path)
        done += 1
        progress(done, len(paths))
    made = [found[path] for path in paths if path in found]
    return helper_files.with_modules(made), context


def of_text(
    path: str, data: bytes, context: ProjectContext, options: MigrationOptions
) -> FileMigration | None:
    """One file; None where there is nothing to do in it, and nothing to say of it.

    A fault of ours stays in its file: that is left whole, and says so.
    """
    try:
        found = of_source(load(path, data), context, options)
    except UnreadableError as error:
        return FileMigration(path, data, data, problem=str(error))
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        problem = f"jax-dist failed on it ({type(error).__name__}: {error}); please report this"
        return FileMigration(path, data, data, problem=problem)
    return found if found.outcomes or found.problem or found.changed else None


# --- one file


def of_source(source: Source, context: ProjectContext, options: MigrationOptions) -> FileMigration:
    """Migrates one file, judged with its project; nothing is written."""
    before = source.written(source.code)
    try:
        module = context.project.module(source)
    except ParseError as error:
        problem = f"Python cannot parse it: line {error.line}: {error.message}"
        return FileMigration(source.path, before, before, (), problem)
    file = _File(module, context, options)
    found = file.places(module)
    outcomes = (*(place.outcome for place in found), *unparsed_cells(source))
    try:
        after = file.rewritten(found)
    except RefusedError as error:
        return FileMigration(source.path, before, before, (), str(error))
    except Left as left:
        return FileMigration(source.path, before, before, outcomes).left_whole(left)
    return FileMigration(source.path, before, after, outcomes, helpers=file.helpers)


class _File:
    """One file while it is migrated, in rounds."""

    def __init__(self, module: Module, context: ProjectContext, options: MigrationOptions):
        self._first, self._context, self._options = module, context, options
        self._style = Style.of(module.source.code)
        self._helpers = HelperNames(context.homes.of(module)) if options.to == "jax" else None
        if self._helpers is not None and options.full_helpers:
            self._helpers.needs(frozenset(("full",)))
        self._namer: Namer = self._helpers or LibraryNames()
        self.helpers: Helpers | None = None  # what the new text imports from a helper module
        own = module.source.path
        self._limits = {line: form for (path, line), form in options.limits.items() if path == own}
        self._unfit: set[int] = set()  # lines of places that are no `jit(shard_map)`

    def rewritten(self, found: list[PlannedPlace]) -> bytes:
        """The new bytes of the file. Raises RefusedError."""
        module = self._first
        try:
            for _ in range(_ROUNDS):
                fixes = list(dict.fromkeys(place.fix for place in found if place.fix is not None))
                if not fixes:
                    return self._finished(module)
                applied = choose_fixes(fixes)
                source = module.source.edited(new_imports.placed(module, applied))
                # A run has shown the text before the first round: what it says holds in all.
                limits = dict.fromkeys(self._unfit, Form.MAPPED) | self._limits
                self._limits, self._unfit = moved_limits(limits, module.source, source), set()
                module = self._context.project.module(source)
                found = self.places(module)
        except (ParseError, ValueError) as error:  # or cells could not be told apart any more
            raise RefusedError(
                f"the new text would not parse ({error}); please report it"
            ) from error
        raise RefusedError("the new text would change again each time; please report this")

    def _finished(self, module: Module) -> bytes:
        source = module.source
        if module is self._first:
            return source.written(source.code)
        needed: Collection[str] = ()
        if self._helpers is not None and self._helpers.home.is_inside:
            needed = helper_module.bound_names(self._helpers.used)
        source = source.edited(imports.tidied(self._first, module, needed))
        if self._helpers is not None:
            module, is_full = self._context.project.module(source), self._options.full_helpers
            unit = self._style.unit
            source, self.helpers = helper_files.placed(module, self._helpers, unit, full=is_full)
        # What is read while the file is imported must be bound above, as it was.
        before = imports.read_too_early(self._first.tree)
        for name, line in imports.read_too_early(sources.parse(source.python)).items():
            if name not in before:
                raise RefusedError(
                    f"its line {line} would read {name} before that is imported, for jax is "
                    "imported below: move the import of jax up, then migrate again"
                )
        return source.written(source.code)

    # --- places

    def places(self, module: Module) -> list[PlannedPlace]:
        """What becomes of each place of the file, as it is now."""
        facts = None
        flow = None if self._options.flow is None else self._options.flow.of(module)
        if self._options.to != "jax_dist":
            given, is_tried = self._options.promises, self._options.is_tried
            facts = PmapFacts(module, self._context, given, is_tried=is_tried, flow=flow)
        if facts is not None and self._options.to == "global":
            # Only here: most runs do not need it.
            from jax_dist.migrate.device_axis import global_state

            is_left = lambda old: self._limit_of(old.line, old.what) is Form.LEFT
            found = global_state.find(module, self._style, self._namer, facts, flow, is_left)
        else:
            found = self._of_pmaps(module, facts, flow)
        return [self._without_unproved(each) for each in found]

    def _of_pmaps(
        self, module: Module, facts: PmapFacts | None, flow: "FileFlow | None"
    ) -> list[PlannedPlace]:
        freed: dict[ast.expr, PlannedPlace] = {}
        kept: dict[ast.expr, str] = {}  # by the reference of a site: why its axis stays
        is_wanted = self._options.plainest is Form.IDIOMATIC
        if facts is not None and flow is not None and is_wanted:
            # Only here: most runs do not need it.
            from jax_dist.migrate.device_axis import idiomatic

            stay = {
                site
                for site in pmaps.sites(module)
                if self._limit(module, site.reference) < Form.IDIOMATIC
            }
            freed, kept = idiomatic.find(module, self._style, self._namer, facts, flow, stay)
        found: list[PlannedPlace] = []
        for site in pmaps.sites(module):
            place = freed.pop(site.reference, None) or self._of_pmap(module, site, facts)
            if facts is not None and place.outcome.form is Form.DIRECT:
                named = facts.named_calls(site)
                texts = (Texts(module, e, self._style, self._namer) for e in named.calls)
                found += [named_calls.place(e, named.group, Form.DIRECT) for e in texts]
            why = kept.get(site.reference)
            if why and place.outcome.status == "done":
                said = f"{place.outcome.reason}; " if place.outcome.reason else ""
                said += f"{AXIS_STAYS}: {why}"
                outcome = dataclasses.replace(place.outcome, reason=said)
                place = dataclasses.replace(place, outcome=outcome)
            found.append(place)
        return found + pmap_renames.places_beside(
            module,
            self._namer,
            found,
            freed,
            self._options.target,
            to_library=self._options.to == "jax_dist",
            slow_idioms=self._options.slow_idioms,
        )

    def _without_unproved(self, place: PlannedPlace) -> PlannedPlace:
        """The place, left as it is where it was not proved."""
        old = place.outcome
        # Lines of a cell are its own; a notebook goes back as one.
        at = (0, "") if old.cell is not None else (old.line, old.what)
        if self._limit_of(*at) is not Form.LEFT or old.status == "left":
            return place
        outcome = dataclasses.replace(
            old,
            status="left",
            reason=UNPROVED,
            by_hand="Read what --verify says of the places beside it.",
        )
        return PlannedPlace(outcome, place.span)

    def _limit_of(self, line: int, what: str) -> Form:
        """The plainest form that a place may have."""
        lines = (0, *range(line, line + what.count("\n") + 1))
        found = (self._limits[each] for each in lines if each in self._limits)
        return min(found, default=self._options.plainest)

    def _limit(self, module: Module, node: ast.expr) -> Form:
        line = module.source.position(module.span(node)[0]).line
        return self._limit_of(line, module.text(node))

    def _stays(self, module: Module, site: pmaps.Site) -> bool:
        """Whether a site keeps its meaning, whatever becomes of the name that it goes by."""
        unproved = self._limit(module, site.reference) is Form.LEFT
        return unproved or self._identity(module, site) is not None

    def _serves_what_stays(self, module: Module, site: pmaps.Site) -> bool:
        """Whether a name is defined here by which a site goes that was not proved."""
        names = _names_set(module, site)
        sites = pmaps.sites(module) if self._limits and names else ()
        named = (each for each in sites if getattr(each.reference, "id", "") in names)
        return any(self._stays(module, each) for each in named)

    def _of_pmap(self, module: Module, site: pmaps.Site, facts: PmapFacts | None) -> PlannedPlace:
        defined_at = None
        try:
            self._check(module, site)
            if (direct := self._direct(module, site, facts)) is not None:
                return direct
            if self._options.to == "jax":
                self._context.check_specs(module)
            if (kept := self._identity(module, site)) is not None:
                raise kept
            if self._serves_what_stays(module, site):
                raise Left("it defines a name that stays as it was at one of its uses")
            fix = self._renamed(module, site, facts)
            if fix is None:
                said, defined_at = _BY_DEFINITION, self._alias(module, site)
                if self._keeps_its_name(module, site, defined_at):
                    said, fix = "", pmap_renames.written_out(module, site, self._namer, facts)
            else:
                said = pmap_renames.said(module, site)
                why = "" if facts is None else facts.unknown(site)
                if why and not said and self._options.promises != Promises():
                    said = f"not jit(shard_map): {why}"
        except Left as left:
            return PlannedPlace.left(module, site.reference, _codes.PMAP_CALL, left)
        place = module, site.reference, _codes.PMAP_CALL
        return PlannedPlace.done(*place, fix, said, defined_at=None if fix else defined_at)

    def _renamed(self, module: Module, site: pmaps.Site, facts: PmapFacts | None) -> Fix | None:
        """Another function in the place of pmap, which can do what the place needs. Raises Left."""
        stays = lambda other: self._stays(module, other)
        if self._helpers is None or facts is None:
            return pmap_renames.fix(module, site, self._namer, stays)
        # The kernel of a notebook is one process.
        several = facts.several_processes and not module.source.path.endswith(".ipynb")
        used = set(self._helpers.used)
        again = bool(facts.state_of(site))
        parts = site_parts.needed(module, site, several_processes=several, again=again)
        self._helpers.needs(parts)
        try:
            return pmap_renames.fix(module, site, self._namer, stays)
        except Left:
            self._helpers.used = used
            raise

    def _check(self, module: Module, site: pmaps.Site) -> None:
        """Raises Left where no other function can take its place."""
        if any(isinstance(each, ast.JoinedStr) for each in module.ancestors(site.reference)):
            raise Left(
                "pmap stands inside of an f-string",
                "Take it out of the string, then migrate again.",
            )
        is_mapped = self._options.to == "jax"  # a jax_dist.pmap says of itself what it is
        pmap_renames.check_not_replaced(module, "jax.pmap", by_chex=is_mapped)
        if is_mapped:
            self._context.check_observers(module)

    def _direct(
        self, module: Module, site: pmaps.Site, facts: PmapFacts | None
    ) -> PlannedPlace | None:
        """`jit(shard_map)`, where all that it takes is known."""
        limit = self._limit(module, site.reference)
        if facts is None or limit < Form.DIRECT:
            return None
        if facts.unknown(site):
            self._unfit.add(module.source.position(module.span(site.reference)[0]).line)
            return None
        new = Texts(module, site.node, self._style, self._namer)
        try:
            fix = DirectPlan.of(site, new, facts).fix(facts.named_calls(site).group)
        except Left:
            return None
        place = module, site.reference, _codes.PMAP_CALL
        return PlannedPlace.done(*place, fix, form=Form.DIRECT, is_mapped=True)

    def _identity(self, module: Module, site: pmaps.Site) -> Left | None:
        """Why a function keeps its identity: it may meet `f is jax.pmap`."""
        if site.form not in ("value", "alias"):
            return None
        found = self._context.comparison(module)
        if found is not None:
            return Left(
                "pmap goes on as a value, and a comparison with jax.pmap may meet it",
                "Rename it in all such places by hand.",
                f"{os.path.relpath(found.path)}:{found.line}",
            )
        twin = self._context.twin(module) if site.form == "value" else None
        if twin is not None:
            path = os.path.relpath(twin.path)
            return Left(
                "pmap goes on as a value here and in a file that is not among the paths, so that "
                "the two may meet",
                f"Migrate that file too: jax-dist migrate {module.source.path} {path}",
                f"{path}:{twin.line}",
            )
        return None

    def _keeps_its_name(
        self, module: Module, site: pmaps.Site, defined_at: tuple[str, int] | None
    ) -> bool:
        """Whether the name that a site goes by stays as it is where it is defined."""
        if defined_at is not None:
            return self._options.limits.get(defined_at) is Form.LEFT
        name = getattr(site.reference, "id", "")
        return any(
            name in _names_set(module, each)
            and (self._stays(module, each) or self._serves_what_stays(module, each))
            for each in pmaps.sites(module)
        )

    def _alias(self, module: Module, site: pmaps.Site) -> tuple[str, int] | None:
        """Where another file defines the name that a site goes by. Raises Left."""
        home = imports.definer(module, self._context.project, site.reference)
        among = self._context.among
        if home is None or among is None:
            return None
        if home not in among:
            path = os.path.relpath(home)
            raise Left(
                "pmap gets its meaning in a file that is not among the paths",
                f"Migrate that file too: jax-dist migrate {module.source.path} {path}",
                path,
            )
        return among[home], imports.line_of_alias(home, self._context.project, site.reference)


def _names_set(module: Module, site: pmaps.Site) -> set[str]:
    """The names that the statement of a site gives a value."""
    statement = module.statement(site.reference)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return {each.id for each in targets if isinstance(each, ast.Name)}
