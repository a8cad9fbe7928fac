"""Which arguments and results of a mapped function carry one state, as the text shows it.

Each argument and each result of a mapped function is a slot. What flows from a slot, or from a copy
made for each device, into another slot ties the two: they are laid out alike, or not at all. What
is not followed gets the values with the axis over devices in front, and gives them so.
"""

import ast
import dataclasses
import functools
from typing import Any, TypeAlias

from jax_dist.checker.model import flow, functions, pmaps, stacking
from jax_dist.checker.model.flow import Flow, Origin
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import device_counts, escapes, shard_map
from jax_dist.codemod.use_sites import Collected, Escaped, First, GivenTo, Kept, Shown, Uses


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
    kept: str = ""  # why the axis stays; "" where it can go

    @property
    def is_shared(self) -> bool:
        """Whether all devices can hold it alike, without the axis."""
        kinds = {source.kind for source in self.sources}
        if self.kept or not self.slots:
            return False
        results = any(isinstance(slot, Result) for slot in self.slots)
        is_read = bool(self.firsts or self.forests)
        return kinds == {Kind.REPLICATED} or (not kinds and is_read and results)


class Layouts:
    """The layouts of all slots of one file.

    Args:
      module: the file.
      sites: the mapped functions that may be changed.
    """

    def __init__(self, module: Module, sites: list[Site]):
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
            if told:
                self.keep_site(site, told)
        for node in self._uses.carriers():
            self._see_value(node)
        for slot, read in self._due:
            self._see_read(slot, read)

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
        depth = isinstance(source, Result) and source.position is not None
        if source is None:
            return
        if len(origin.path) > depth:
            why = f"line {argument.lineno} gives a part of what was made as a whole"
            self.keep_slot(slot, why)
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
                if site is None:
                    part.shown.append(node)
                else:
                    self._tie(known[0], Argument(site, position))
            case Kept(caution=caution) if caution and self._is_shown(node):
                part.shown.append(node)
            case Kept(reads=reads):
                self._due += ((known[0], read) for read in reads)
            case Collected(calls=forests):
                for call in forests:  # other values may be in the same list
                    self._tie(known[0], call)
                    if not any(call is each for each in self.component(call).forests):
                        self.component(call).forests.append(call)
            case Shown(node=shown):
                part.shown.append(shown)
            case Escaped() if self._is_shown(node):
                part.shown.append(node)
            case Escaped(why=why):
                self.keep_slot(known[0], why)

    def _is_shown(self, node: ast.expr) -> bool:
        """Whether what is not followed can have the value with the axis."""
        return self._uses.is_plain_read(node)

    def _see_mixture(self, node: ast.expr, slot: Slot, *, mixed: bool) -> None:
        """Where a value may also be another one, all of them must be alike."""
        origins = self._uses.origins(node)
        parameters = _given_parameters(self._module, node)
        if parameters <= self._given_to_calls:
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
        if not all(self._has_part(f, ()) for f in origin.through):
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
