"""Mapped functions without the axis over devices: what an expert would write.

Where all arguments and results of a function can do without it, the function is mapped by
`jax.jit(jax.shard_map(...))`. Where some keep it, it is mapped by `mapped`, with None for others.
"""

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist import _codes
from jax_dist.checker.model import flow, functions, pmaps, scopes
from jax_dist.checker.model.findings import Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import codegen, pmap_renames, results, shard_map
from jax_dist.codemod.axis_layout import (
    Argument,
    AxisLayout,
    Component,
    Layouts,
    Result,
    Slot,
)
from jax_dist.codemod.codegen import Namer, Style, Texts
from jax_dist.codemod.results import Left, PlannedPlace
from jax_dist.codemod.shard_map import DirectPlan, PmapFacts

_CODE = _codes.FAKE_DEVICE_AXIS
_Freed: TypeAlias = dict[ast.expr, PlannedPlace]  # by its node


def find(
    module: Module, style: Style, namer: Namer, facts: PmapFacts
) -> tuple[_Freed, dict[ast.expr, str]]:
    """The places of a file that can do without the axis over devices, and why others keep it.

    Returns:
      What becomes of them; by the reference of a site, why some of its axes stay.
    """
    sites = [site for site in pmaps.sites(module) if _may_change(site, facts)]
    if not sites:
        return {}, {}
    layouts = Layouts(module, sites)
    write = _Writer(module, layouts, facts, style, namer)
    groups = _groups(layouts, sites)
    while (freed := write.sites(sites, groups)) is None:
        groups = _groups(layouts, sites)
    kept = {
        site.reference: "; ".join(
            dict.fromkeys(part.kept for part in _parts(layouts, site) if part.kept)
        )
        for site in sites
    }
    return freed | write.places(sites, groups), kept


def _may_change(site: Site, facts: PmapFacts) -> bool:
    if site.form not in ("call", "decorator", "partial decorator") or site.fun is None:
        return False
    given = site.arguments.keys() - {"axis_name", "donate_argnums"}
    return not site.unknown and not given and not facts.several_processes


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
    parts: list[Component] = []
    for slot in slots:
        part = layouts.component(slot)
        if not any(part is each for each in parts):
            parts.append(part)
    return parts


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
        named = self._layouts.has_named_arguments(site)
        texts = self._texts(site.node)
        plan = self._freed(shard_map.plan(self._module, site, texts), arguments, site, texts)
        said = _said(self._layouts, site, arguments)
        if AxisLayout.STACKED not in layouts and not named and not self._facts.unfit_place(site):
            fix = shard_map.written(self._module, site, plan, texts, group)
            return results.done(self._module, site.reference, _CODE, fix, said)
        split = [
            slot for slot, layout in zip(slots, layouts, strict=True) if layout is AxisLayout.SPLIT
        ]
        for slot in split:  # only shard_map takes a whole batch
            self._layouts.keep_slot(slot, "another argument or result keeps its axis")
        if split:
            return None
        if not named and AxisLayout.STACKED not in layouts[: len(arguments)]:
            raise Left("no other argument would show how many devices there are")
        return self._mapped(site, plan, group, said)

    def _mapped(self, site: Site, plan: DirectPlan, group: str, said: str) -> PlannedPlace:
        """`mapped` in the place of pmap, with None for what has lost its axis."""
        fix = pmap_renames.fix(self._module, site, self._namer)
        texts = self._texts(site.node)
        edits = fix and shard_map.with_axes(self._module, site, plan, texts, fix.edits)
        if fix is None or edits is None:
            raise Left("pmap has no brackets for in_axes there")
        new = Fix(fix.title, Safety.UNSAFE, edits, fix.imports, group)
        return results.done(self._module, site.reference, _CODE, new, said)

    def _freed(
        self, plan: DirectPlan, arguments: list[Argument], site: Site, texts: Texts
    ) -> DirectPlan:
        """The plan with each slot laid out as it can be."""
        ins = [self._layouts.component(slot).layout for slot in arguments]
        results = self._layouts.results(site)
        outs = [self._layouts.component(slot).layout for slot in results]
        one_result = results[0].position is None
        spec = texts.named("jax.sharding.PartitionSpec")
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
            for node, of, texts, start, end, said in self._shells(part) if number in groups else ():
                edits = codegen.shell(texts, node, of, start, end)
                freed[node] = codegen.place(texts, node, _CODE, edits, groups[number], said)
        return freed

    def _shells(self, part: Component) -> Iterator[tuple[ast.expr, ast.expr, Texts, str, str, str]]:
        """`(whole, what is left of it, texts, new text before that, behind it, what is said)`."""
        donated = self._layouts.donating_calls(part)
        for source in part.sources:
            texts = self._texts(source.node)
            start, end = codegen.brackets(self._module, source.node, source.of)
            said = "one global array"
            if source.kind is Kind.REPLICATED:
                start, end = f"{texts.helper('replicated')}(", ")"
                if source.devices is not None:
                    end = f", {self._module.text(source.devices)})"
                said = "a whole copy on each device, without the axis"
            yield source.node, source.of, texts, start, end, said
        for first in part.firsts:
            texts = self._texts(first.node)
            start, end = codegen.brackets(self._module, first.node, first.of)
            said = "the value has no device axis any more"
            if _outlives(self._module, first.node, donated):
                start = f"{texts.named('jax.tree.map')}({texts.named('jax.numpy.copy')}, "
                end, said = ")", f"{said}; it is copied, for the value is donated later"
            yield first.node, first.of, texts, start, end, said
        for node in part.shown:
            texts = self._texts(node)
            start = f"{texts.helper('with_device_axis')}("
            said = "a function of another file still gets one slice for each device"
            yield node, node, texts, start, ")", said
        for call in part.forests:  # `get_metrics` takes the first slice of each leaf, and stacks
            texts = self._texts(call)
            stack = texts.named("flax.training.common_utils.stack_forest")
            start = f"{stack}({texts.named('jax.device_get')}("
            said = "the metrics have no device axis any more"
            yield call, call.args[0], texts, start, "))", said


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


def _outlives(module: Module, first: ast.expr, donating: Iterable[ast.Call]) -> bool:
    """Whether a value may be used after one of the calls that donate what it is a part of.

    Args:
      module: the file.
      first: `x[0]`, `unreplicate(x)`.
      donating: the calls that donate `x`, or what it becomes.
    """
    return not _is_used_up(module, first, 0) and any(
        _is_later(module, first, each) for each in donating
    )


def _is_used_up(module: Module, first: ast.expr, depth: int) -> bool:
    """Whether the statement keeps nothing of it but a copy."""
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


def _is_later(module: Module, first: ast.expr, call: ast.Call) -> bool:
    """Whether the call may run after: further down, in the same loop, or in another function."""
    if module.function(first) is not module.function(call):
        return True
    if module.statement(first) is module.statement(call):
        return _shares_loop(module, first, call)
    is_below = scopes.place(call) > scopes.place(first)
    return is_below or _shares_loop(module, first, call) or _comes_back(module, call)


def _comes_back(module: Module, call: ast.Call) -> bool:
    """Whether the next call of the function around may give it what this one has left."""
    around = module.function(call)
    return any(
        any(each is around for each in origin.through)
        for argument in call.args
        for origin in flow.of(module).origins(argument)
    )


def _shares_loop(module: Module, one: ast.AST, other: ast.AST) -> bool:
    loops = [each for each in module.ancestors(one) if isinstance(each, ast.For | ast.While)]
    return any(each is around for around in module.ancestors(other) for each in loops)
