"""`--to global`: a pmap trainer whose state is cut over the devices, by `jax_dist.global_view`.

The step stays as it is, and so do its batches and its other results, which keep their device axis.
Only the state changes its form: it is placed where it was replicated, read where one copy was
taken, and given to other functions as pmap has it. Which of its leaves are the same on all devices
is found when the step is traced, so the text need not show it. A step is migrated whole, or left
whole with the reason.
"""

import ast
import os
from collections.abc import Iterable, Iterator
from typing import Any

from jax_dist import _codes
from jax_dist.checker.model import flow, functions, pmaps, scopes, stacking
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod.axis_layout import (
    Argument,
    Component,
    Layouts,
    Result,
    SlotSource,
)
from jax_dist.codemod.codegen import Namer, Style, Texts
from jax_dist.codemod.results import Left, PlannedPlace
from jax_dist.codemod.shard_map import PmapFacts, is_default

_CODE = _codes.PMAP_CALL
_BY_HAND = "Call jax_dist.global_view by hand: the page on sharded parameters shows how."
# What a global view takes of what pmap takes.
_TAKEN = frozenset(
    ("axis_name", "in_axes", "out_axes", "static_broadcasted_argnums", "donate_argnums")
)
_FORMS = ("call", "partial decorator")


def find(
    module: Module, project: Project, style: Style, namer: Namer, facts: PmapFacts
) -> list[PlannedPlace]:
    """The steps of a file whose state can be cut, with their states; then those that stay."""
    left: dict[ast.expr, Left] = {}
    fit: list[tuple[Site, Layouts]] = []
    for site in pmaps.sites(module):
        try:
            _check(site, facts)
        except Left as why:
            left[site.reference] = why
        else:
            fit.append((site, Layouts(module, [site])))
    # A step takes a batch too; what only synchronises a state does not, and leaves it to the step.
    fit.sort(key=lambda each: -len(each[1].arguments(each[0]) or []))
    found: list[PlannedPlace] = []
    placed: dict[ast.expr, Site] = {}  # by which step
    for site, layouts in fit:
        try:
            state = _CarriedState(module, project, layouts, site)
            edited = _Edits(state, style, namer).places()
            state.take(placed)
        except Left as why:
            left[site.reference] = why
        else:
            found += edited
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


class _CarriedState:
    """One mapped function and its state. Raises Left where that cannot be followed.

    `layouts` are those of this function alone.
    """

    def __init__(self, module: Module, project: Project, layouts: Layouts, site: Site):
        self.module, self.site = module, site
        self._project, self._layouts = project, layouts
        own = {id(layouts.component(slot)) for slot in layouts.results(site)}
        arguments = enumerate(layouts.arguments(site) or [])
        carried = [number for number, slot in arguments if id(layouts.component(slot)) in own]
        if not carried:
            raise Left("no argument of it comes back as a result, so that it has no state to cut")
        self.name, self.scope = self._bound()
        self.parts = self._states(carried)  # by the positions of the arguments

    def take(self, placed: dict[ast.expr, Site]) -> None:
        """Notes what this step puts in place, which no other step then does."""
        sources = [source.node for part in self.parts.values() for source in part.sources]
        for source in sources:
            if source in placed:
                line = placed[source].node.lineno
                raise Left(
                    "another mapped function carries the same state", _BY_HAND, f"line {line}"
                )
        placed.update(dict.fromkeys(sources, self.site))

    def _states(self, carried: list[int]) -> dict[int, Component]:
        """What is replicated, by position; other values that are carried keep the axis."""
        found: dict[int, Component] = {}
        left: list[Left] = []
        for number in carried:
            part = self._layouts.component(Argument(self.site, number))
            try:
                self._check(number, part)
            except Left as why:
                left.append(why)
            else:
                found[number] = part
        if not found:
            raise left[0]
        if len({id(part) for part in found.values()}) < len(found):
            raise Left("two of its arguments may be one state", _BY_HAND)
        order = []
        for number in sorted(found):
            slots = [slot for slot in found[number].slots if isinstance(slot, Result)]
            order += [slot.position or 0 for slot in slots]
        if order != [*range(len(found))]:
            # A global view takes the first results of the structure of a state for the new one.
            raise Left("its new state is not its first result", _BY_HAND)
        return found

    def _bound(self) -> tuple[str, scopes.NameScope]:
        """The name of the mapped function, and the scope that binds it, once. Raises Left."""
        site, around = self.site, self.module.parent(self.site.node)
        name, at = "", site.node
        if site.form == "call" and isinstance(around, ast.Assign) and len(around.targets) == 1:
            target = around.targets[0]
            if isinstance(target, ast.Name):
                name, at = target.id, target
        elif site.form == "partial decorator":
            name, at = site.fun.name, site.fun
        found = self.module.scope(at).lookup(name) if name else None
        if site.form == "partial decorator" and found is not None and found[0].is_class:
            found = None
        if found is None or len(found[1]) != 1:
            raise Left("the mapped function has no name of its own, bound once", _BY_HAND)
        return name, found[0]

    def _check(self, number: int, part: Component) -> None:
        """Raises Left where the state cannot be followed."""
        if part.kept:
            raise Left("its state is not followed to the end", _BY_HAND, part.kept)
        if not part.sources or not part.is_shared:
            raise Left(
                f"nothing shows where its argument {number} is replicated",
                "Replicate it in the same file, or call jax_dist.global_view by hand.",
            )
        self._check_steps(part)
        for slot in part.slots:
            if not isinstance(slot, Argument | Result):
                continue
            option = "in_axes" if isinstance(slot, Argument) else "out_axes"
            if not _is_first(self.site.arguments.get(option), slot.position):
                raise Left(f"its {option} may not map the state over its first dimension", _BY_HAND)
        if part.forests:
            raise Left("get_metrics takes its state", _BY_HAND, f"line {part.forests[0].lineno}")
        for source in part.sources:
            if source.devices is not None:
                raise Left("its state is replicated on chosen devices", _BY_HAND)
        for node in part.shown:
            if why := _why_not_copied(self.module, self._project, node):
                raise Left("its state is changed in place", _BY_HAND, why)

    def _check_steps(self, part: Component) -> None:
        """That no other step carries the state too: each call would copy it. Raises Left."""
        module, mapped = self.module, flow.of(self.module).mapped_calls
        own = [
            scopes.block_of(module, module.statement(call))
            for call, site in mapped.items()
            if site.node is self.site.node
        ]
        for node in part.shown:
            made = module.statement(node)
            if module.parent(node) not in mapped or not isinstance(made, ast.Assign):
                continue
            targets = [each for target in made.targets for each in ast.walk(target)]
            comes_back = any(
                isinstance(each, ast.expr) and module.text(each) == module.text(node)
                for each in targets
            )
            if comes_back and any(made in block for block in own if block):
                raise Left(
                    "another mapped function carries the same state",
                    _BY_HAND,
                    f"line {made.lineno}",
                )


def _is_first(axes: ast.expr | None, position: int | None) -> bool:
    """Whether `in_axes` or `out_axes` say 0 at a position."""
    match axes:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if position is not None:
            return position < len(parts) and is_default(parts[position])
    return is_default(axes)


_CHANGING = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
_ATTRIBUTE_SETTERS = ("setattr", "delattr")
_DEEPEST = 4  # calls that are followed


def _why_not_copied(module: Module, project: Project, node: ast.expr, depth: int = 0) -> str:
    """Why an argument of a call must be the value itself; "" where a copy does as well.

    Of functions that are in no file of the project nothing is said.
    """
    around = module.parent(node)
    call = module.parent(around) if isinstance(around, ast.keyword) else around
    if not isinstance(call, ast.Call) or call.func is node or depth > _DEEPEST:
        return ""
    text = module.text(call.func)
    if text in _ATTRIBUTE_SETTERS:
        return f"{text} changes it in line {node.lineno}"
    home, function = _callee(module, project, call)
    if function is None:
        is_hidden = not isinstance(call.func, ast.Name | ast.Attribute)
        if is_hidden and isinstance(module.parent(call), ast.Expr):
            return f"{text} of line {node.lineno} may change it"
        return ""
    for parameter in scopes.parameters(function.args):
        is_given = functions.argument_of(home, call, function, parameter) is node
        if is_given and _is_changed(home, project, function, parameter.arg, depth):
            return f"{text} changes it in place ({os.path.basename(home.source.path)})"
    return ""


def _callee(module: Module, project: Project, call: ast.Call) -> tuple[Module, Any]:
    """The function that is called, and its file; None where the project does not show it."""
    found = pmaps.definition(module, call.func)
    if found is not None:
        return module, found
    name = module.qualified_name(call.func) or ""
    place, _, last = name.rpartition(".")
    path = project.file(place, os.path.dirname(os.path.abspath(module.source.path)))
    home = None if path is None else project.parsed(path)
    bindings = [] if home is None else home.scopes.module.bindings.get(last, [])
    if home is None or len(bindings) != 1 or bindings[0].kind != "def":
        return module, None
    return home, bindings[0].node


def _is_changed(module: Module, project: Project, function: Any, name: str, depth: int) -> bool:
    """Whether the text of a function stores into a parameter, or calls what changes it."""
    scope = module.scopes.of[function]
    stores = (binding.node for binding in scope.bindings.get(name, ()))
    if any(isinstance(module.parent(each), ast.AugAssign) for each in stores):
        return True
    for read in module.reads(scope, name):
        top, around = read, module.parent(read)
        while isinstance(around, ast.Attribute | ast.Subscript) and around.value is top:
            if not isinstance(around.ctx, ast.Load):
                return True
            top, around = around, module.parent(around)
        is_called = isinstance(around, ast.Call) and around.func is top
        if is_called and isinstance(top, ast.Attribute) and top.attr in _CHANGING:
            return True
        if _why_not_copied(module, project, top, depth + 1):
            return True
    return False


class _Edits:
    """What is written for one function and its state. Raises Left where a name is not known."""

    def __init__(self, state: _CarriedState, style: Style, namer: Namer):
        self._module, self._site = state.module, state.site
        self._name, self._scope, self._parts = state.name, state.scope, state.parts
        self._style, self._namer = style, namer
        self._group = f"state of {state.site.node.lineno}:{state.site.node.col_offset}"
        self._positions = tuple(state.parts)

    def places(self) -> list[PlannedPlace]:
        """All of them."""
        return [
            self._mapped(),
            *(place for number, part in self._parts.items() for place in self._of(number, part)),
        ]

    def _of(self, number: int, part: Component) -> Iterator[PlannedPlace]:
        """Where the state is put in place, and where it is read."""
        argument = f", argument={number}" if len(self._positions) > 1 else ""
        for source in part.sources:
            end, said = f", stacked=False{argument})", "the state, cut over the devices"
            name = self._placed_below(source)
            if name:
                yield self._around(source.node, source.of, "", "", said)
                yield self._added(f"{name} = {self._name}.place({name}{end}", said)
            else:
                self._check_reach(source.node, "replicated")
                yield self._around(source.node, source.of, f"{self._name}.place(", end, said)
        of_one = "the state of one device"
        for first in part.firsts:
            self._check_reach(first.node, "read")
            yield self._around(first.node, first.of, f"{self._name}.first(", ")", of_one)
        for node in part.shown:
            self._check_reach(node, "given to another function")
            taken = stacking.firsts_in_leaves(self._module, self._module.parent(node), node)
            if taken:  # `x[0]` in what is done to each leaf: the tree is that of one device
                span = self._module.span
                low, high = span(node)
                edits = [Edit(low, low, f"{self._name}.first("), Edit(high, high, ")")]
                edits += (Edit(span(each.value)[1], span(each)[1], "") for each in taken)
                yield self._place(node, sorted(edits), of_one)
            else:
                said = "the state as pmap has it, for a function that takes it so"
                yield self._around(node, node, f"{self._name}.stacked(", ")", said)

    def _placed_below(self, source: SlotSource) -> str:
        """The name that can be put in place below the step, for its state is made above; or ""."""
        module, step = self._module, self._module.statement(self._site.node)
        made = module.statement(source.node)
        match made:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
                is_whole = value is source.node and module.scope(target) is self._scope
            case _:
                return ""
        block = scopes.block_of(module, step) or []
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
        positions = ", ".join(map(str, self._positions))
        state = positions if len(self._positions) == 1 else f"({positions})"
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
