"""One file: every place that is migrated or left, and the new text, proved to parse and to stay."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jax_dist.checker import edits, linter, placing, pmaps
from jax_dist.checker.findings import Code, Fix, Safety
from jax_dist.checker.modules import Module, ParseError
from jax_dist.checker.project import Project
from jax_dist.checker.registry import Version
from jax_dist.checker.sources import Source
from jax_dist.migrating import (
    definers,
    host_local,
    idiomatic,
    placements,
    texts,
    tidy,
    to_jax,
    to_jax_dist,
)
from jax_dist.migrating.layout import Style
from jax_dist.migrating.outcomes import FileMigration, Left, Outcome, Status

Target: TypeAlias = Literal["jax_dist", "jax"]

_ROUNDS = 10  # a fix inside another one waits for the next round
# Rules whose own fixes are part of a migration; unsafe ones too, where the target is plain JAX.
RENAMES: tuple[Code, ...] = (
    "JXD103",
    "JXD104",
    "JXD105",
    "JXD106",
    "JXD107",
    "JXD108",
    "JXD207",
)
_ALSO_UNSAFE: tuple[Code, ...] = ("JXD301", "JXD302")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is asked for."""

    to: Target = "jax_dist"
    idiomatic: bool = False  # with "jax": without the axis over devices, where the flow shows it
    several_processes: bool = True  # the program may run in several: refuse where that matters
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    among: frozenset[str] | None = None  # absolute paths of what is migrated; None: all is


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    outcome: Outcome
    fix: Fix | None = None


def migrate(source: Source, project: Project, options: Options) -> FileMigration:
    """Migrates one file.

    Args:
      source: the file.
      project: looks up what other files define.
      options: the target.

    Returns:
      The file before and after; nothing is written.
    """
    before = source.written(source.code)
    try:
        module = project.module(source)
    except ParseError as error:
        problem = f"Python cannot parse it: line {error.line}: {error.message}"
        return FileMigration(source.path, before, before, (), problem)
    places = _places(module, project, options)
    outcomes = (*(place.outcome for place in places), *_unparsed_cells(source))
    code = _rewritten(module, project, options, places)
    if code is None:
        problem = "the new text would not parse, or would not stay as it is; please report this"
        return FileMigration(source.path, before, before, (), problem)
    return FileMigration(source.path, before, source.written(code), outcomes)


def _unparsed_cells(source: Source) -> Iterator[Outcome]:
    """Cells of a notebook that Python cannot parse; the others are migrated."""
    for cell in getattr(source, "unparsed", ()):
        offset = source.line_starts[min(cell.line, len(source.line_starts)) - 1]
        place = source.position(offset)
        what = source.line_text(offset).strip()
        reason = "Python cannot parse the cell"
        yield Outcome(
            source.path, place.line, place.cell, "JXD901", "left", what, reason, "", cell.message
        )


def _rewritten(
    module: Module, project: Project, options: Options, places: list[_Place]
) -> bytes | None:
    """The new code; None where it does not come to rest."""
    first = module
    for _ in range(_ROUNDS):
        fixes = list(dict.fromkeys(place.fix for place in places if place.fix is not None))
        if not fixes:
            return tidy.tidied(first, module)
        applied, _left = edits.choose(fixes)
        code = placing.placed(module, applied)
        try:
            module = project.module(module.source.edited(code))
        except (ParseError, ValueError):  # a notebook's cells could not be told apart any more
            return None
        places = _places(module, project, options)
    return None


def _places(module: Module, project: Project, options: Options) -> list[_Place]:
    style = texts.style_of(module.source.code)
    freed, kept = _freed(module, options, style)
    found: list[_Place] = []
    for site in pmaps.sites(module):
        place = freed.pop(site.reference, None)
        place = place or _pmap_place(module, project, site, options, style)
        found.append(_explained(place, kept.get(site.reference, "")))
    for name, node in placements.places(module):
        call = module.parent(node)
        place = freed.pop(call, None) if isinstance(call, ast.expr) else None
        found.append(place or _placement(module, name, node, options, style))
    return [*found, *freed.values(), *_renames(module, options)]


def _freed(
    module: Module, options: Options, style: Style
) -> tuple[dict[ast.expr, _Place], dict[ast.expr, str]]:
    """By node: the places that lose the axis over devices; and why other sites keep it."""
    if not options.idiomatic or options.to != "jax":
        return {}, {}
    found = idiomatic.find(module, style, several_processes=options.several_processes)
    places = {
        change.node: _Place(
            _outcome(module, change.node, "JXD204", "done", change.said), change.fix
        )
        for change in found.changes
    }
    return places, found.kept


def _explained(place: _Place, kept: str) -> _Place:
    """Says why an argument or a result keeps its axis."""
    if not kept or place.outcome.status == "left":
        return place
    said = f"{place.outcome.reason}; " if place.outcome.reason else ""
    outcome = dataclasses.replace(place.outcome, reason=f"{said}the device axis stays: {kept}")
    return dataclasses.replace(place, outcome=outcome)


def _pmap_place(
    module: Module, project: Project, site: pmaps.Site, options: Options, style: Style
) -> _Place:
    try:
        if options.to == "jax_dist":
            fix = to_jax_dist.fix(module, site)
            done = "" if fix else _by_definition(module, project, site, options)
        else:
            fix, done = _to_jax(module, site, options, style), ""
    except Left as left:
        return _Place(_left(module, site.reference, "JXD001", left))
    return _Place(_outcome(module, site.reference, "JXD001", "done", done), fix)


def _by_definition(module: Module, project: Project, site: pmaps.Site, options: Options) -> str:
    """What is said of a name that changes its meaning where it is defined. Raises Left."""
    home = definers.definer(module, project, site.reference)
    if home is not None and options.among is not None and home not in options.among:
        raise Left(
            "pmap gets its meaning in a file that is not among the paths",
            f"Migrate that file too: jax-dist migrate {module.source.path} {os.path.relpath(home)}",
            os.path.relpath(home),
        )
    return "the definition of this alias is migrated"


def _to_jax(module: Module, site: pmaps.Site, options: Options, style: Style) -> Fix:
    if site.form in ("alias", "partial alias"):
        raise Left(
            "only the name is given here; what is applied under it is migrated where it stands",
            "Delete the alias once nothing uses it.",
        )
    seen = host_local.evidence(module, site.node) if options.several_processes else None
    if seen is not None:
        raise Left(
            "with several processes pmap takes what each process holds, and jit(shard_map) takes "
            "global arrays",
            "Use --to jax_dist, which keeps that view, or --one-process if the program never runs "
            "in several.",
            f"{seen[0]} in line {seen[1]}",
        )
    return to_jax.fix(module, site, style)


def _placement(module: Module, name: str, node: ast.expr, options: Options, style: Style) -> _Place:
    code = placements.CODES[name]
    try:
        if options.to == "jax_dist":
            fix = placements.to_jax_dist(module, name, node)
        else:
            fix = placements.to_jax(module, name, node, style)
    except Left as left:
        return _Place(_left(module, node, code, left))
    return _Place(_outcome(module, node, code, "done"), fix)


def _renames(module: Module, options: Options) -> list[_Place]:
    codes = RENAMES + (_ALSO_UNSAFE if options.to == "jax" else ())
    found: list[_Place] = []
    for finding in linter.check_module(module, frozenset(codes), options.target):
        fix = finding.fix
        if fix is not None and not _is_wanted(fix, finding.code):
            fix = None
        status = "left" if fix is None else "done"
        reason = finding.message
        by_hand = "" if fix is not None or finding.fix is None else finding.fix.title
        outcome = Outcome(
            module.source.path,
            finding.start.line,
            finding.start.cell,
            finding.code,
            status,
            finding.line_text.strip(),
            reason,
            by_hand,
        )
        found.append(_Place(outcome, fix))
    return found


def _is_wanted(fix: Fix, code: Code) -> bool:
    return fix.safety is Safety.SAFE or (fix.safety is Safety.UNSAFE and code in _ALSO_UNSAFE)


def _left(module: Module, node: ast.expr, code: Code, left: Left) -> Outcome:
    outcome = _outcome(module, node, code, "left", left.reason)
    return dataclasses.replace(outcome, by_hand=left.by_hand, detail=left.detail)


def _outcome(
    module: Module, node: ast.expr, code: Code, status: Status, reason: str = ""
) -> Outcome:
    start = module.source.position(module.span(node)[0])
    what = module.text(node)
    return Outcome(module.source.path, start.line, start.cell, code, status, what, reason)
