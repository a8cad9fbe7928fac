"""Mapped functions without the axis over devices: what an expert would write."""

import ast
import dataclasses

from jax_dist.checker import pmaps
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.pmaps import Site
from jax_dist.checker.stacking import Kind
from jax_dist.migrating import emitted, host_local, lives, plans, to_jax, unwrapping
from jax_dist.migrating.following import First
from jax_dist.migrating.layout import Style
from jax_dist.migrating.layouts import Layouts
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.plans import Plan
from jax_dist.migrating.slots import Argument, Component, Layout, Slot
from jax_dist.migrating.texts import Texts


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One place that loses the axis."""

    node: ast.expr
    fix: Fix
    said: str  # what became of it


@dataclasses.dataclass(frozen=True, slots=True)
class Idiomatic:
    """All that one file can be freed of, and why the rest stays."""

    changes: tuple[Change, ...]
    kept: dict[ast.expr, str]  # by the node of the site

    def by_node(self) -> dict[ast.expr, Change]:
        return {change.node: change for change in self.changes}


def find(module: Module, style: Style, *, several_processes: bool) -> Idiomatic:
    """The places of a file that can do without the axis over devices.

    Args:
      module: the file.
      style: how it is written.
      several_processes: whether the program may run in several.
    """
    sites = [site for site in pmaps.sites(module) if _may_change(module, site, several_processes)]
    if not sites:
        return Idiomatic((), {})
    layouts = Layouts(module, sites)
    groups = _groups(layouts, sites)
    while (changes := _site_changes(module, layouts, sites, groups, style)) is None:
        groups = _groups(layouts, sites)
    kept = {site.reference: _why_kept(layouts, site) for site in sites}
    return Idiomatic(_with_places(module, layouts, sites, changes, groups, style), kept)


def _why_kept(layouts: Layouts, site: Site) -> str:
    parts = _parts(layouts, site)
    return "; ".join(dict.fromkeys(part.kept for part in parts if part.kept))


def _groups(layouts: Layouts, sites: list[Site]) -> dict[int, str]:
    """By the id of a component: the name of what changes together, or not at all."""
    groups: dict[int, str] = {}
    for site in sites:
        free = [id(part) for part in _free(layouts, site)]
        joined = {groups[each] for each in free if each in groups}
        name = min(joined, default=f"axis of {site.node.lineno}:{site.node.col_offset}")
        groups = {each: name if old in joined else old for each, old in groups.items()}
        groups |= dict.fromkeys(free, name)
    return groups


def _site_changes(
    module: Module, layouts: Layouts, sites: list[Site], groups: dict[int, str], style: Style
) -> list[Change] | None:
    """The changes of the mapped functions; None where one had to be left: all is asked anew."""
    changes: list[Change] = []
    for site in sites:
        free = _free(layouts, site)
        if not free:
            continue
        try:
            changes.append(_site_change(module, site, layouts, style, groups[id(free[0])]))
        except Left as left:
            layouts.keep_site(site, left.reason)
            return None
    return changes


def _free(layouts: Layouts, site: Site) -> list[Component]:
    return [part for part in _parts(layouts, site) if part.layout is not Layout.STACKED]


def _may_change(module: Module, site: Site, several_processes: bool) -> bool:  # noqa: FBT001
    if site.form not in ("call", "decorator", "partial decorator"):
        return False
    if several_processes and host_local.evidence(module, site.node) is not None:
        return False
    given = site.arguments.keys() - {"axis_name", "donate_argnums"}
    return not site.unknown and not given


def _parts(layouts: Layouts, site: Site) -> list[Component]:
    slots: list[Slot] = [*(layouts.arguments(site) or []), *layouts.results(site)]
    parts: list[Component] = []
    for slot in slots:
        part = layouts.component(slot)
        if not any(part is each for each in parts):
            parts.append(part)
    return parts


def _site_change(module: Module, site: Site, layouts: Layouts, style: Style, group: str) -> Change:
    to_jax.check_form(module, site)
    arguments = layouts.arguments(site)
    if arguments is None:
        raise Left("its calls differ in the number of arguments")
    texts = Texts(module, site.node, style)
    plan = plans.plan(module, site, texts)
    plan = _freed(plan, layouts, arguments, site, texts)
    fix = to_jax.written(module, site, plan, texts, group)
    return Change(site.reference, fix, _said(layouts, site, arguments))


def _freed(
    plan: Plan, layouts: Layouts, arguments: list[Argument], site: Site, texts: Texts
) -> Plan:
    """The plan with each slot laid out as it can be."""
    ins = [layouts.component(slot).layout for slot in arguments]
    results = layouts.results(site)
    outs = [layouts.component(slot).layout for slot in results]
    one_result = results[0].position is None
    spec = texts.named("jax.sharding.PartitionSpec")
    specs = {
        Layout.SHARED: f"{spec}()",
        Layout.SPLIT: f"{spec}({plan.axis})",
        Layout.STACKED: f"{spec}({plan.axis})",
    }
    axes = {Layout.SHARED: "None", Layout.SPLIT: "None", Layout.STACKED: "0"}
    in_specs, in_axes = _tuple([specs[each] for each in ins]), _tuple([axes[each] for each in ins])
    if plan.keywords:  # named arguments keep their axis
        in_specs, in_axes = f"({in_specs}, {specs[Layout.STACKED]})", f"({in_axes}, 0)"
    return dataclasses.replace(
        plan,
        in_specs=in_specs,
        out_specs=specs[outs[0]] if one_result else _tuple([specs[each] for each in outs]),
        in_axes=in_axes,
        out_axes=axes[outs[0]] if one_result else _tuple([axes[each] for each in outs]),
        bare=not plan.keywords and Layout.STACKED not in (*ins, *outs),
    )


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _said(layouts: Layouts, site: Site, arguments: list[Argument]) -> str:
    freed = [
        str(slot.position)
        for slot in arguments
        if layouts.component(slot).layout is not Layout.STACKED
    ]
    results = [
        "all" if slot.position is None else str(slot.position)
        for slot in layouts.results(site)
        if layouts.component(slot).layout is not Layout.STACKED
    ]
    cautions = [caution for part in _parts(layouts, site) for caution in part.cautions]
    words = [
        f"without the device axis: arguments {', '.join(freed) or 'none'}; "
        f"results {', '.join(results) or 'none'}",
        *dict.fromkeys(cautions),
    ]
    return "; ".join(words)


def _with_places(
    module: Module,
    layouts: Layouts,
    sites: list[Site],
    changes: list[Change],
    done: dict[int, str],
    style: Style,
) -> tuple[Change, ...]:
    """The copies, splits and first parts that belong to the freed slots."""
    found = list(changes)
    seen: list[Component] = []
    for site in sites:
        for part in _parts(layouts, site):
            if id(part) not in done or any(part is each for each in seen):
                continue
            seen.append(part)
            found += _places_of(module, layouts, part, done[id(part)], style)
    return tuple(found)


def _places_of(
    module: Module, layouts: Layouts, part: Component, group: str, style: Style
) -> list[Change]:
    places: list[Change] = []
    donated = layouts.donating_calls(part)
    for source in part.sources:
        texts = Texts(module, source.node, style)
        if source.kind is Kind.REPLICATED:
            start, end = f"{texts.helper(emitted.REPLICATED)}(", ")"
            if source.devices is not None:
                end = f", {module.text(source.devices)})"
            said = "a whole copy on each device, without the axis"
        else:
            start, end, said = (
                unwrapping.around(source.of),
                unwrapping.around(source.of, end=True),
                "one global array",
            )
        edits = unwrapping.shell(texts, source.node, source.of, start, end)
        fix = Fix(said, Safety.UNSAFE, edits, texts.imports, texts.definitions, group)
        places.append(Change(source.node, fix, said))
    for first in part.firsts:
        places.append(
            _first(module, first, group, style, copied=lives.outlives(module, first.node, donated))
        )
    places += [_shown(module, node, group, style) for node in part.shown]
    return places + [_forest(module, call, group, style) for call in part.forests]


def _first(module: Module, first: First, group: str, style: Style, *, copied: bool) -> Change:
    """The value itself; a copy of it where a later call donates that."""
    texts = Texts(module, first.node, style)
    start, end = unwrapping.around(first.of), unwrapping.around(first.of, end=True)
    said = "the value has no device axis any more"
    if copied:
        start = f"{texts.named('jax.tree.map')}({texts.named('jax.numpy.copy')}, "
        end, said = ")", f"{said}; it is copied, for the value is donated later"
    edits = unwrapping.shell(texts, first.node, first.of, start, end)
    fix = Fix(said, Safety.UNSAFE, edits, texts.imports, texts.definitions, group)
    return Change(first.node, fix, said)


def _shown(module: Module, node: ast.expr, group: str, style: Style) -> Change:
    """A function of another file gets what it got before."""
    texts = Texts(module, node, style)
    start, end = module.span(node)
    edits = (
        Edit(start, start, f"{texts.helper(emitted.WITH_DEVICE_AXIS)}("),
        Edit(end, end, ")"),
    )
    said = "a function of another file still gets one slice for each device"
    fix = Fix(said, Safety.UNSAFE, edits, texts.imports, texts.definitions, group)
    return Change(node, fix, said)


def _forest(module: Module, call: ast.Call, group: str, style: Style) -> Change:
    """flax's `get_metrics` takes the first slice of each leaf, and stacks; what is left stacks."""
    texts = Texts(module, call, style)
    stack, get = (
        texts.named("flax.training.common_utils.stack_forest"),
        texts.named("jax.device_get"),
    )
    edits = unwrapping.shell(texts, call, call.args[0], f"{stack}({get}(", "))")
    said = "the metrics have no device axis any more"
    fix = Fix(said, Safety.UNSAFE, edits, texts.imports, texts.definitions, group)
    return Change(call, fix, said)
