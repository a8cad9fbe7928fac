"""`--to global`: a pmap trainer whose state is cut over the devices, by `jax_dist.global_view`.

The step stays as it is, and so do its batches and its other results, which keep their device axis.
A run of the program has shown which arguments come back as results, what makes them and what reads
them (`recorded_flow`). Only that state changes its form: it is placed where it was replicated, read
where one copy was taken, and given to other functions as pmap has it. Which of its leaves are the
same on all devices is found when the step is traced. A step is migrated whole, or left whole with
the reason.
"""

import ast
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.codegen import Namer, Style, Texts
from jax_dist.migrate.device_axis import flow_uses, layouts
from jax_dist.migrate.device_axis.flow_uses import Made, Use
from jax_dist.migrate.device_axis.layouts import Mapped
from jax_dist.migrate.device_axis.unrun import Seen
from jax_dist.migrate.pmap_facts import PmapFacts
from jax_dist.migrate.recorded_flow import Component, FileFlow, Slot
from jax_dist.migrate.results import UNPROVED, UNSHOWN, Left, PlaceResult, PlannedPlace

_CODE = _codes.PMAP_CALL
_BY_HAND = "Call jax_dist.global_view by hand: the page on sharded parameters shows how."
# What a global view takes of what pmap takes.
_TAKEN = frozenset(
    ("axis_name", "in_axes", "out_axes", "static_broadcasted_argnums", "donate_argnums")
)
_FORMS = ("call", "partial decorator")
_OTHER_STEP = "another mapped function carries the same state"


def find(
    module: Module,
    style: Style,
    namer: Namer,
    facts: PmapFacts,
    flow: FileFlow | None,
    is_left: Callable[[PlaceResult], bool],
) -> list[PlannedPlace]:
    """The steps of a file whose state can be cut, with their states; then those that stay.

    Args:
      module: the file.
      style, namer: how it is written.
      facts: what is known of its places.
      flow: what a run has shown; None: nothing.
      is_left: whether a place must stay as it is, and so its step with all of its state.
    """
    left: dict[ast.expr, Left] = {}
    fit: list[Mapped] = []
    for site in pmaps.sites(module):
        try:
            _check(site, facts)
            if flow is None:
                raise Left(UNSHOWN, "Add --verify and a command that runs it.")
            place = layouts.mapped_place(site, facts, flow)
            if place.whole:
                raise Left("it has out_axes")
            fit.append(place)
        except Left as why:
            left[site.reference] = why
    # A step takes a batch too; what only synchronises a state does not, and leaves it to the step.
    fit.sort(key=lambda each: -each.arguments)
    found: list[PlannedPlace] = []
    taken: list[tuple[Component, Site]] = []  # by which step
    for mapped in fit:
        assert flow is not None
        try:
            parts = _state(mapped, flow, Seen(flow, facts))
            for component, site in taken:
                if any(part.component is component for part in parts):
                    raise Left(_OTHER_STEP, _BY_HAND, f"line {site.node.lineno}")
            places = _Edits(flow, mapped.site, parts, style, namer).places()
            if any(is_left(place.outcome) for place in places):
                raise Left(UNPROVED)
            found += places
            taken += ((part.component, mapped.site) for part in parts)
        except Left as why:
            left[mapped.site.reference] = why
    return found + [PlannedPlace.left(module, each, _CODE, why) for each, why in left.items()]


def _check(site: Site, facts: PmapFacts) -> None:
    """Raises Left where it cannot be a global view, whatever its state."""
    if site.form not in _FORMS or site.fun is None:
        raise Left("the mapped function is not written in one place", _BY_HAND)
    if site.unknown:
        raise Left(f"its options come from {site.unknown}", _BY_HAND)
    name = site.arguments.get("axis_name")
    if name is None or (isinstance(name, ast.Constant) and name.value is None):
        raise Left("it has no axis name, so that no collective makes anything the same")
    for option in sorted(site.arguments.keys() - _TAKEN):
        raise Left(f"it has {option}, and a global view runs on a mesh", _BY_HAND)
    if facts.several_processes:
        raise Left(
            "the program may run in several processes, where one cannot read a state that is cut",
            "If it never does, say so by --one-process.",
            facts.sign,
        )


@dataclasses.dataclass(frozen=True)
class _Part:
    """One argument of a step that comes back as a result."""

    position: int
    component: Component
    made: Sequence[Made]  # where it is replicated
    uses: Sequence[Use]  # what reads it, but for the step


def _state(mapped: Mapped, flow: FileFlow, seen: Seen) -> list[_Part]:
    """What a step carries and is replicated; other values that it carries keep the axis.

    Raises Left where nothing is, or it cannot be followed.
    """
    number = mapped.record.number
    found: list[_Part] = []
    left: list[Left] = []
    results: list[int] = []  # the positions of what comes back
    for position in range(mapped.arguments):
        slot = Slot(number, "in", (position,))
        component = next((each for each in flow.components if slot in each.slots), None)
        own = () if component is None else component.slots
        outs = {
            path[0] if path else 0 for site, side, path in own if (site, side) == (number, "out")
        }
        if component is None or not outs:
            continue
        try:
            found.append(_part(position, component, mapped, flow, seen))
            results += sorted(outs)
        except Left as why:
            left.append(why)
    if not found:
        nothing = Left("no argument of it comes back as a result, so that it has no state to cut")
        raise left[0] if left else nothing
    if len({id(part.component) for part in found}) < len(found):
        raise Left("two of its arguments may be one state", _BY_HAND)
    if results != [*range(len(found))]:
        # A global view takes the first results of the structure of a state for the new one.
        raise Left("its new state is not its first result", _BY_HAND)
    return found


def _part(position: int, component: Component, mapped: Mapped, flow: FileFlow, seen: Seen) -> _Part:
    """Raises Left where a state cannot be followed."""
    try:
        seen.check(component)
    except Left as why:
        raise Left("its state is not followed to the end", _BY_HAND, why.reason) from why
    made = [each for _, each in flow_uses.makers(flow, component.serials) if each is not None]
    # What else gives it, such as another mapped function, has the axis, and the step takes it so.
    copies = [each for each in made if each.copies and each.of is not None]
    if not copies or len(copies) < len(made):
        raise Left(
            f"nothing shows where its argument {position} is replicated",
            "Replicate it in the same file, or call jax_dist.global_view by hand.",
        )
    if any(each.devices is not None for each in copies):
        raise Left("its state is replicated on chosen devices", _BY_HAND)
    _check_steps(component, mapped, flow)
    own = flow.results(mapped.record).union(*(flow.serials(each.node) for each in made))
    holders = flow.holders(own & component.serials)
    uses = [use for node in holders if (use := _use(flow, mapped, node)) is not None]
    for use in uses:
        if use.way == "forest":
            raise Left("get_metrics takes its state", _BY_HAND, f"line {use.node.lineno}")
        if not use.can_show:
            raise Left("its state is not followed to the end", _BY_HAND, use.said)
    return _Part(position, component, copies, uses)


def _use(flow: FileFlow, mapped: Mapped, node: ast.expr) -> Use | None:
    """What reads a value of the state, and is not the step; None where it goes on as it is."""
    around = flow.module.parent(node)
    if isinstance(around, ast.Call) and around.func is not node:
        others = flow.called_sites(around) & flow.takers(flow.serials(node))
        if others - {mapped.record.number}:
            return Use("needs axis", node, node, "another mapped function takes it")
    use = flow_uses.use_of(flow, node)
    return None if use.way == "passes" else use


def _check_steps(component: Component, mapped: Mapped, flow: FileFlow) -> None:
    """That no other step carries the state too: each call would copy it. Raises Left."""
    module, own = flow.module, mapped.record.number
    sides = {side: {s.site for s in component.slots if s.side == side} for side in ("in", "out")}
    others = (sides["in"] & sides["out"]) - {own}
    statements = [(module.statement(n), flow.called_sites(n)) for n in flow.nodes]
    blocks = [module.scopes.block_of(statement) for statement, sites in statements if own in sites]
    for statement, sites in statements:
        if not sites.isdisjoint(others) and any(statement in block for block in blocks if block):
            raise Left(_OTHER_STEP, _BY_HAND, f"line {statement.lineno}")


class _Edits:
    """What is written for one function and its state. Raises Left where a name is not known."""

    def __init__(
        self, flow: FileFlow, site: Site, parts: Sequence[_Part], style: Style, namer: Namer
    ):
        self._module, self._site, self._parts = flow.module, site, parts
        self._name, self._scope = _bound(flow.module, site)
        self._style, self._namer = style, namer
        self._group = f"state of {site.node.lineno}:{site.node.col_offset}"

    def places(self) -> list[PlannedPlace]:
        """All of them."""
        return [self._mapped(), *(place for part in self._parts for place in self._of(part))]

    def _of(self, part: _Part) -> Iterator[PlannedPlace]:
        """Where the state is put in place, and where it is read."""
        argument = f", argument={part.position}" if len(self._parts) > 1 else ""
        for made in part.made:
            assert made.of is not None
            end, said = f", stacked=False{argument})", "the state, cut over the devices"
            name = self._placed_below(made)
            if name:
                yield self._around(made.node, made.of, "", "", said)
                yield self._added(f"{name} = {self._name}.place({name}{end}", said)
            else:
                self._check_reach(made.node, "replicated")
                yield self._around(made.node, made.of, f"{self._name}.place(", end, said)
        for use in part.uses:
            self._check_reach(use.node, "read")
            if use.way == "first":
                said = "the state of one device"
                yield self._around(use.node, use.of, f"{self._name}.first(", ")", said)
            else:
                said = "the state as pmap has it, for a function that takes it so"
                yield self._around(use.of, use.of, f"{self._name}.stacked(", ")", said)

    def _placed_below(self, source: Made) -> str:
        """The name that can be put in place below the step, for its state is made above; or ""."""
        module, step = self._module, self._module.statement(self._site.node)
        made = module.statement(source.node)
        match made:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                is_whole = value is source.node and module.scope(target) is self._scope
            case _:
                return ""
        block = module.scopes.block_of(step)
        if not is_whole or not any(made is each for each in block) or step.lineno < made.lineno:
            return ""
        bound = [each.node for each in self._scope.bindings[name] if each.node is not target]
        uses: list[Any] = [*module.reads(self._scope, name), *bound]
        if any(made.lineno < each.lineno <= (step.end_lineno or 0) for each in uses):
            return ""
        if self._module.source.code[self._module.span(step)[1] :].lstrip(b" \t").startswith(b";"):
            return ""
        return name

    def _added(self, line: str, said: str) -> PlannedPlace:
        """A statement below the step, and below the comment that follows it."""
        module, step = self._module, self._site.node
        end = module.span(module.statement(step))[1]
        rest = module.source.code[end:].partition(b"\n")[0].rstrip()
        end += len(rest) if rest.lstrip().startswith(b"#") else 0
        indent = self._texts(step).indent_of(step)
        return self._place(step, [Edit(end, end, f"\n{indent}{line}")], said)

    def _check_reach(self, node: ast.expr, done: str) -> None:
        """That the name means the step there. Raises Left."""
        found = self._module.scope(node).lookup(self._name)
        is_seen = found is not None and found[0] is self._scope
        inside = self._module.scope(node) is not self._scope
        below = scopes.place(node) > scopes.place(self._site.node)
        if not is_seen:
            raise Left(
                f"its state is {done} where its name is not known",
                f"Make {self._name} where its state is made.",
                f"line {node.lineno}",
            )
        if not below and not (inside and self._scope is self._module.scopes.module):
            raise Left(
                f"its state is {done} above the step",
                f"Move {self._name} above line {node.lineno}, then migrate again.",
                f"line {node.lineno}",
            )

    # --- the text

    def _texts(self, node: ast.expr) -> Texts:
        return Texts(self._module, node, self._style, self._namer)

    def _mapped(self) -> PlannedPlace:
        """The new name, and what is said of the state."""
        site, module = self._site, self._module
        name = self._namer.named(module, "global_view", site.reference)
        call: Any = site.node
        given = (*call.args, *(word.value for word in call.keywords))
        end = max(module.span(each)[1] for each in given)
        positions = ", ".join(str(part.position) for part in self._parts)
        state = positions if len(self._parts) == 1 else f"({positions})"
        quote = self._style.quote
        more = f", state={state}, shardings={quote}fsdp{quote}"
        edits = (Edit(*module.span(site.reference), name.text), *name.edits, Edit(end, end, more))
        title = "use jax_dist.global_view"
        fix = Fix(title, Safety.UNSAFE, tuple(sorted(edits)), name.imports, self._group)
        said = f"its state, argument {positions}, is cut over the devices"
        return PlannedPlace.done(module, site.reference, _CODE, fix, said)

    def _around(
        self, node: ast.expr, of: ast.expr, start: str, end: str, said: str
    ) -> PlannedPlace:
        return self._place(node, self._texts(node).shell(of, start, end), said)

    def _place(self, node: ast.expr, edits: Iterable[Edit], said: str) -> PlannedPlace:
        return self._texts(node).place(_CODE, edits, self._group, said)


def _bound(module: Module, site: Site) -> tuple[str, scopes.NameScope]:
    """The name of the mapped function, and the scope that binds it, once. Raises Left."""
    around, name, at = module.parent(site.node), "", site.node
    if site.form == "call" and isinstance(around, ast.Assign) and len(around.targets) == 1:
        target = around.targets[0]
        if isinstance(target, ast.Name):
            name, at = target.id, target
    elif site.form == "partial decorator":
        name, at = site.fun.name, site.fun
    found = module.scope(at).lookup(name) if name else None
    if site.form == "partial decorator" and found is not None and found[0].is_class:
        found = None
    if found is None or len(found[1]) != 1:
        raise Left("the mapped function has no name of its own, bound once", _BY_HAND)
    return name, found[0]
