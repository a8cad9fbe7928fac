"""Rewrite the mapped functions of a file, and what places and reads their arrays."""

import ast
import collections
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax_dist import _codes
from jax_dist.lint.findings import Fix, Safety
from jax_dist.lint.model import functions, pmaps
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import renames
from jax_dist.migrate.places import CannotMigrate, Place, PlannedPlace, Target
from jax_dist.migrate.shard_map import global_steps, mappings
from jax_dist.migrate.shard_map.axis_changes import AxisChanges
from jax_dist.migrate.shard_map.function_writer import FunctionWriter
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Pmapped
from jax_dist.migrate.shard_map.placements import Placements
from jax_dist.migrate.shard_map.plan import MigrationPlan
from jax_dist.migrate.shard_map.text import Writer
from jax_dist.migrate.shard_map.variables import Variable, Variables


@dataclasses.dataclass(frozen=True, slots=True)
class RewrittenFile:
    """One file with its mapped functions rewritten."""

    places: list[PlannedPlace]
    fix: Fix | None
    definitions: str  # to be put below the imports
    touched: frozenset[ast.AST]  # definitions and reads of variables that lose the device axis


def rewrite(
    module: Module,
    project: Project,
    target: Target,
    lines: Collection[int] | None,
    shard_map_lines: Mapping[int, str],
) -> RewrittenFile:
    """Return the places of pmap in a file, and the one fix that migrates those that can be.

    For the target "shard_map", `pmap(step)` becomes `jit(shard_map(step))`; for "jit", a plain
    `jit(step)` where that can be. Places outside of `lines` stay (None: all are migrated).
    `shard_map_lines`: those that a run has shown to need shard_map, each with the reason, if known.
    """
    plan, places = _make_plan(module, project, target, lines)
    if not plan.mapped_functions:
        return RewrittenFile(places, None, "", frozenset())
    if target == "jit":
        plan.choose_jits(shard_map_lines)
    _write_edits(plan)  # the first time, it finds which shardings are worth a variable
    placements, writer = _write_edits(plan), plan.writer
    for mapped in plan.mapped_functions:
        form = "jit" if mapped in plan.plain_jits else "shard_map"
        reference, reason = mapped.site.reference, plan.remarks.get(mapped, "")
        fields = {"reason": reason, "form": form, "is_mapped": True}
        places.append(PlannedPlace(Place.make(module, reference, _codes.PMAP_CALL, **fields)))
    imports = tuple(sorted(writer.imports, key=lambda line: (" as " in line, line)))
    fix = Fix("use jax.shard_map", Safety.UNSAFE, writer.all_edits(), imports)
    definitions = "\n\n\n".join(text.strip("\n") for text in writer.helpers)
    touched = frozenset(placements.touched | _find_batch_reads(plan))
    return RewrittenFile(places, fix, definitions, touched)


def _write_edits(plan: MigrationPlan) -> Placements:
    """Write all edits of a plan with a new writer."""
    plan.writer = Writer(plan.module)
    _drop_axis_uses(plan)  # `pmean(x, axis)` of a plain jit becomes `x`
    function_writer, placements = FunctionWriter(plan), Placements(plan)
    for mapped in plan.mapped_functions:
        function_writer.write(mapped)  # the call or decorator of pmap
        placements.put_shared_states(mapped)
    placements.edit_variables()  # `state = replicate(state)`, and what reads it
    # Calls such as `step(state, batch)`: those inside of others first, as these end before them.
    for call in sorted(plan.mapped_by_call, key=lambda call: plan.module.span(call)[1]):
        placements.edit_call(plan.mapped_by_call[call], call)
    placements.edit_split_iterators()  # `map(shard, dataset)`
    plan.writer.define_meshes()
    return placements


def _find_batch_reads(plan: MigrationPlan) -> set[ast.AST]:
    """Return the reads of parameters in plain jits: these get the whole batch, not a device's."""
    return {
        node
        for mapped in plan.plain_jits
        for node in global_steps.nodes_of(plan.module, mapped)
        if isinstance(node, ast.Name) and node.id in mapped.parameters
    }


def _make_plan(
    module: Module, project: Project, target: Target, lines: Collection[int] | None
) -> tuple[MigrationPlan, list[PlannedPlace]]:
    """Return the plan of the functions that can be migrated, and the places of the others."""
    mapped_functions: list[Pmapped] = []
    left: list[PlannedPlace] = []
    for site in pmaps.sites(module, renames.replaced_names(module, "pmap", target)):
        line = module.source.position(module.span(site.reference)[0]).line
        if site.is_application and (lines is None or line in lines):
            try:
                mapped_functions.append(mappings.read_mapped_function(module, site))
            except CannotMigrate as error:
                left.append(PlannedPlace.leave(module, site.reference, error))

    def leave(functions: Sequence[Pmapped], error: CannotMigrate) -> None:
        """Leave these functions as pmaps, for the reason of the error."""
        for mapped in functions:
            mapped_functions.remove(mapped)
            left.append(PlannedPlace.leave(module, mapped.site.reference, error))

    leave(_find_sharing_calls(module, mapped_functions), _SHARED_CALLS_ERROR)
    changes = AxisChanges(module, project)
    while True:  # each function that is left may be the one that updates the state of another
        calls = [call for mapped in mapped_functions for call in mapped.calls]
        variables = Variables(module, changes, calls)
        layouts = Layouts(module, mapped_functions, variables)
        unchanged = _find_unchanged(mapped_functions, layouts, variables)
        if not unchanged:
            return MigrationPlan(module, mapped_functions, variables, layouts), left
        leave(unchanged, _STACKED_STATE_ERROR)


_STACKED_STATE_ERROR = CannotMigrate(
    "its state keeps the device axis: it is read where that is not seen",
    "Use --to vendored, or replicate the state, and read its first copy, in one function.",
)
_SHARED_CALLS_ERROR = CannotMigrate(
    "a call of it is inside of another mapped function, or may be one of another",
    "Give each mapped function a name of its own, and nest none in another.",
)


def _find_sharing_calls(module: Module, mapped_functions: Sequence[Pmapped]) -> list[Pmapped]:
    """Return the mapped functions that share a call with another, or are called inside of one."""
    owner_counts = collections.Counter(call for x in mapped_functions for call in x.calls)
    bodies = {functions.innermost(module, x.site.fun) or x.site.fun for x in mapped_functions}
    is_shared = lambda call: owner_counts[call] > 1 or not bodies.isdisjoint(module.ancestors(call))
    return [mapped for mapped in mapped_functions if any(map(is_shared, mapped.calls))]


def _find_unchanged(
    mapped_functions: Sequence[Pmapped], layouts: Layouts, variables: Variables
) -> list[Pmapped]:
    """Return the functions to leave as pmaps: all arrays that they map over would stay stacked."""
    # For a state, `[devices, ...]` as before, nothing is gained. Functions without one are migrated
    # all the same, except decorators with static arguments, for which the new code is long.
    unstacking = {
        mapped
        for (mapped, position), layout in layouts.arguments.items()
        if mapped.is_mapped(position) and layout is not Layout.STACKED
    }
    variables_of: dict[Pmapped, set[Variable]] = {}  # those in the arguments of its calls
    for mapped in mapped_functions:
        nodes = [node for call in mapped.calls for node in mapped.mapped_arguments(call)]
        variables_of[mapped] = {*filter(None, map(variables.find, nodes))}
    shared = {variable for mapped in unstacking for variable in variables_of[mapped]}
    unchanged: list[Pmapped] = []
    for mapped in mapped_functions:
        has_state = any(map(_is_state, variables_of[mapped]))
        is_static_decorator = bool(mapped.static_argnums) and mapped.site.form != "call"
        is_changed = mapped in unstacking or not shared.isdisjoint(variables_of[mapped])
        if not is_changed and (has_state or is_static_decorator):
            unchanged.append(mapped)
    return unchanged


def _is_state(variable: Variable) -> bool:
    """Return whether a variable is replicated, or returned by a mapped call that also takes it."""
    kinds = variable.kinds()
    return bool(kinds & {"replicate", "result"}) and not kinds <= {"keys", "result"}


def _drop_axis_uses(plan: MigrationPlan) -> None:
    """Edit `pmean(x, axis)` and the like of jitted steps to `x`; remove `x = pmean(x, axis)`."""
    for uses in plan.plain_jits.values():
        for keyword in uses.keywords:
            plan.writer.edits += renames.remove_argument(plan.module, keyword)
        for call, operand in uses.operands.items():
            statement = plan.module.parent(call)
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            # Compared as `unparse` writes them, for `a, b = pmean((a, b), axis)`.
            if [*map(ast.unparse, targets)] == [ast.unparse(operand)]:
                plan.writer.remove_comment_above(statement)
                plan.writer.remove(statement)
            else:
                plan.writer.replace_around(call, operand)
