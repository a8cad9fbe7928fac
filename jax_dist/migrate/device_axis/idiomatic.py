"""Mapped functions without the axis over devices: what an expert would write.

A run of the program has shown which values carry the axis, how each is made and used, and by the
programs of all calls which results are the same on all devices (`recorded_flow`). A component of
such values loses the axis in one of two ways: what all devices hold alike becomes one array, and
rows of each device become rows of one array. What does neither keeps it, in blocks of size 1.
"""

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jax_dist import _codes
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import named_calls
from jax_dist.migrate.codegen import Namer, Style, Texts
from jax_dist.migrate.device_axis import aliases, flow_uses
from jax_dist.migrate.device_axis.flow_uses import Made, Use
from jax_dist.migrate.device_axis.layouts import (
    STATIC,
    Layout,
    Mapped,
    Part,
    Path,
    Plan,
    mapped_place,
)
from jax_dist.migrate.pmap_facts import PmapFacts
from jax_dist.migrate.recorded_flow import FileFlow
from jax_dist.migrate.results import Form, Left, PlannedPlace
from jax_dist.migrate.shard_map import DirectPlan

_CODE = _codes.FAKE_DEVICE_AXIS
_FIRST = ".addressable_data(0)"  # what jax.pmap's `x[0]` reads, where copies may differ
_GONE = "the value has no device axis any more"
_PlaceAt: TypeAlias = tuple[ast.expr, PlannedPlace]


def find(
    module: Module, style: Style, namer: Namer, facts: PmapFacts, flow: FileFlow, kept: set[Site]
) -> tuple[dict[ast.expr, PlannedPlace], dict[ast.expr, str]]:
    """What becomes of the places of a file that can do without the axis over devices.

    Args:
      module: the file.
      style, namer: how it is written.
      facts: what is known of its places.
      flow: what a run has shown.
      kept: sites that keep the axis.

    Returns:
      The places by their nodes; and by the reference of a site, why some of its axes stay.
    """
    mapped, reasons = {}, {}
    for site in pmaps.sites(module):
        try:
            if site in kept:
                raise Left("without it, --verify did not find the same")
            mapped[site] = mapped_place(site, facts, flow)
        except Left as left:
            reasons[site.reference] = left.reason
    plan = Plan(flow, list(mapped.values()), facts)
    write = _Writer(plan, style, namer)
    while (found := write.places()) is None:
        plan.settle()
    for site in mapped:
        if why := plan.reasons(mapped[site]):
            reasons[site.reference] = "; ".join(why)
    return found, reasons


class _Writer:
    """Writes the changes of one file."""

    def __init__(self, plan: Plan, style: Style, namer: Namer):
        self._plan, self._flow = plan, plan.flow
        self._module = plan.flow.module
        self._style, self._namer = style, namer

    def places(self) -> dict[ast.expr, PlannedPlace] | None:
        """The changes by their nodes; None where one more part had to keep the axis."""
        groups = self._groups()
        found: dict[ast.expr, PlannedPlace] = {}
        for part in self._plan.parts:
            if part.layout is Layout.STACKED:
                continue
            try:
                group = groups[id(part)]
                for node, place in (*self._made(part, group), *self._used(part, group)):
                    if found.setdefault(node, place).fix != place.fix:
                        raise Left(f"line {node.lineno} makes it for what is not followed")
            except Left as left:
                part.keep(left.reason)
                return None
        for mapped in self._plan.mapped:
            if self._plan.is_free(mapped):
                try:
                    group = groups[id(next(self._free(mapped)))]
                    found[mapped.site.reference] = self._site(mapped, group)
                    found |= self._calls(mapped, group)
                except Left as left:
                    for part in self._plan.slots(mapped):
                        part.keep(left.reason)
                    return None
        return found

    def _free(self, mapped: Mapped) -> Iterator[Part]:
        return (e for e in self._plan.slots(mapped) if e.layout is not Layout.STACKED)

    def _groups(self) -> dict[int, str]:
        """By the id of a part: the name of what changes together, or not at all."""
        groups: dict[int, str] = {}
        for mapped in self._plan.mapped:
            free = [id(part) for part in self._free(mapped)]
            joined = {groups[each] for each in free if each in groups}
            node = mapped.site.node
            name = min(joined, default=f"axis of {node.lineno}:{node.col_offset}")
            groups = {each: name if old in joined else old for each, old in groups.items()}
            groups |= dict.fromkeys(free, name)
        return groups

    def _texts(self, node: ast.expr) -> Texts:
        return Texts(self._module, node, self._style, self._namer)

    # --- mapped functions

    def _site(self, mapped: Mapped, group: str) -> PlannedPlace:
        site, plan = mapped.site, self._plan
        texts = self._texts(site.node)
        direct = DirectPlan.of(site, texts, plan.facts, without=(STATIC,))
        spec = texts.named("jax.sharding.PartitionSpec")

        def layout(side: str, path: Path) -> Layout:
            part = plan.part(mapped, side, path)
            return Layout.SHARED if part is None else part.layout

        ins = [layout("in", (i,)) for i in range(mapped.arguments)]
        outs = {path: layout("out", path) for path in mapped.results}
        cut = f"{spec}({direct.axis})"
        specs = dict.fromkeys(Layout, cut) | {Layout.SHARED: f"{spec}()"}
        axes = dict.fromkeys(Layout, "None") | {Layout.STACKED: "0"}

        def written(texts: Mapping[Layout, str]) -> tuple[str, str]:
            given = _nested({(i,): texts[each] for i, each in enumerate(ins)})
            return given, _nested({path: texts[each] for path, each in outs.items()})

        (in_specs, out_specs), both = written(specs), written(axes)
        in_axes, out_axes = ("" if each == "0" else each for each in both)
        direct = dataclasses.replace(
            direct,
            in_specs=in_specs,
            out_specs=out_specs,
            in_axes=in_axes,
            out_axes=out_axes,
            is_bare=plan.is_bare(mapped),
        )
        fix = direct.fix(group)
        said = self._said(mapped)
        place = self._module, site.reference, _CODE
        return PlannedPlace.done(*place, fix, said, Form.IDIOMATIC, is_mapped=True)

    def _calls(self, mapped: Mapped, group: str) -> dict[ast.expr, PlannedPlace]:
        """The calls that give arguments by name."""
        return {
            call: named_calls.place(self._texts(call), group, Form.IDIOMATIC)
            for call in mapped.named.calls
        }

    def _said(self, mapped: Mapped) -> str:
        def freed(side: str, paths: Sequence[Path]) -> str:
            parts = {path: self._plan.part(mapped, side, path) for path in paths}
            names = (
                ".".join(map(str, path)) or "all"
                for path, part in parts.items()
                if part is not None and part.layout is not Layout.STACKED
            )
            return ", ".join(names) or "none"

        arguments = freed("in", [(i,) for i in range(mapped.arguments)])
        results = freed("out", mapped.results)
        return f"without the device axis: arguments {arguments}; results {results}"

    # --- what makes and uses values

    def _made(self, part: Part, group: str) -> Iterator[_PlaceAt]:
        for made in part.made:
            self._check_others(part, made.node)
            if made.at is not None:
                said = "one global array" if not made.copies else "one of the copies"
                texts = self._texts(made.at)
                place = texts.place(_CODE, made.edits, group, said, Form.IDIOMATIC)
                yield made.at, place
                continue
            assert made.of is not None
            texts = self._texts(made.node)
            start, end = texts.brackets(made.of)
            said = "one global array"
            if part.layout is Layout.SHARED and self._flow.is_on_host(made.node):
                if not aliases.is_new(self._module, made.of):  # it may be changed in place
                    copy = texts.named("numpy.copy")
                    start, end = f"{texts.named('jax.tree.map')}({copy}, ", ")"
            elif part.layout is Layout.SHARED:
                start, end = self._replicated(texts, part, made)
                said = "a whole copy on each device, without the axis"
            yield self._shell(texts, made.of, start, end, group, said)

    def _replicated(self, texts: Texts, part: Part, made: Made) -> tuple[str, str]:
        """What stands around a value of which each device gets a whole copy."""
        assert made.of is not None
        takers = (m for m in self._plan.mapped if part in self._plan.slots(m))
        taker = next(takers, None)
        if taker is None or made.devices is not None or self._flow.has_numbers(made.of):
            devices = "" if made.devices is None else f", {self._module.text(made.devices)}"
            return f"{texts.helper('replicated')}(", f"{devices})"
        mesh = DirectPlan.of(taker.site, texts, self._plan.facts, without=(STATIC,)).mesh
        where = f"{texts.named('jax.sharding.NamedSharding')}({mesh}, "
        where += f"{texts.named('jax.sharding.PartitionSpec')}())"
        before, behind = texts.around(texts.named("jax.device_put"), made.of, [where])
        if aliases.is_new(self._module, made.of):
            return before, behind
        beside = (p for p in self._plan.parts if any(m.node is made.node for m in p.made))
        # What is donated, or of numpy and may be changed in place, must not have the memory of
        # something else; device_put shares it, whatever `may_alias` says (0.7.2 to 0.12.0.1).
        is_shared = any(map(self._plan.is_donated, beside)) or self._flow.has_numpy(made.of)
        if is_shared:
            copy = texts.named("jax.numpy.copy")
            return f"{before}{texts.named('jax.tree.map')}({copy}, ", f"){behind}"
        return before, behind

    def _used(self, part: Part, group: str) -> Iterator[_PlaceAt]:
        for use in part.uses:
            if use.way == "passes" or (use.way == "reduced" and part.layout is Layout.MERGED):
                continue
            texts = self._texts(use.node)
            self._check_others(part, use.of)
            if use.way in ("first", "row"):
                yield self._taken(part, use, group)
            elif use.way == "forest":
                stack = texts.named("flax.training.common_utils.stack_forest")
                start, end = f"{stack}({texts.named('jax.device_get')}(", "))"
                yield self._shell(texts, use.of, start, end, group, _GONE)
            else:
                said = "what is not followed still gets one slice for each device"
                start = f"{texts.helper('with_device_axis')}("
                yield self._shell(texts, use.of, start, ")", group, said)

    def _taken(self, part: Part, use: Use, group: str) -> _PlaceAt:
        """`x[0]`: the value itself, a copy of it, or the copy of the first device."""
        module, texts, of = self._module, self._texts(use.node), use.of
        is_one = part.layout is Layout.SHARED and not aliases.is_read(module, use.node)
        first = _FIRST if is_one and self._plan.may_differ(part) else ""
        if use.way == "row":
            assert isinstance(use.node, ast.Subscript)
            edit = flow_uses.without_first_index(module, use.node)
            end = module.span(use.node.value)[1]
            edits = [Edit(end, end, first), edit] if first else [edit]
            return use.node, texts.place(_CODE, edits, group, _GONE, Form.IDIOMATIC)
        is_carried = any(slot.side == "in" for slot in part.component.slots)
        said = _GONE
        (start, end), change, copy = texts.brackets(of), "", ""
        if self._plan.is_donated(part) and not aliases.is_used_up(module, use.node):
            copy = change = texts.named("jax.numpy.copy")
            said += "; it is copied, for the value may be donated later"
        elif is_carried and aliases.may_be_changed(self._flow, use):
            change = "lambda x: x"
        if self._flow.is_array(of):
            start, end = f"{copy}({start}" if copy else start, f"{end}{first}{')' * bool(copy)}"
        elif first or change:
            one = f"{copy}(x{first})" if copy else f"x{first}"
            change = f"lambda x: {one}" if first else change
            start, end = f"{texts.named('jax.tree.map')}({change}, ", ")"
        return self._shell(texts, of, start, end, group, said)

    def _shell(
        self, texts: Texts, of: ast.expr, start: str, end: str, group: str, said: str
    ) -> _PlaceAt:
        edits = texts.shell(of, start, end)
        return texts.at, texts.place(_CODE, edits, group, said, Form.IDIOMATIC)

    def _check_others(self, part: Part, node: ast.expr) -> None:
        """Raises Left where an expression that changes holds more than arrays of this layout."""
        flow = self._flow
        serials = flow.serials(node)
        alike = [each for each in self._plan.parts if each.layout is part.layout]
        known = {serial for each in alike for serial in each.component.serials}
        if flow.has_others(node) or not serials <= known:
            text = " ".join(self._module.text(node).split())
            raise Left(f"{text} of line {node.lineno} is also a value that keeps its axis")


def _nested(texts: Mapping[Path, str]) -> str:
    """The text of a tree of tuples; one text where all of a tuple are alike."""
    if [*texts] == [()]:
        return texts[()]
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    inner: dict[int, dict[Path, str]] = {}
    for (first, *rest), text in texts.items():
        inner.setdefault(first, {})[tuple(rest)] = text
    each = [_nested(inner[i]) for i in sorted(inner)]
    return f"({', '.join(each)}{',' if len(each) == 1 else ''})"
