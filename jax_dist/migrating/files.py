"""One file: every place that is migrated or left, and the new text, proved to parse and to stay."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jax_dist.checker import edits, placing, pmaps
from jax_dist.checker.findings import Fix
from jax_dist.checker.modules import Module
from jax_dist.checker.parsing import ParseError
from jax_dist.checker.project import Project
from jax_dist.checker.registry import Version
from jax_dist.checker.sources import Source
from jax_dist.migrating import (
    by_rules,
    definers,
    host_local,
    idiomatic,
    placements,
    places,
    texts,
    tidy,
    to_jax,
    to_jax_dist,
)
from jax_dist.migrating.layout import Style
from jax_dist.migrating.outcomes import FileMigration, Left, Outcome
from jax_dist.migrating.places import Place

Target: TypeAlias = Literal["jax_dist", "jax"]

_ROUNDS = 10  # a fix inside another one waits for the next round


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What is asked for."""

    to: Target = "jax_dist"
    idiomatic: bool = False  # with "jax": without the axis over devices, where the flow shows it
    several_processes: bool = True  # the program may run in several: refuse where that matters
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    among: frozenset[str] | None = None  # absolute paths of what is migrated; None: all is


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
    found = _places(module, project, options)
    outcomes = (*(place.outcome for place in found), *_unparsed_cells(source))
    code = _rewritten(module, project, options, found)
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
    module: Module, project: Project, options: Options, found: list[Place]
) -> bytes | None:
    """The new code; None where it does not come to rest."""
    first = module
    for _ in range(_ROUNDS):
        fixes = list(dict.fromkeys(place.fix for place in found if place.fix is not None))
        if not fixes:
            return tidy.tidied(first, module)
        applied, _left = edits.choose(fixes)
        try:
            code = placing.placed(module, applied)
            module = project.module(module.source.edited(code))
        except (ParseError, ValueError):  # a notebook's cells could not be told apart any more
            return None
        found = _places(module, project, options)
    return None


def _places(module: Module, project: Project, options: Options) -> list[Place]:
    style = texts.style_of(module.source.code)
    freed, kept = _freed(module, options, style)
    found: list[Place] = []
    for site in pmaps.sites(module):
        place = freed.pop(site.reference, None)
        place = place or _pmap_place(module, project, site, options, style)
        found.append(_explained(place, kept.get(site.reference, "")))
    for name, node in placements.places(module):
        call = module.parent(node)
        place = freed.pop(call, None) if isinstance(call, ast.expr) else None
        found.append(place or _placement(module, name, node, options, style))
    found += freed.values()
    covered = [place.span for place in found]
    by_rule = by_rules.places(module, options.target, to_jax=options.to == "jax")
    return found + [place for place in by_rule if not _is_covered(place.span, covered)]


def _is_covered(span: tuple[int, int], covered: list[tuple[int, int]]) -> bool:
    """Whether another place begins or lies there: `unreplicate(x)` is found twice."""
    return any(span[0] == start or (start <= span[0] and span[1] <= end) for start, end in covered)


def _freed(
    module: Module, options: Options, style: Style
) -> tuple[dict[ast.expr, Place], dict[ast.expr, str]]:
    """By node: the places that lose the axis over devices; and why other sites keep it."""
    if not options.idiomatic or options.to != "jax":
        return {}, {}
    found = idiomatic.find(module, style, several_processes=options.several_processes)
    freed = {
        change.node: places.done(module, change.node, "JXD204", change.fix, change.said)
        for change in found.changes
    }
    return freed, found.kept


def _explained(place: Place, kept: str) -> Place:
    """Says why an argument or a result keeps its axis."""
    if not kept or place.outcome.status == "left":
        return place
    said = f"{place.outcome.reason}; " if place.outcome.reason else ""
    outcome = dataclasses.replace(place.outcome, reason=f"{said}the device axis stays: {kept}")
    return dataclasses.replace(place, outcome=outcome)


def _pmap_place(
    module: Module, project: Project, site: pmaps.Site, options: Options, style: Style
) -> Place:
    try:
        if options.to == "jax_dist":
            fix = to_jax_dist.fix(module, site)
            if fix is None:
                done = _by_definition(module, project, site, options)
            else:
                done = to_jax_dist.said(module, site)
        else:
            fix, done = _to_jax(module, site, options, style), _faked(module)
    except Left as left:
        return places.left(module, site.reference, "JXD001", left)
    return places.done(module, site.reference, "JXD001", fix, done)


def _by_definition(module: Module, project: Project, site: pmaps.Site, options: Options) -> str:
    """What is said of a name that changes its meaning where it is defined. Raises Left."""
    home = definers.definer(module, project, site.reference)
    if home is None or options.among is None:
        return "the definition of this alias is migrated"
    path = os.path.relpath(home.path)
    if home.path not in options.among:
        raise Left(
            "pmap gets its meaning in a file that is not among the paths",
            f"Migrate that file too: jax-dist migrate {module.source.path} {path}",
            path,
        )
    if home.only_imports:
        raise Left(
            "pmap comes from a file that imports it for others and does not use it",
            f"Write `from jax_dist import pmap` in {path}.",
            path,
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
            f"in several; or make the arrays global by hand.\n{_GLOBAL_ARRAYS}",
            f"{seen[0]} in line {seen[1]}",
        )
    return to_jax.fix(module, site, style)


def _faked(module: Module) -> str:
    """What is said where the file has jax.pmap replaced while it runs."""
    fakes = [name for name in module.used_names("chex") if _FAKE in name]
    return f"{fakes[0]}, which this file uses, no longer replaces it" if fakes else ""


def _placement(module: Module, name: str, node: ast.expr, options: Options, style: Style) -> Place:
    code = placements.CODES[name]
    try:
        if options.to == "jax_dist":
            fix = placements.to_jax_dist(module, name, node)
        else:
            fix = placements.to_jax(module, name, node, style)
    except Left as left:
        return places.left(module, node, code, left)
    return places.done(module, node, code, fix)


_FAKE = ".fake_pmap"

_GLOBAL_ARRAYS = """\
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
batch = jax.make_array_from_process_local_data(sharding, local_batch)  # before the call
own = [shard.data for shard in result.addressable_shards]  # after it"""
