"""Which arguments and results of mapped functions can do without the axis over devices in front.

Each argument and each result of a mapped function is a slot. What flows from a slot, or from a copy
made for each device, into another slot ties the two: they are laid out alike, or not at all. A slot
keeps its axis where anything is done with its values that is not followed.
"""

import ast
import dataclasses
import enum
import functools
import types
from collections.abc import Mapping
from typing import Any, TypeAlias

from jax_dist.checker.model import flow, functions, pmaps, stacking
from jax_dist.checker.model.flow import Flow, Origin
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import device_counts, escapes, shard_map, uniformity
from jax_dist.codemod.uniformity import Same
from jax_dist.codemod.use_sites import Collected, Escaped, First, GivenTo, Kept, Shown, Uses


class AxisLayout(enum.Enum):
    """How the values of a slot lie on the devices."""

    STACKED = "a device axis in front"
    SHARED = "whole on each device"
    SPLIT = "one global array, cut along its first dimension"


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument of a mapped function."""

    site: Site
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One result of a mapped function; position None: all that it returns."""

    site: Site
    position: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotSource:
    """A copy for each device, or a split by their number, and of what."""

    node: ast.Call
    of: ast.expr
    kind: Kind
    devices: ast.expr | None = None  # the first of all devices, where copies are on these alone


Slot: TypeAlias = Argument | Result | ast.expr  # the expression of a source


@dataclasses.dataclass(slots=True)
class Component:
    """Slots that are laid out alike."""

    slots: list[Slot] = dataclasses.field(default_factory=list)
    sources: list[SlotSource] = dataclasses.field(default_factory=list)
    firsts: list[First] = dataclasses.field(default_factory=list)
    forests: list[ast.Call] = dataclasses.field(default_factory=list)  # of get_metrics
    shown: list[ast.expr] = dataclasses.field(default_factory=list)  # where others see the axis
    donors: list[Site] = dataclasses.field(default_factory=list)  # that donate one of the slots
    kept: str = ""  # why the axis stays; "" where it can go
    cautions: list[str] = dataclasses.field(default_factory=list)

    @property
    def layout(self) -> AxisLayout:
        """What the slots can be."""
        kinds = {source.kind for source in self.sources}
        if self.kept or not self.slots:
            return AxisLayout.STACKED
        if kinds == {Kind.REPLICATED}:
            return AxisLayout.SHARED
        results = any(isinstance(slot, Result) for slot in self.slots)
        if kinds == {Kind.SPLIT}:
            return (
                AxisLayout.STACKED if results or self.firsts or self.forests else AxisLayout.SPLIT
            )
        if not kinds and (self.firsts or self.forests) and results:
            return AxisLayout.SHARED
        return AxisLayout.STACKED


class Layouts:
    """The layouts of all slots of one file.

    Args:
      module: the file.
      sites: the mapped functions that may be changed.
      stacked_for_others: what is not followed gets the values with the axis in front, and gives
        them so; and what differs from device to device may lose it.
      keeping: those of which nothing is changed, each with the reason.
    """

    def __init__(
        self,
        module: Module,
        sites: list[Site],
        *,
        stacked_for_others: bool = False,
        keeping: Mapping[Site, str] = types.MappingProxyType({}),
    ):
        self._stacked_for_others = stacked_for_others
        self._module = module
        self._flow: Flow = flow.of(module)
        self._uses = Uses(module)
        self._sites = {site.node: site for site in sites}
        self._site_of: dict[Any, Site] = {  # by a call of what it maps
            call: self._sites[site.node]
            for call, site in self._flow.mapped_calls.items()
            if site.node in self._sites
        }
        self._calls: dict[Site, list[ast.Call]] = {site: [] for site in sites}
        for call, site in self._site_of.items():
            self._calls[site].append(call)
        self._arity: dict[Site, int | None] = {}  # how many results, where all calls unpack as many
        for site in sites:
            counts = {_targets(module, call) for call in self._calls[site]}
            self._arity[site] = counts.pop() if len(counts) == 1 else None
        self._up: dict[Slot, Slot] = {}
        self._parts: dict[Slot, Component] = {}
        self._seen: set[ast.expr] = set()  # sources
        self._due: list[tuple[Slot, ast.expr]] = []  # each read must turn out to be of the slot
        told = _read_by_text(module)
        for site in sites:
            self._see_site(site)
            if why := told or keeping.get(site):
                self.keep_site(site, why)
        for node in self._uses.carriers():
            self._see_value(node)
        for slot, read in self._due:
            self._see_read(slot, read)
        for site in sites:
            self._see_donations(site)
        while not (stacked_for_others or all([self._are_same(site) for site in sites])):
            pass  # what is kept now differs for the functions that it is given to

    def arguments(self, site: Site) -> list[Argument] | None:
        """One slot for each positional argument; None where calls differ in their number."""
        given = [call.args for call in self._calls[site]]
        counts = set(map(len, given))
        if len(counts) != 1 or any(
            isinstance(each, ast.Starred) for args in given for each in args
        ):
            return None
        return [Argument(site, position) for position in range(counts.pop())]

    def results(self, site: Site) -> list[Result]:
        """One slot for each result, or one for all."""
        arity = self._arity[site]
        if arity is None:
            return [Result(site, None)]
        return [Result(site, position) for position in range(arity)]

    def has_named_arguments(self, site: Site) -> bool:
        """Whether a call gives arguments by name, which pmap maps over their first dimension."""
        return any(call.keywords for call in self._calls[site])

    def donating_calls(self, part: Component) -> list[ast.Call]:
        """The calls that donate one of the slots."""
        return [call for site in part.donors for call in self._calls[site]]

    # --- what flows

    def _see_site(self, site: Site) -> None:
        for slot in self.results(site):
            self.component(slot)
        lost = self._uses.unseen(site)
        if lost or not self._calls[site]:
            self.keep_site(
                site, lost or f"no call of it is seen; it is made in line {site.node.lineno}"
            )
        if self._calls[site] and self.arguments(site) is None:
            self.keep_site(site, "its calls differ in the number of arguments")
        for call in self._calls[site]:
            for position, argument in enumerate(call.args):
                slot = Argument(site, position)
                for origin in self._flow.origins(argument):
                    self._flows_in(origin, slot, argument)

    def keep_site(self, site: Site, why: str) -> None:
        """All slots of a site keep the axis."""
        given = {position for call in self._calls[site] for position in range(len(call.args))}
        for slot in (*self.results(site), *(Argument(site, each) for each in sorted(given))):
            self.keep_slot(slot, why)

    def _flows_in(self, origin: Origin, slot: Slot, argument: ast.expr) -> None:
        source = self._slot_of(origin)
        if self._stacked_for_others:
            depth = isinstance(source, Result) and source.position is not None
            if source is None:
                return
            if len(origin.path) > depth:
                why = f"line {argument.lineno} gives a part of what was made as a whole"
                self.keep_slot(slot, why)
                return
        if source is None:
            text = self._module.text(argument)
            self.keep_slot(
                slot, f"nothing shows that {text} in line {argument.lineno} is replicated"
            )
        else:
            self._tie(source, slot)

    def _see_value(self, node: ast.expr) -> None:
        """A name, attribute or call with a device axis in front: what is done with it."""
        made_by = self._site_of.get(node)
        if made_by is not None and self._arity[made_by] is not None:
            self._see_unpacked(made_by, node)
            return
        slots = [self._slot_of(origin) for origin in self._uses.origins(node)]
        known = [slot for slot in slots if slot is not None]
        if not known:
            return
        for slot in known[1:]:
            self._tie(known[0], slot)
        self._see_mixture(node, known[0], mixed=len(known) < len(slots))
        part = self.component(known[0])
        if self._is_handed_over(node):
            part.shown.append(node)
            return
        match self._uses.use_of(node):
            case First() as first:
                part.firsts.append(first)
            case GivenTo(call=call, position=position):
                site = self._site_of.get(call)
                if site is None and self._stacked_for_others:
                    part.shown.append(node)
                elif site is None:
                    self.keep_slot(
                        known[0], f"line {call.lineno} gives it to a mapped function that stays"
                    )
                else:
                    self._tie(known[0], Argument(site, position))
            case Kept(caution=caution) if caution and self._is_shown(node):
                part.shown.append(node)
            case Kept(reads=reads, caution=caution):
                self._due += ((known[0], read) for read in reads)
                self._caution(part, caution)
            case Collected(calls=forests):
                for call in forests:  # other values may be in the same list
                    self._tie(known[0], call)
                    if not any(call is each for each in self.component(call).forests):
                        self.component(call).forests.append(call)
            case Shown(node=shown, to=function):
                part.shown.append(shown)
                self._caution(part, f"line {shown.lineno} puts it back for {function}")
            case Escaped() if self._is_shown(node):
                part.shown.append(node)
            case Escaped(why=why):
                self.keep_slot(known[0], why)

    def _is_shown(self, node: ast.expr) -> bool:
        """Whether what is not followed can have the value with the axis."""
        return self._stacked_for_others and self._uses.is_plain_read(node)

    def _see_mixture(self, node: ast.expr, slot: Slot, *, mixed: bool) -> None:
        """Where a value may also be another one, all of them must be alike."""
        origins = self._uses.origins(node)
        parameters = _given_parameters(self._module, node)
        if self._stacked_for_others and parameters <= self._given_to_calls:
            given = self._given_to_calls  # mapped calls take the same values, with the axis
            if all(each.is_stacked or (each.node, each.path) in given for each in origins):
                return
        if mixed:
            self.keep_slot(slot, f"line {node.lineno} mixes it with values that are not followed")
        if parameters:
            text = self._module.text(node)
            self.keep_slot(slot, f"other files may give {text} of line {node.lineno}")

    @functools.cached_property
    def _given_to_calls(self) -> set[Any]:
        """What mapped calls map over: `(node, path)` of origins, and parameters."""
        found: set[Any] = set()
        for call, site in self._flow.mapped_calls.items():
            is_shared = shard_map.shared_positions(site)
            for position, argument in enumerate(call.args):
                if is_shared is not None and not is_shared(position):
                    found |= _given_parameters(self._module, argument)
                    for origin in self._uses.origins(argument):
                        found.add((origin.node, origin.path))
        return found

    def _see_read(self, slot: Slot, read: ast.expr) -> None:
        """Where a value is read again, the way back must lead to where it came from."""
        found = [self._slot_of(origin) for origin in self._uses.origins(read)]
        if not any(each is not None and self._root(each) == self._root(slot) for each in found):
            text = self._module.text(read)
            self.keep_slot(slot, f"it is not followed to {text} in line {read.lineno}")

    def _see_unpacked(self, site: Site, call: ast.expr) -> None:
        """Each result of a mapped function goes into a name of its own."""
        use = self._uses.use_of(call)
        if isinstance(use, Escaped):
            self.keep_site(site, use.why)
            return
        targets: Any = self._module.parent(call)
        for slot, target in zip(self.results(site), targets.targets[0].elts, strict=True):
            found = escapes.from_target(self._module, target, target)
            if isinstance(found, Kept):
                self._due += ((slot, read) for read in found.reads)

    def _is_handed_over(self, node: ast.expr) -> bool:
        """Whether a function without mapped calls gets the value: with the axis, as before."""
        if not self._is_shown(node):
            return False
        call = self._uses.call_given(node)
        if call is None or call in self._flow.mapped_calls:
            return False
        function = pmaps.definition(self._module, call.func)
        return function is not None and not self._has_part(function, ())

    def _has_part(self, function: Any, around: tuple[Any, ...]) -> bool:
        """Whether a function, or one that it calls, calls what may be changed."""
        calls = [each for each in functions.all_nodes(function) if isinstance(each, ast.Call)]
        inner = (pmaps.definition(self._module, each.func) for each in calls)
        return not self._site_of.keys().isdisjoint(calls) or any(
            self._has_part(each, (*around, function))
            for each in inner
            if each is not None and each is not function and each not in around
        )

    def _slot_of(self, origin: Origin) -> Slot | None:
        if origin.on_host or not _stays_inside(self._module, origin):
            return None
        if self._stacked_for_others and not all(self._has_part(f, ()) for f in origin.through):
            return None
        if origin.site is not None:
            site = self._sites.get(origin.site.node)
            if site is None:
                return None
            if self._arity[site] is None:
                return Result(site, None)
            if origin.path and isinstance(origin.path[0], int):
                return Result(site, origin.path[0])
            line = origin.node.lineno
            for slot in self.results(site):
                self.keep_slot(slot, f"all results are used as one value in line {line}")
            return None
        module, node = self._module, origin.node
        if origin.kind not in (Kind.REPLICATED, Kind.SPLIT) or origin.of is None:
            return None
        if not isinstance(node, ast.Call):
            return None
        name = module.qualified_name(node.func)
        by_map = name is None and isinstance(node.func, ast.Name) and node.func.id == "map"
        if by_map or name in stacking.PREFETCH:
            return None  # the value is an element of what the node makes
        if node not in self._seen:
            self._seen.add(node)
            devices = device_counts.first_devices(module, node)
            self.component(node).sources.append(SlotSource(node, origin.of, origin.kind, devices))
            if why := device_counts.why_not(module, node):
                self.keep_slot(node, f"of {module.text(node.func)} in line {node.lineno} {why}")
        return node

    def _see_donations(self, site: Site) -> None:
        """A split copies its batch; without it, the batch itself would be donated."""
        given = site.arguments.get("donate_argnums")
        if given is None or (isinstance(given, ast.Constant) and given.value is None):
            return
        parts = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        donated: list[Any] = [
            each.value if isinstance(each, ast.Constant) else "" for each in parts
        ]
        if any(type(position) is not int for position in donated):
            self.keep_site(site, "donate_argnums is no literal that counts from the front")
            return
        for position in donated:
            part = self.component(Argument(site, position))
            part.donors.append(site)
            if any(source.kind is Kind.SPLIT for source in part.sources):
                part.kept = part.kept or "it is donated, and the batch that it is made of is not"

    def _are_same(self, site: Site) -> bool:
        """Whether nothing had to be kept: what differs from device to device needs the axis."""
        arguments = self.arguments(site) or []
        shared = [self.component(slot).layout is AxisLayout.SHARED for slot in arguments]
        parts = [self.component(slot) for slot in arguments] if all(shared) else []
        some = [part for part in parts if any(each.devices is not None for each in part.sources)]
        for part in some:
            part.kept = "its copies are on some of the devices, and no other argument shows which"
        if some:
            return False
        results = self.results(site)
        arity = None if results[0].position is None else len(results)
        by_name = {each.arg for call in self._calls[site] for each in call.keywords}
        found = uniformity.of_results(self._module, site, shared, by_name, arity)
        done = True
        for slot, same in zip(results, found, strict=True):
            part = self.component(slot)
            if part.layout is not AxisLayout.SHARED or same is Same.YES:
                continue
            which = "what it returns" if slot.position is None else f"result {slot.position}"
            part.kept, done = f"nothing shows that {which} is the same on each device", False
            if same is Same.NO:
                part.kept = f"{which} differs from device to device"
        return done

    def _caution(self, part: Component, caution: str) -> None:
        if caution and caution not in part.cautions:
            part.cautions.append(caution)

    # --- ties

    def _root(self, slot: Slot) -> Slot:
        while slot in self._up:
            slot = self._up[slot]
        return slot

    def component(self, slot: Slot) -> Component:
        """The slots that are laid out like this one."""
        root = self._root(slot)
        if root not in self._parts:
            self._parts[root] = Component([root] if not isinstance(root, ast.expr) else [])
        return self._parts[root]

    def keep_slot(self, slot: Slot, why: str) -> None:
        """A slot keeps the axis, and what is laid out like it."""
        part = self.component(slot)
        part.kept = part.kept or why

    def _tie(self, one: Slot, two: Slot) -> None:
        into, gone = self.component(one), self.component(two)
        if into is gone:
            return
        root = self._root(two)
        self._up[root] = self._root(one)
        del self._parts[root]
        for field in dataclasses.fields(Component):  # `kept` is text, all others are lists
            if field.name != "kept":
                getattr(into, field.name).extend(getattr(gone, field.name))
        into.kept = into.kept or gone.kept


def _targets(module: Module, call: ast.Call) -> int | None:
    """How many names the result of a call is unpacked into."""
    match module.parent(call):
        case ast.Assign(targets=[ast.Tuple(elts=parts) | ast.List(elts=parts)]):
            is_known = not any(isinstance(each, ast.Starred) for each in parts)
            return len(parts) if is_known else None
    return None


def _read_by_text(module: Module) -> str:
    """Where names are read by their text, which is not followed; "" where nothing does that."""
    for scope in module.scopes.all:
        for name in ("locals", "globals", "vars", "exec", "eval"):
            for load in scope.loads.get(name, ()):
                call = module.parent(load)
                is_call = isinstance(call, ast.Call) and call.func is load
                if is_call and name == "vars" and call.args:  # type: ignore[union-attr]
                    continue
                if is_call and scope.lookup(name) is None:
                    return f"line {load.lineno} calls {name}"
    for name in ("f_locals", "f_globals", "__globals__"):
        for node in escapes.attributes(module, name):
            return f"line {node.lineno} reads {name}"
    return ""


def _stays_inside(module: Module, origin: Origin) -> bool:
    """Whether the functions it came through are called from this file only, in plain words."""
    return all(
        isinstance(function, ast.Lambda) or escapes.is_followed(module, function)
        for function in origin.through
    )


def _given_parameters(module: Module, node: ast.expr) -> set[ast.AST]:
    """The parameters of functions that other files may call, whose values a name may hold."""
    found: set[ast.AST] = set()
    waiting, seen = [node], set()
    while waiting:
        name = waiting.pop()
        if not isinstance(name, ast.Name) or name in seen:
            continue
        seen.add(name)
        for binding in module.reaching(name) or ():
            if binding.kind == "parameter":
                function: Any = module.parent(module.parent(binding.node))
                if not isinstance(function, ast.Lambda) and not escapes.is_followed(
                    module, function
                ):
                    found.add(binding.node)
            elif binding.kind == "assign" and binding.value is not None:
                waiting.append(binding.value)
    return found
