"""Mapped functions without the axis over devices: what an expert would write.

A run of the program has shown which values carry the axis, how each is made and used, and by the
programs of all calls which results are the same on all devices (`recorded_flow`). A component of
such values loses the axis in one of two ways: what all devices hold alike becomes one array, and
rows of each device become rows of one array. What does neither keeps it, in blocks of size 1.
"""

import ast
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax_dist import _codes
from jax_dist.checker.model import pmaps
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod import escapes, flow_uses, shard_map
from jax_dist.codemod.codegen import Namer, Style, Texts
from jax_dist.codemod.flow_uses import Made, Use
from jax_dist.codemod.recorded_flow import Component, FileFlow, Slot, variable
from jax_dist.codemod.results import Form, Left, PlannedPlace
from jax_dist.codemod.shard_map import DirectPlan, PmapFacts
from jax_dist.codemod.verify.evidence import Array, SiteRecord

_CODE = _codes.FAKE_DEVICE_AXIS
_STATIC = "static_broadcasted_argnums"
_MOST_SHOWN = 2  # places where a component gets its axis back
_Path: TypeAlias = tuple[int, ...]
_PlaceAt: TypeAlias = tuple[ast.expr, PlannedPlace]


class _Layout(enum.Enum):
    STACKED = "one slice for each device"
    SHARED = "the same on each device"
    MERGED = "the rows of all devices"


@dataclasses.dataclass(eq=False)
class _Part:
    """A component, as it will be laid out."""

    component: Component
    layout: _Layout = _Layout.STACKED
    kept: str = ""  # why it is stacked
    made: list[Made] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)

    def keep(self, why: str) -> bool:
        """Keeps its axis; whether it had lost it."""
        changed = self.layout is not _Layout.STACKED
        self.layout, self.kept = _Layout.STACKED, self.kept or why
        return changed


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A place that maps, and how it was called."""

    site: Site
    record: SiteRecord
    arguments: int
    results: tuple[_Path, ...]
    shared: frozenset[int]  # positions that are not mapped
    numbers: frozenset[int]  # static numbers, which can be shared
    donated: frozenset[int]


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
            mapped[site] = _mapped(site, facts, flow)
        except Left as left:
            reasons[site.reference] = left.reason
    plan = _Plan(flow, list(mapped.values()), facts)
    write = _Writer(plan, style, namer)
    while (found := write.places()) is None:
        plan.settle()
    for site in mapped:
        if why := plan.reasons(mapped[site]):
            reasons[site.reference] = "; ".join(why)
    return found, reasons


def _mapped(site: Site, facts: PmapFacts, flow: FileFlow) -> _Mapped:
    """Raises Left where the axis of a place cannot go."""
    if not site.is_application or site.fun is None:
        raise Left("what it maps cannot be seen there")
    if why := facts.unknown(site, but=_STATIC):
        raise Left(why)
    record = flow.sites.get(site)
    if record is None:
        raise Left("no call of it alone was recorded")
    if any(call.raised for call in record.calls):
        raise Left("a call of it raised an error")
    if record.inside or record.hidden:
        raise Left("it is also called inside of a larger traced function")
    forms = flow.forms(record)
    calls = {each["arguments"] for each in forms if "arguments" in each}
    results = {tuple(map(tuple, each["results"])) for each in forms if "results" in each}
    if len(calls) != 1 or any(each.get("words") for each in forms):
        raise Left("its calls differ in the number of arguments, or name them")
    if len(results) != 1:
        raise Left("its calls differ in the number of results")
    [arguments], [paths] = calls, results
    if not shard_map.is_default(site.arguments.get("out_axes")):
        raise Left("it has out_axes")
    is_shared = shard_map.shared_positions(site)
    shared = {i for i in range(arguments) if is_shared is not None and is_shared(i)}
    default = ast.Constant(value=0)
    given = site.arguments.get("in_axes", default)
    axes = given.elts if isinstance(given, ast.Tuple | ast.List) else [given] * arguments
    if (
        is_shared is None
        or len(shared) == arguments
        or any(not shard_map.is_default(each) for i, each in enumerate(axes) if i not in shared)
    ):
        raise Left("its in_axes are not a flat tuple of 0 and None")
    static = flow.static(record)
    if any(kinds - {"int", "float"} for kinds in static.values()):
        raise Left("it has static arguments that are no numbers")
    donated = _donated(site, arguments)
    return _Mapped(site, record, arguments, paths, frozenset(shared), frozenset(static), donated)


def _donated(site: Site, arguments: int) -> frozenset[int]:
    """The positions of what a place donates; all of them where the text does not say it."""
    given = site.arguments.get("donate_argnums", ast.Tuple(elts=[]))
    parts = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
    if not all(isinstance(each, ast.Constant) for each in parts):
        return frozenset(range(arguments))
    values = (each.value for each in parts if isinstance(each, ast.Constant))
    return frozenset(value % arguments for value in values if isinstance(value, int))


class _Plan:
    """How each component is laid out."""

    def __init__(self, flow: FileFlow, mapped: Sequence[_Mapped], facts: PmapFacts):
        self.flow, self.mapped = flow, mapped
        self._facts = facts
        self._by_number = {each.record.number: each for each in mapped}
        self.parts: list[_Part] = [_Part(each) for each in flow.components]
        self._part_of = {slot: part for part in self.parts for slot in part.component.slots}
        for part in self.parts:
            self._begin(part)
        self.settle()

    def part(self, mapped: _Mapped, side: str, path: _Path) -> _Part | None:
        """None where nothing has the axis: a shared or static argument, a result without arrays."""
        if side == "in" and path[0] in mapped.shared | mapped.numbers:
            return None
        return self._part_of.get(Slot(mapped.record.number, side, path))

    def slots(self, mapped: _Mapped) -> Iterator[_Part]:
        """The parts of all arguments and results."""
        found = [self.part(mapped, "in", (i,)) for i in range(mapped.arguments)]
        found += [self.part(mapped, "out", path) for path in mapped.results]
        yield from (each for each in found if each is not None)

    def is_bare(self, mapped: _Mapped) -> bool:
        return all(part.layout is not _Layout.STACKED for part in self.slots(mapped))

    def is_free(self, mapped: _Mapped) -> bool:
        return any(part.layout is not _Layout.STACKED for part in self.slots(mapped))

    def reasons(self, mapped: _Mapped) -> list[str]:
        return list(dict.fromkeys(part.kept for part in self.slots(mapped) if part.kept))

    # --- each by itself

    def _begin(self, part: _Part) -> None:
        try:
            part.layout = self._layout(part)
        except Left as left:
            part.keep(left.reason)

    def _layout(self, part: _Part) -> _Layout:
        flow, slots, serials = self.flow, part.component.slots, part.component.serials
        if any(slot.site not in self._by_number for slot in slots):
            raise Left("another mapped function takes it, and stays")
        if any(slot.side == "word" for slot in slots):
            raise Left("it is given by name")
        if flow.is_held_elsewhere(serials):
            raise Left("another file uses it")
        self._check_all_ran(part)
        holders = list(flow.holders(serials))
        part.made = list(self._made(part))
        part.uses = [flow_uses.use_of(flow, node) for node in holders]
        copies = {each.copies for each in part.made}
        inputs = [slot for slot in slots if slot.side == "in"]
        is_alike = all(map(_has_alike_rows, self._given(inputs)))
        if copies <= {True} and is_alike and not self._unlike(part, _Layout.SHARED):
            return _Layout.SHARED
        if copies == {True}:
            raise Left("its copies differ" if not is_alike else self._unlike(part, _Layout.SHARED))
        if copies <= {False} and all(len(each.shape) > 1 for each in self._arrays(slots)):
            if not (why := self._unlike(part, _Layout.MERGED)):
                return _Layout.MERGED
            raise Left(why)
        raise Left("it has a slice for each device, and no rows")

    def _made(self, part: _Part) -> Iterator[Made]:
        flow = self.flow
        for node, serials in flow.makers(part.component.serials).items():
            if node is None:
                raise Left("it is made where it is not seen")
            if flow.called_sites(node):
                continue  # a result
            outer = flow_uses.maps_leaves(flow, node, serials)
            found = None if outer is None else flow_uses.made(flow, outer)
            found = found or flow_uses.made(flow, node)
            if found is None:
                text = " ".join(flow.module.text(node).split())
                raise Left(f"{text} of line {node.lineno} is not known to make copies or rows")
            yield found

    def _unlike(self, part: _Part, layout: _Layout) -> str:
        """Why its uses do not allow a layout; "" where they do."""
        by_way: dict[str, list[Use]] = {}
        for use in part.uses:
            by_way.setdefault(use.way, []).append(use)
        needing = by_way.get("needs axis", [])
        if layout is _Layout.SHARED:
            needing = [*needing, *by_way.get("reduced", [])]
            has_input = any(slot.side == "in" for slot in part.component.slots)
            most = _MOST_SHOWN if has_input else 0
        else:
            needing, most = [*needing, *by_way.get("first", []), *by_way.get("forest", [])], 0
            if self.is_donated(part) and any(each.edits or each.of for each in part.made):
                return "it is donated, and what it is made of is not"
        said = [use.said or f"line {use.node.lineno} takes a part of it" for use in needing]
        stuck = [use.said for use in needing if not use.can_show]
        return (stuck or said)[0] if stuck or len(needing) > most else ""

    def is_donated(self, part: _Part) -> bool:
        """Whether a mapped function takes the memory of one of its arguments."""
        slots = (slot for slot in part.component.slots if slot.side == "in")
        return any(slot.path[0] in self._by_number[slot.site].donated for slot in slots)

    def _check_all_ran(self, part: _Part) -> None:
        """Raises Left where a line that did not run reads or sets a name that has carried it."""
        module, flow = self.flow.module, self.flow
        names: dict[Any, str] = {}  # by variable
        for node in flow.holders(part.component.serials):
            if isinstance(node, ast.Name | ast.Attribute):
                names[variable(module, node)] = module.text(node)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Name | ast.Attribute) or isinstance(node.ctx, ast.Del):
                continue
            text = names.get(variable(module, node))
            if text is None:
                continue
            within = any(isinstance(each, ast.JoinedStr) for each in module.ancestors(node))
            if within and not flow.watches(node):
                raise Left(f"line {node.lineno} formats {text}")
            if isinstance(module.parent(node), ast.AugAssign) and isinstance(node.ctx, ast.Store):
                raise Left(f"line {node.lineno} changes {text} in place")
            value = getattr(module.statement(node), "value", None)
            is_set = isinstance(node.ctx, ast.Store)
            self._check_others_read(node, is_set=is_set)
            looked_at = value if is_set and flow.watches(value) else None if is_set else node
            if looked_at is not None and flow.watches(looked_at) and not flow.ran(looked_at):
                raise Left(f"line {node.lineno} has {text}, and never ran")

    def _check_others_read(self, node: Any, *, is_set: bool) -> None:
        """Raises Left where other files may read a global name, or a field that is set here."""
        module = self.flow.module
        if isinstance(node, ast.Name):
            found = module.scope(node).lookup(node.id)
            is_global = found is not None and found[0] is module.scopes.module
            if is_global and escapes.is_used_elsewhere(module, node.id):
                raise Left(f"other files may use {node.id} of line {node.lineno}")
        elif is_set and self._facts.is_read_elsewhere(node.attr):
            raise Left(f"other files may read .{node.attr}, which line {node.lineno} sets")

    def _given(self, slots: Sequence[Slot]) -> Iterator[Array]:
        for slot in slots:
            yield from self.flow.given(self._by_number[slot.site].record, slot.path[0])

    def _arrays(self, slots: set[Slot]) -> Iterator[Array]:
        yield from self._given([slot for slot in slots if slot.side == "in"])
        for slot in slots:
            if slot.side == "out":
                prefix = "".join(f"[{each}]" for each in slot.path)
                for call in self._by_number[slot.site].record.calls:
                    yield from (each for each in call.returned if each.path.startswith(prefix))

    # --- together

    def settle(self) -> None:
        """Keeps the axis wherever a mapped function needs it, until nothing changes."""
        while any([*map(self._keep_results, self.mapped), *map(self._keep_site, self.mapped)]):
            pass

    def _keep_results(self, mapped: _Mapped) -> bool:
        """Of results that are not shown to be the same on all devices."""
        alike = set(mapped.shared | mapped.numbers)
        for i in range(mapped.arguments):
            part = self.part(mapped, "in", (i,))
            if part is not None and part.layout is _Layout.SHARED:
                alike.add(i)
        changed = False
        same = self.flow.alike_results(mapped.record, alike, mapped.results)
        for path, is_same in same.items():
            part = self.part(mapped, "out", path)
            if part is None or part.layout is not _Layout.SHARED or is_same:
                continue
            slots = part.component.slots
            rows = all(len(each.shape) > 1 for each in self._arrays(slots))
            if not part.made and rows and not self._unlike(part, _Layout.MERGED):
                part.layout, changed = _Layout.MERGED, True
            else:
                which = ".".join(map(str, path))
                which = f"result {which}" if path else "what it returns"
                changed |= part.keep(f"{which} may differ from device to device")
        return changed

    def _keep_site(self, mapped: _Mapped) -> bool:
        """Of arguments and results that would go unnoticed in several processes."""
        changed = False
        inputs = [self.part(mapped, "in", (i,)) for i in range(mapped.arguments)]
        merged = [e for e in inputs if e is not None and e.layout is _Layout.MERGED]
        is_stacked = any(e is not None and e.layout is _Layout.STACKED for e in inputs)
        if merged and not is_stacked:
            try:
                self._facts.check_one_process()
            except Left as left:
                for part in merged:
                    changed |= part.keep(left.reason)
        return changed


def _has_alike_rows(array: Array) -> bool:
    return len({*array.rows}) == 1


class _Writer:
    """Writes the changes of one file."""

    def __init__(self, plan: _Plan, style: Style, namer: Namer):
        self._plan, self._flow = plan, plan.flow
        self._module = plan.flow.module
        self._style, self._namer = style, namer

    def places(self) -> dict[ast.expr, PlannedPlace] | None:
        """The changes by their nodes; None where one more part had to keep the axis."""
        groups = self._groups()
        found: dict[ast.expr, PlannedPlace] = {}
        for part in self._plan.parts:
            if part.layout is _Layout.STACKED:
                continue
            try:
                group = groups[id(part)]
                found |= dict(self._made(part, group)) | dict(self._used(part, group))
            except Left as left:
                part.keep(left.reason)
                return None
        for mapped in self._plan.mapped:
            if self._plan.is_free(mapped):
                try:
                    group = groups[id(next(self._free(mapped)))]
                    found[mapped.site.reference] = self._site(mapped, group)
                except Left as left:
                    for part in self._plan.slots(mapped):
                        part.keep(left.reason)
                    return None
        return found

    def _free(self, mapped: _Mapped) -> Iterator[_Part]:
        return (e for e in self._plan.slots(mapped) if e.layout is not _Layout.STACKED)

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

    def _site(self, mapped: _Mapped, group: str) -> PlannedPlace:
        site, plan = mapped.site, self._plan
        texts = self._texts(site.node)
        direct = DirectPlan.of(site, texts, without=(_STATIC,))
        spec = texts.named("jax.sharding.PartitionSpec")

        def layout(side: str, path: _Path) -> _Layout:
            part = plan.part(mapped, side, path)
            return _Layout.SHARED if part is None else part.layout

        ins = [layout("in", (i,)) for i in range(mapped.arguments)]
        outs = {path: layout("out", path) for path in mapped.results}
        cut = f"{spec}({direct.axis})"
        specs = dict.fromkeys(_Layout, cut) | {_Layout.SHARED: f"{spec}()"}
        axes = dict.fromkeys(_Layout, "None") | {_Layout.STACKED: "0"}

        def written(texts: Mapping[_Layout, str]) -> tuple[str, str]:
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

    def _said(self, mapped: _Mapped) -> str:
        def freed(side: str, paths: Sequence[_Path]) -> str:
            parts = {path: self._plan.part(mapped, side, path) for path in paths}
            names = (
                ".".join(map(str, path)) or "all"
                for path, part in parts.items()
                if part is not None and part.layout is not _Layout.STACKED
            )
            return ", ".join(names) or "none"

        arguments = freed("in", [(i,) for i in range(mapped.arguments)])
        results = freed("out", mapped.results)
        return f"without the device axis: arguments {arguments}; results {results}"

    # --- what makes and uses values

    def _made(self, part: _Part, group: str) -> Iterator[_PlaceAt]:
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
            if part.layout is _Layout.SHARED:
                start, end = self._replicated(texts, part, made)
                said = "a whole copy on each device, without the axis"
            yield self._shell(texts, made.of, start, end, group, said)

    def _replicated(self, texts: Texts, part: _Part, made: Made) -> tuple[str, str]:
        """What stands around a value of which each device gets a whole copy."""
        assert made.of is not None
        takers = (m for m in self._plan.mapped if part in self._plan.slots(m))
        taker = next(takers, None)
        if taker is None or made.devices is not None or self._flow.has_numbers(made.of):
            devices = "" if made.devices is None else f", {self._module.text(made.devices)}"
            return f"{texts.helper('replicated')}(", f"{devices})"
        # Donated, it must not take the memory of what it is a copy of.
        own = ["may_alias=False"] if self._plan.is_donated(part) else []
        mesh = DirectPlan.of(taker.site, texts, without=(_STATIC,)).mesh
        where = f"{texts.named('jax.sharding.NamedSharding')}({mesh}, "
        where += f"{texts.named('jax.sharding.PartitionSpec')}())"
        return texts.around(texts.named("jax.device_put"), made.of, [where, *own])

    def _used(self, part: _Part, group: str) -> Iterator[_PlaceAt]:
        is_donated = self._plan.is_donated(part)
        is_carried = any(slot.side == "in" for slot in part.component.slots)
        for use in part.uses:
            if use.way == "passes" or (use.way == "reduced" and part.layout is _Layout.MERGED):
                continue
            texts = self._texts(use.node)
            self._check_others(part, use.of)
            if use.way == "row":
                assert isinstance(use.node, ast.Subscript)
                edit = flow_uses.without_first_index(self._module, use.node)
                said = "the value has no device axis any more"
                place = texts.place(_CODE, (edit,), group, said, Form.IDIOMATIC)
                yield use.node, place
                continue
            start, end = texts.brackets(use.of)
            said = "the value has no device axis any more"
            if use.way == "forest":
                stack = texts.named("flax.training.common_utils.stack_forest")
                start, end = f"{stack}({texts.named('jax.device_get')}(", "))"
            elif use.way != "first":
                start, end = f"{texts.helper('with_device_axis')}(", ")"
                said = "what is not followed still gets one slice for each device"
            elif is_donated and not flow_uses.is_used_up(self._module, use.node):
                start = f"{texts.named('jax.tree.map')}({texts.named('jax.numpy.copy')}, "
                end, said = ")", f"{said}; it is copied, for the value may be donated later"
            elif is_carried and flow_uses.may_be_changed(self._module, use):
                start, end = f"{texts.named('jax.tree.map')}(lambda x: x, ", ")"
            yield self._shell(texts, use.of, start, end, group, said)

    def _shell(
        self, texts: Texts, of: ast.expr, start: str, end: str, group: str, said: str
    ) -> _PlaceAt:
        edits = texts.shell(of, start, end)
        return texts.at, texts.place(_CODE, edits, group, said, Form.IDIOMATIC)

    def _check_others(self, part: _Part, node: ast.expr) -> None:
        """Raises Left where an expression that changes holds more than arrays of this layout."""
        flow = self._flow
        serials = flow.serials(node)
        alike = [each for each in self._plan.parts if each.layout is part.layout]
        known = {serial for each in alike for serial in each.component.serials}
        if flow.has_others(node) or not serials <= known:
            text = " ".join(self._module.text(node).split())
            raise Left(f"{text} of line {node.lineno} is also a value that keeps its axis")


def _nested(texts: Mapping[_Path, str]) -> str:
    """The text of a tree of tuples; one text where all of a tuple are alike."""
    if [*texts] == [()]:
        return texts[()]
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    inner: dict[int, dict[_Path, str]] = {}
    for (first, *rest), text in texts.items():
        inner.setdefault(first, {})[tuple(rest)] = text
    each = [_nested(inner[i]) for i in sorted(inner)]
    return f"({', '.join(each)}{',' if len(each) == 1 else ''})"
