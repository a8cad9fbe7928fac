"""Rewrite the mapped functions of a file, and what places and reads their values."""

import ast
import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist.lint.findings import Fix, Safety
from jax_dist.lint.model import functions
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import renames
from jax_dist.migrate.places import Left, PlannedPlace, Target
from jax_dist.migrate.shard_map import mappings
from jax_dist.migrate.shard_map.axis_changes import AxisChanges
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Mapped
from jax_dist.migrate.shard_map.placements import Placements
from jax_dist.migrate.shard_map.plan import Plan
from jax_dist.migrate.shard_map.steps import Steps
from jax_dist.migrate.shard_map.values import Value, Values


@dataclasses.dataclass(frozen=True, slots=True)
class Rewritten:
    """One file with its mapped functions rewritten."""

    places: list[PlannedPlace]
    fix: Fix | None
    definitions: str  # to be put below the imports
    touched: frozenset[ast.AST]  # definitions and reads of values that lose the device axis


def rewrite(
    module: Module,
    project: Project,
    target: Target,
    lines: Collection[int] | None,
    shard_map_lines: Mapping[int, str],
) -> Rewritten:
    """Return the places of a file, and the one fix that migrates those that can be.

    The target is "shard_map" or "jit". Places outside of `lines` stay (None: no place does);
    those in `shard_map_lines` do not become `jit` alone, for the reason given there ("": as the
    step shows).
    """
    plan, places = _plan(module, project, target, lines)
    if target == "jit":
        plan.find_global_steps(shard_map_lines)
    _remove_reductions(plan)
    steps, placements = Steps(plan), Placements(plan)
    for mapped in plan.mapped:
        steps.write(mapped)
        placements.write_calls(mapped)
    placements.write_values()
    writer = plan.writer
    writer.define_meshes()
    for mapped in plan.mapped:
        form = "jit" if mapped in plan.reductions else "shard_map"
        place = module, mapped.site.reference, _codes.PMAP_CALL
        remark = plan.remarks.get(mapped, "")
        places.append(PlannedPlace.locate(*place, reason=remark, form=form, is_mapped=True))
    if not writer.edits:
        return Rewritten(places, None, "", frozenset())
    imports = tuple(sorted(writer.imports, key=lambda line: (" as " in line, line)))
    fix = Fix("use jax.shard_map", Safety.UNSAFE, writer.all_edits(), imports)
    definitions = "\n\n\n".join(text.strip("\n") for text in writer.below)
    return Rewritten(places, fix, definitions, frozenset(placements.touched))


def _plan(
    module: Module, project: Project, target: Target, lines: Collection[int] | None
) -> tuple[Plan, list[PlannedPlace]]:
    """Return the plan of the functions that can be migrated, and the places of the others."""
    mapped: list[Mapped] = []
    places: list[PlannedPlace] = []
    changes = AxisChanges(module, project)

    def leave(site: Site, why: Left) -> None:
        places.append(PlannedPlace.locate(module, site.reference, _codes.PMAP_CALL, left=why))

    for site in renames.find_sites(module, target):
        line = module.source.position(module.span(site.reference)[0]).line
        if site.is_application and (lines is None or line in lines):
            try:
                mapped.append(mappings.read(module, site))
            except Left as why:
                leave(site, why)
    for fun in _find_entangled(module, mapped):
        mapped.remove(fun)
        leave(fun.site, _ENTANGLED)
    while True:  # each function that is left may be the one that updates the state of another
        values = Values(module, changes, [call for fun in mapped for call in fun.calls])
        layouts = Layouts(module, mapped, values)
        stays = _left_as_pmaps(mapped, layouts, values)
        if not stays:
            return Plan(module, mapped, values, layouts), places
        for fun in reversed(stays):
            mapped.remove(fun)
            leave(fun.site, _NOT_SEEN)


_NOT_SEEN = Left(
    "its state keeps the device axis: it is read where that is not seen",
    "Use --to vendored, or replicate the state, and read its first copy, in one function.",
)
_ENTANGLED = Left(
    "a call of it is inside of another mapped function, or may be one of another",
    "Give each mapped function a name of its own, and nest none in another.",
)


def _find_entangled(module: Module, mapped: Sequence[Mapped]) -> list[Mapped]:
    """Return the mapped functions that share a call with another, or are called inside of one."""
    owners = collections.Counter(call for fun in mapped for call in fun.calls)
    bodies = {functions.innermost(module, fun.site.fun) or fun.site.fun for fun in mapped}
    return [
        fun
        for fun in mapped
        if any(
            owners[call] > 1 or not bodies.isdisjoint(module.ancestors(call)) for call in fun.calls
        )
    ]


def _left_as_pmaps(mapped: Sequence[Mapped], layouts: Layouts, values: Values) -> list[Mapped]:
    """Return the mapped functions that stay pmaps: other code reads their state on each device.

    Not those that share a value with a function that loses the axis, or take no state; a decorator
    with static arguments stays, for without it the text grows by three functions.
    """

    def arguments(fun: Mapped) -> list[Value]:
        """Return the values that a function maps over, of all its calls."""
        positions = [p for p in range(len(fun.axes)) if fun.is_mapped(p)]
        nodes = [fun.arguments(call)[p] for call in fun.calls for p in positions]
        return [value for value in map(values.find, nodes) if value is not None]

    is_static_decorator = lambda fun: fun.static and fun.site.form != "call"
    kept = (None, Layout.SLICES)  # None: a static argument
    losing = [
        fun
        for fun in mapped
        if any(
            fun.is_mapped(position) and layouts.arguments.get((fun, position)) not in kept
            for position in range(len(fun.axes))
        )
    ]
    shared = {value for fun in losing for value in arguments(fun)}
    return [
        fun
        for fun in mapped
        if fun not in losing
        and shared.isdisjoint(arguments(fun))
        and (is_static_decorator(fun) or any(map(_is_state, arguments(fun))))
    ]


def _is_state(value: Value) -> bool:
    """Return whether a value is replicated, or returned by a mapped call that also takes it."""
    kinds = {definition.kind for definition in value.definitions}
    return bool(kinds & {"replicate", "result"}) and not kinds <= {"keys", "result"}


def _remove_reductions(plan: Plan) -> None:
    """Replace each `pmean(x, axis)` of a jitted step by `x`, and remove `x = pmean(x, axis)`."""
    module = plan.module
    gone = {call: of for edits in plan.reductions.values() for call, of in edits}
    for call, of in gone.items():
        statement: Any = module.parent(call)
        is_assigned = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        # Compared as `unparse` writes them, for `a, b = pmean((a, b), axis)`.
        if is_assigned and ast.unparse(statement.targets[0]) == ast.unparse(of):
            plan.writer.remove(statement)
        else:
            plan.writer.around(call, of)
