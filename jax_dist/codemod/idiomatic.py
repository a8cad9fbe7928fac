"""Mapped functions without the axis over devices: what an expert would write.

Where all arguments and results of a function can do without it, the function is mapped by
`jax.jit(jax.shard_map(...))`. Where some keep it, it is mapped by `mapped`, with None for others.
"""

import ast
import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax_dist import _codes
from jax_dist.checker.model import flow, functions, pmaps, scopes
from jax_dist.checker.model.findings import Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import pmap_renames, site_parts
from jax_dist.codemod.axis_layout import Argument, AxisLayout, Component, Layouts, Result, Slot
from jax_dist.codemod.codegen import Namer, Style, Texts
from jax_dist.codemod.results import Form, Left, PlannedPlace
from jax_dist.codemod.shard_map import DirectPlan, PmapFacts
from jax_dist.codemod.use_sites import First

_CODE = _codes.FAKE_DEVICE_AXIS
_Freed: TypeAlias = dict[ast.expr, PlannedPlace]  # by its node


def find(
    module: Module,
    style: Style,
    namer: Namer,
    facts: PmapFacts,
    keeping: Mapping[Site, str] = types.MappingProxyType({}),
) -> tuple[_Freed, dict[ast.expr, str]]:
    """What becomes of the places of a file that can do without the axis over devices.

    And by the reference of a site, why some of its axes stay. Those in `keeping` do, for the
    reasons there.
    """
    known = {"axis_name", "donate_argnums"}
    sites = [
        site
        for site in pmaps.sites(module)
        if site.form in ("call", "decorator", "partial decorator") and site.fun is not None
        if not site.unknown and site.arguments.keys() <= known
    ]
    others = {
        site.reference: why for site in pmaps.sites(module) if (why := _unread(site, sites, facts))
    }
    if not sites or facts.several_processes:
        return {}, others
    layouts = Layouts(module, sites, keeping=keeping)
    write = _Writer(module, layouts, facts, style, namer)
    groups = _groups(layouts, sites)
    while (freed := write.sites(sites, groups)) is None:
        groups = _groups(layouts, sites)
    reasons = lambda site: dict.fromkeys(part.kept for part in _parts(layouts, site) if part.kept)
    kept = {site.reference: "; ".join(reasons(site)) for site in sites}
    return freed | write.places(sites, groups), others | kept


def _unread(site: Site, sites: list[Site], facts: PmapFacts) -> str:
    """Why the data flow of a site is not looked at; "" where it is."""
    if facts.several_processes:
        return f"the program may run in several processes, without --one-process: {facts.sign}"
    if site in sites:
        return ""
    if site.unknown:
        return f"its options come from {site.unknown}"
    more = sorted(site.arguments.keys() - {"axis_name", "donate_argnums"})
    return f"it has {', '.join(more)}" if more else "what it maps cannot be seen there"


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


def _free(layouts: Layouts, site: Site) -> list[Component]:
    return [part for part in _parts(layouts, site) if part.layout is not AxisLayout.STACKED]


def _parts(layouts: Layouts, site: Site) -> list[Component]:
    slots: list[Slot] = [*(layouts.arguments(site) or []), *layouts.results(site)]
    return list({id(part): part for part in map(layouts.component, slots)}.values())


class _Writer:
    """Writes the changes of one file."""

    def __init__(
        self, module: Module, layouts: Layouts, facts: PmapFacts, style: Style, namer: Namer
    ):
        self._module, self._layouts, self._facts = module, layouts, facts
        self._style, self._namer = style, namer

    def _texts(self, node: ast.expr) -> Texts:
        return Texts(self._module, node, self._style, self._namer)

    # --- mapped functions

    def sites(self, sites: list[Site], groups: dict[int, str]) -> _Freed | None:
        """Their changes; None where a slot had to be kept: then all is asked again."""
        freed: _Freed = {}
        for site in sites:
            free = _free(self._layouts, site)
            if not free:
                continue
            try:
                change = self._site(site, groups[id(free[0])])
            except Left as left:
                self._layouts.keep_site(site, left.reason)
                return None
            if change is None:
                return None
            freed[site.reference] = change
        return freed

    def _site(self, site: Site, group: str) -> PlannedPlace | None:
        arguments = self._layouts.arguments(site)
        if arguments is None:
            raise Left("its calls differ in the number of arguments")
        slots = [*arguments, *self._layouts.results(site)]
        layouts = [self._layouts.component(slot).layout for slot in slots]
        sources = [each for slot in arguments for each in self._layouts.component(slot).sources]
        if {each.kind for each in sources} == {Kind.SPLIT}:  # `replicated` refuses several
            self._facts.check_one_process()
        named = self._layouts.has_named_arguments(site)
        texts = self._texts(site.node)
        plan = self._freed(DirectPlan.of(site, texts), arguments)
        said = _said(self._layouts, site, arguments)
        if not named and not self._facts.unfit_place(site):
            if AxisLayout.STACKED not in layouts:
                return self._done(site, plan.fix(group), said)
            if not self._facts.unknown(site):  # some keep the axis, in blocks of size 1
                mixed = dataclasses.replace(plan, is_bare=False)
                return self._done(site, mixed.fix(group), said)
        split = [
            slot for slot, layout in zip(slots, layouts, strict=True) if layout is AxisLayout.SPLIT
        ]
        for slot in split:  # only shard_map takes a whole batch
            self._layouts.keep_slot(slot, "another argument or result keeps its axis")
        if split:
            return None
        if not named and AxisLayout.STACKED not in layouts[: len(arguments)]:
            raise Left("no other argument would show how many devices there are")
        # `mapped` in the place of pmap, with None for what has lost its axis.
        parts = site_parts.needed(self._module, site, several_processes=False)
        self._namer.needs(parts | {"axes"})
        fix = pmap_renames.fix(self._module, site, self._namer)
        edits = fix and plan.with_axes(fix.edits)
        if fix is None or edits is None:
            raise Left("pmap has no brackets for in_axes there")
        new = Fix(fix.title, Safety.UNSAFE, edits, fix.imports, group)
        return self._done(site, new, said)

    def _done(self, site: Site, fix: Fix, said: str) -> PlannedPlace:
        place = self._module, site.reference, _CODE
        return PlannedPlace.done(*place, fix, said, Form.IDIOMATIC, is_mapped=True)

    def _freed(self, plan: DirectPlan, arguments: list[Argument]) -> DirectPlan:
        """The plan with each slot laid out as it can be."""
        ins = [self._layouts.component(slot).layout for slot in arguments]
        results = self._layouts.results(plan.site)
        outs = [self._layouts.component(slot).layout for slot in results]
        one_result = results[0].position is None
        spec = plan.texts.named("jax.sharding.PartitionSpec")
        cut = f"{spec}({plan.axis})"
        specs = {AxisLayout.SHARED: f"{spec}()", AxisLayout.SPLIT: cut, AxisLayout.STACKED: cut}
        axes = {AxisLayout.SHARED: "None", AxisLayout.SPLIT: "None", AxisLayout.STACKED: "0"}
        return dataclasses.replace(
            plan,
            in_specs=_tuple([specs[each] for each in ins]),
            out_specs=specs[outs[0]] if one_result else _tuple([specs[each] for each in outs]),
            in_axes=_tuple([axes[each] for each in ins]) if {*ins} != {AxisLayout.STACKED} else "",
            out_axes=axes[outs[0]] if one_result else _tuple([axes[each] for each in outs]),
            is_bare=True,
        )

    # --- copies, splits and first parts

    def places(self, sites: list[Site], groups: dict[int, str]) -> _Freed:
        """The changes of those that belong to the freed slots."""
        parts = {id(part): part for site in sites for part in _parts(self._layouts, site)}
        freed: _Freed = {}
        for number, part in parts.items():
            for texts, of, start, end, said in self._shells(part) if number in groups else ():
                edits = texts.shell(of, start, end)
                freed[texts.at] = texts.place(_CODE, edits, groups[number], said, Form.IDIOMATIC)
        return freed

    def _shells(self, part: Component) -> Iterator[tuple[Texts, ast.expr, str, str, str]]:
        """`(texts of a place, what is left of it, new text before, behind, what is said)`."""
        donated = self._layouts.donating_calls(part)
        is_carried = any(isinstance(slot, Argument) for slot in part.slots)
        for source in part.sources:
            texts = self._texts(source.node)
            start, end = texts.brackets(source.of)
            said = "one global array"
            if source.kind is Kind.REPLICATED:
                start, end = f"{texts.helper('replicated')}(", ")"
                if source.devices is not None:
                    end = f", {self._module.text(source.devices)})"
                said = "a whole copy on each device, without the axis"
            yield texts, source.of, start, end, said
        for first in part.firsts:
            texts = self._texts(first.node)
            start, end = texts.brackets(first.of)
            said = "the value has no device axis any more"
            is_later = any(_is_later(self._module, first.node, each) for each in donated)
            if is_later and not _is_used_up(self._module, first.node, 0):
                start = f"{texts.named('jax.tree.map')}({texts.named('jax.numpy.copy')}, "
                end, said = ")", f"{said}; it is copied, for the value is donated later"
            elif is_carried and _may_be_changed(self._module, first):
                start, end = f"{texts.named('jax.tree.map')}(lambda x: x, ", ")"
            yield texts, first.of, start, end, said
        for node in part.shown:
            texts = self._texts(node)
            start = f"{texts.helper('with_device_axis')}("
            said = "a function of another file still gets one slice for each device"
            yield texts, node, start, ")", said
        for call in part.forests:  # `get_metrics` takes the first slice of each leaf, and stacks
            texts = self._texts(call)
            stack = texts.named("flax.training.common_utils.stack_forest")
            start = f"{stack}({texts.named('jax.device_get')}("
            said = "the metrics have no device axis any more"
            yield texts, call.args[0], start, "))", said


def _tuple(parts: list[str]) -> str:
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _said(layouts: Layouts, site: Site, arguments: list[Argument]) -> str:
    def freed(slots: Sequence[Argument | Result]) -> str:
        return ", ".join(
            "all" if slot.position is None else str(slot.position)
            for slot in slots
            if layouts.component(slot).layout is not AxisLayout.STACKED
        )

    cautions = [caution for part in _parts(layouts, site) for caution in part.cautions]
    words = (
        f"arguments {freed(arguments) or 'none'}; results {freed(layouts.results(site)) or 'none'}"
    )
    return "; ".join((f"without the device axis: {words}", *dict.fromkeys(cautions)))


# --- values that are donated later


# What these give is no view of the array.
_COPIES = frozenset(
    ("jax.device_get", "numpy.asarray", "numpy.array", "copy.deepcopy")
    + ("jax.numpy.array", "jax.numpy.copy")
)
_COPYING_BUILTINS = frozenset(("float", "int", "bool", "str", "repr", "print", "len"))

_KEEPING = frozenset(("append", "appendleft", "extend", "insert", "add", "put", "update"))
_DEEPEST = 3


def _is_used_up(module: Module, first: ast.expr, depth: int) -> bool:
    """Whether the statement keeps nothing of `x[0]` or `unreplicate(x)` but a copy."""
    node: ast.AST = first
    for around in module.ancestors(first):
        match around:
            case ast.Call(func=function) if node is not function:
                name = module.qualified_name(function)
                if name in _COPIES:
                    return True
                is_builtin = isinstance(function, ast.Name) and function.id in _COPYING_BUILTINS
                if is_builtin and name is None:
                    return True
                called = pmaps.definition(module, function)
                if called is not None:
                    return depth < _DEEPEST and _is_used_up_by(module, around, called, node, depth)
            case ast.FormattedValue() | ast.If() | ast.While() | ast.Assert():
                return True
            case ast.Yield() | ast.NamedExpr():
                return False
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in _KEEPING:
                return False
            case ast.Expr():
                return True
            case ast.stmt():
                return False
        node = around
    return False


def _is_used_up_by(module: Module, call: Any, called: Any, argument: Any, depth: int) -> bool:
    """Whether a function of this file keeps nothing of an argument."""
    given = argument.value if isinstance(argument, ast.keyword) else argument
    for parameter in scopes.parameters(called.args):
        if functions.argument_of(module, call, called, parameter) is given:
            reads = module.reads(module.scopes.of[called], parameter.arg)
            return all(_is_used_up(module, read, depth + 1) for read in reads)
    return False


def _may_be_changed(module: Module, first: First) -> bool:
    """Whether containers that were new may be changed later: then they must not be the state's."""
    if not isinstance(first.node, ast.Call) or _is_used_up(module, first.node, 0):
        return False
    root = first.of
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if isinstance(root, ast.Call):
        return False  # nothing else has it
    match module.statement(first.node):
        case ast.Return() if isinstance(root, ast.Name):
            found = module.scope(root).lookup(root.id)  # a name of the function ends with it
            return found is None or found[0] is module.scopes.module
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if value is first.node:
            return not isinstance(first.of, ast.Name) or first.of.id != name
    return True


def _is_later(module: Module, first: ast.expr, call: ast.Call) -> bool:
    """Whether the call may run after: further down, in the same loop, or in another function."""
    if module.function(first) is not module.function(call):
        return True
    if module.statement(first) is module.statement(call):
        return _shares_loop(module, first, call)
    if scopes.place(call) > scopes.place(first) or _shares_loop(module, first, call):
        return True
    # Or the next call of the function around may give it what this one has left.
    around = module.function(call)
    return any(
        any(each is around for each in origin.through)
        for argument in call.args
        for origin in flow.of(module).origins(argument)
    )


def _shares_loop(module: Module, one: ast.AST, other: ast.AST) -> bool:
    loops = [each for each in module.ancestors(one) if isinstance(each, ast.For | ast.While)]
    return any(each is around for around in module.ancestors(other) for each in loops)
