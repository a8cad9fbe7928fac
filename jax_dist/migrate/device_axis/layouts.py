"""How each component of values is laid out without the axis over devices, and why some keep it.

What all devices hold alike is shared; rows of each device are merged; all else stays stacked. Each
component is looked at by itself: how it is made, and how it is used. Then together: a result must
be the same on all devices, by the programs of all calls, where it is to be shared.
"""

import ast
import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from jax_dist.lint.model.pmaps import Site
from jax_dist.migrate import imports, pmap_facts, site_parts
from jax_dist.migrate.device_axis import (
    escape,
    fixed_programs,
    flow_uses,
    other_values,
    related_names,
)
from jax_dist.migrate.device_axis.flow_uses import Made, Use
from jax_dist.migrate.device_axis.unrun import Seen
from jax_dist.migrate.named_calls import NamedCalls
from jax_dist.migrate.pmap_facts import PmapFacts
from jax_dist.migrate.recorded_flow import Component, FileFlow, Slot
from jax_dist.migrate.results import Left
from jax_dist.migrate.verify.evidence import Array, SiteRecord

STATIC = "static_broadcasted_argnums"
_MOST_SHOWN = 2  # places where a component gets its axis back
Path: TypeAlias = tuple[int, ...]  # of a result, through tuples


class Layout(enum.Enum):
    STACKED = "one slice for each device"
    SHARED = "the same on each device"
    MERGED = "the rows of all devices"


@dataclasses.dataclass(eq=False)
class Part:
    """A component, as it will be laid out."""

    component: Component
    layout: Layout = Layout.STACKED
    kept: str = ""  # why it is stacked
    made: list[Made] = dataclasses.field(default_factory=list)
    uses: list[Use] = dataclasses.field(default_factory=list)

    def keep(self, why: str) -> bool:
        """Keeps its axis; whether it had lost it."""
        changed = self.layout is not Layout.STACKED
        self.layout, self.kept = Layout.STACKED, self.kept or why
        return changed


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A place that maps, and how it was called."""

    site: Site
    record: SiteRecord
    arguments: int
    results: tuple[Path, ...]
    shared: frozenset[int]  # positions that are not mapped
    whole: frozenset[int]  # positions of results that are not
    numbers: frozenset[int]  # static numbers, which can be shared
    donated: frozenset[int]
    named: NamedCalls  # whose names are those of the last arguments

    def slot(self, side: str, path: Path) -> Slot:
        """What a run calls an argument or a result."""
        first = self.arguments - len(self.named.names)
        if side == "in" and path[0] >= first:
            return Slot(self.record.number, "word", (self.named.names[path[0] - first],))
        return Slot(self.record.number, side, path)


def mapped_place(site: Site, facts: PmapFacts, flow: FileFlow) -> Mapped:
    """Raises Left where the axis of a place cannot go."""
    if not site.is_application or site.fun is None:
        raise Left("what it maps cannot be seen there")
    if why := facts.unknown(site, but=STATIC):
        raise Left(why)
    if asked := facts.reader_of_specs:
        raise Left(f"{asked} decides by the spec of a sharding")
    record = flow.sites.get(site)
    if record is None:
        raise Left("no call of it alone was recorded")
    if flow.slices(site) is not None:
        raise Left("its calls have fewer slices than there are devices")
    for name in related_names.known_as(flow.module, site):
        if imports.is_used_elsewhere(flow.module, name):
            raise Left(f"other files may use {name}")
    if any(call.raised for call in record.calls):
        raise Left("a call of it raised an error")
    if record.inside or record.hidden:
        raise Left("it is also called inside of a larger traced function")
    if call := escape.unrun_call(flow, site, record.number):
        raise Left(f"line {call.lineno} may call it, and never ran")
    forms = flow.forms(record)
    calls = {each["arguments"] for each in forms if "arguments" in each}
    results = {tuple(map(tuple, each["results"])) for each in forms if "results" in each}
    if len(calls) != 1:
        raise Left("its calls differ in the number of arguments")
    if len(results) != 1:
        raise Left("its calls differ in the number of results")
    [given], [paths] = calls, results
    named = facts.named_calls(site)
    if named.names and (site.form != "call" or "in_axes" in site.arguments):
        raise Left("its calls give arguments by name")
    arguments = given + len(named.names)
    whole = _whole_results(site, paths)
    is_shared = pmap_facts.shared_positions(site)
    shared = {i for i in range(arguments) if is_shared is not None and is_shared(i)}
    default = ast.Constant(value=0)
    in_axes = site.arguments.get("in_axes", default)
    axes = in_axes.elts if isinstance(in_axes, ast.Tuple | ast.List) else [in_axes] * arguments
    if (
        is_shared is None
        or len(shared) == arguments
        or any(not pmap_facts.is_default(each) for i, each in enumerate(axes) if i not in shared)
    ):
        raise Left("its in_axes are not a flat tuple of 0 and None")
    static = flow.static(record)
    if any(kinds - {"int", "float"} for kinds in static.values()):
        raise Left("it has static arguments that are no numbers")
    donated = _donated(site, given)
    numbers = frozenset(static)
    return Mapped(site, record, arguments, paths, frozenset(shared), whole, numbers, donated, named)


def _whole_results(site: Site, paths: Sequence[Path]) -> frozenset[int]:
    """The positions of results without a mapped axis, of a tuple."""
    given = site.arguments.get("out_axes")
    if pmap_facts.is_default(given):
        return frozenset()
    parts = given.elts if isinstance(given, ast.Tuple) else []
    whole = {i for i, each in enumerate(parts) if pmap_facts.is_none(each)}
    known = all(pmap_facts.is_default(each) for i, each in enumerate(parts) if i not in whole)
    if not parts or not known or not all(path and path[0] < len(parts) for path in paths):
        raise Left("its out_axes are not a flat tuple of 0 and None")
    return frozenset(whole)


def _donated(site: Site, arguments: int) -> frozenset[int]:
    """The positions of what a place donates; all of them where the text does not say it."""
    numbers = site_parts.donated(site)
    return frozenset(range(arguments) if numbers is None else (n % arguments for n in numbers))


class Plan:
    """How each component is laid out."""

    def __init__(self, flow: FileFlow, mapped: Sequence[Mapped], facts: PmapFacts):
        self.flow: FileFlow = flow
        self.mapped: Sequence[Mapped] = mapped
        self.facts: PmapFacts = facts
        self._seen = Seen(flow, facts)
        self._by_number = {each.record.number: each for each in mapped}
        own = self._by_number.keys()
        self.parts: list[Part] = [Part(e) for e in flow.components if not own.isdisjoint(e.sites)]
        self._part_of = {slot: part for part in self.parts for slot in part.component.slots}
        for part in self.parts:
            self._begin(part)
        self.settle()

    def part(self, mapped: Mapped, side: str, path: Path) -> Part | None:
        """None where nothing has the axis: a shared or static argument, a result without arrays."""
        if _has_no_axis(mapped, side, path):
            return None
        return self._part_of.get(mapped.slot(side, path))

    def slots(self, mapped: Mapped) -> Iterator[Part]:
        """The parts of all arguments and results."""
        found = [self.part(mapped, "in", (i,)) for i in range(mapped.arguments)]
        found += [self.part(mapped, "out", path) for path in mapped.results]
        yield from (each for each in found if each is not None)

    def is_bare(self, mapped: Mapped) -> bool:
        return all(part.layout is not Layout.STACKED for part in self.slots(mapped))

    def is_free(self, mapped: Mapped) -> bool:
        return any(part.layout is not Layout.STACKED for part in self.slots(mapped))

    def reasons(self, mapped: Mapped) -> list[str]:
        return list(dict.fromkeys(part.kept for part in self.slots(mapped) if part.kept))

    # --- each by itself

    def _begin(self, part: Part) -> None:
        try:
            part.layout = self._layout(part)
        except Left as left:
            part.keep(left.reason)

    def _layout(self, part: Part) -> Layout:
        flow, slots, serials = self.flow, part.component.slots, part.component.serials
        if not part.component.sites <= self._by_number.keys():
            raise Left("another mapped function takes it, and stays")
        if any(_has_no_axis(self._by_number[s.site], s.side, s.path) for s in slots):
            raise Left("it is also what all devices share")
        self._seen.check(part.component)
        part.made = list(self._made(part))
        part.uses = [flow_uses.use_of(flow, node) for node in flow.holders(serials)]
        other_values.check(flow, serials)
        copies = {each.copies for each in part.made}
        inputs = [slot for slot in slots if slot.side == "in"]
        is_alike = all(map(_has_alike_rows, self._given(inputs)))
        unlike = self._unlike(part, Layout.SHARED) if is_alike else "its copies differ"
        if copies <= {True} and not unlike:
            return Layout.SHARED
        if copies == {True}:
            raise Left(unlike)
        if copies <= {False} and all(len(each.shape) > 1 for each in self._arrays(slots)):
            if not (why := self._unlike(part, Layout.MERGED)):
                return Layout.MERGED
            raise Left(why)
        raise Left("it has a slice for each device, and no rows")

    def _made(self, part: Part) -> Iterator[Made]:
        for node, found in flow_uses.makers(self.flow, part.component.serials):
            if node is None:
                raise Left("it is made where it is not seen")
            if found is None:
                text = " ".join(self.flow.module.text(node).split())
                raise Left(f"{text} of line {node.lineno} is not known to make copies or rows")
            yield found

    def _unlike(self, part: Part, layout: Layout) -> str:
        """Why its uses do not allow a layout; "" where they do."""
        by_way: dict[str, list[Use]] = {}
        for use in part.uses:
            by_way.setdefault(use.way, []).append(use)
        needing = by_way.get("needs axis", [])
        if layout is Layout.SHARED:
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

    def is_donated(self, part: Part) -> bool:
        """Whether a mapped function takes the memory of one of its arguments."""
        slots = (slot for slot in part.component.slots if slot.side == "in")
        return any(slot.path[0] in self._by_number[slot.site].donated for slot in slots)

    def may_differ(self, part: Part) -> bool:
        """Whether its copies may be other ones on each device in another run."""
        sites = {slot.site for slot in part.component.slots if slot.side == "out"}
        return any(map(self._chooses, sites))

    def _chooses(self, site: int) -> bool:
        """Whether a mapped function may sum over the devices in one run, and not in another."""
        module, function = self.flow.module, self._by_number[site].site.fun
        known = module.memo(fixed_programs.may_differ)
        if function not in known:
            known[function] = fixed_programs.may_differ(module, function)
        return known[function]

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

    def _keep_results(self, mapped: Mapped) -> bool:
        """Of results that are not shown to be the same on all devices."""
        alike = set(mapped.shared | mapped.numbers)
        for i in range(mapped.arguments):
            part = self.part(mapped, "in", (i,))
            if part is not None and part.layout is Layout.SHARED:
                alike.add(i)
        changed = False
        same = self.flow.alike_results(mapped.record, alike, mapped.results)
        for path, is_same in same.items():
            part = self.part(mapped, "out", path)
            if part is None or part.layout is not Layout.SHARED or is_same:
                continue
            slots = part.component.slots
            rows = all(len(each.shape) > 1 for each in self._arrays(slots))
            if not part.made and rows and not self._unlike(part, Layout.MERGED):
                part.layout, changed = Layout.MERGED, True
            else:
                which = ".".join(map(str, path))
                which = f"result {which}" if path else "what it returns"
                changed |= part.keep(f"{which} may differ from device to device")
        return changed

    def _keep_site(self, mapped: Mapped) -> bool:
        """Of arguments and results that would go unnoticed in several processes."""
        changed = False
        inputs = [self.part(mapped, "in", (i,)) for i in range(mapped.arguments)]
        merged = [e for e in inputs if e is not None and e.layout is Layout.MERGED]
        is_stacked = any(e is not None and e.layout is Layout.STACKED for e in inputs)
        if merged and not is_stacked:
            try:
                self.facts.check_one_process()
            except Left as left:
                for part in merged:
                    changed |= part.keep(left.reason)
        return changed


def _has_no_axis(mapped: Mapped, side: str, path: Path) -> bool:
    """Whether an argument or a result is not mapped."""
    if side == "in":
        return path[0] in mapped.shared | mapped.numbers
    return bool(path) and path[0] in mapped.whole


def _has_alike_rows(array: Array) -> bool:
    return len({*array.rows}) == 1
