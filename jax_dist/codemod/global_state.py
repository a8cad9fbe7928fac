"""`--to global`: a pmap trainer whose state is cut over the devices, by `jax_dist.global_view`.

The step stays as it is, and so do its batches and its other results, which keep their device axis.
Only the state changes its form: it is placed where it was replicated, read where one copy was
taken, and given to other functions as pmap has it. Which of its leaves are the same on all devices
is found when the step is traced, so the text need not show it. A step is migrated whole, or left
whole with the reason.
"""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import pmaps, scopes, stacking
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod import codegen
from jax_dist.codemod.axis_layout import Component, Layouts, SlotSource
from jax_dist.codemod.carried_state import BY_HAND, CarriedState
from jax_dist.codemod.codegen import Style, Texts
from jax_dist.codemod.facts import PmapFacts
from jax_dist.codemod.idiomatic import FreedPlace
from jax_dist.codemod.names import Namer
from jax_dist.codemod.results import Left

# What a global view takes of what pmap takes.
_TAKEN = frozenset(
    ("axis_name", "in_axes", "out_axes", "static_broadcasted_argnums", "donate_argnums")
)
_FORMS = ("call", "partial decorator")


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalSteps:
    """What becomes of the mapped functions of one file."""

    changes: tuple[FreedPlace, ...]
    left: dict[ast.expr, Left]  # by the reference of a site


def find(
    module: Module, project: Project, style: Style, namer: Namer, facts: PmapFacts
) -> GlobalSteps:
    """The steps of a file whose state can be cut, and why others stay.

    Args:
      module: the file.
      project: of it.
      style: how it is written.
      namer: says how `global_view` is called there.
      facts: what is known of its places.
    """
    left: dict[ast.expr, Left] = {}
    fit: list[tuple[Site, Layouts]] = []
    for site in pmaps.sites(module):
        try:
            _check(site, facts)
        except Left as why:
            left[site.reference] = why
        else:
            fit.append((site, Layouts(module, [site], stacked_for_others=True)))
    # A step takes a batch too; what only synchronises a state does not, and leaves it to the step.
    fit.sort(key=lambda each: -len(each[1].arguments(each[0]) or []))
    changes: list[FreedPlace] = []
    placed: dict[ast.expr, Site] = {}  # by which step
    for site, layouts in fit:
        try:
            state = CarriedState(module, project, layouts, site)
            found = _Edits(state, style, namer).changes()
            state.take(placed)
        except Left as why:
            left[site.reference] = why
        else:
            changes += found
    return GlobalSteps(tuple(changes), left)


def _check(site: Site, facts: PmapFacts) -> None:
    """Raises Left where it cannot be a global view, whatever its state."""
    if site.form not in _FORMS or site.fun is None:
        raise Left("the mapped function is not written in one place", BY_HAND)
    if site.unknown:
        raise Left(f"its options come from {site.unknown}", BY_HAND)
    name = site.arguments.get("axis_name")
    if name is None or (isinstance(name, ast.Constant) and name.value is None):
        raise Left("it has no axis name, so that no collective makes anything the same")
    for option in sorted(site.arguments.keys() - _TAKEN):
        raise Left(f"it has {option}, and a global view runs on a mesh", BY_HAND)
    if facts.several_processes:
        raise Left(
            "the program may run in several processes, where one cannot read a state that is cut",
            BY_HAND,
        )


class _Edits:
    """What is written for one function and its state. Raises Left where a name is not known."""

    def __init__(self, state: CarriedState, style: Style, namer: Namer):
        self._module, self._site = state.module, state.site
        self._name, self._scope, self._parts = state.name, state.scope, state.parts
        self._style, self._namer = style, namer
        self._group = f"state of {state.site.node.lineno}:{state.site.node.col_offset}"
        self._positions = tuple(state.parts)

    def changes(self) -> list[FreedPlace]:
        """All of them."""
        found = [self._mapped()]
        for number, part in self._parts.items():
            found += self._of(number, part)
        return found

    def _of(self, number: int, part: Component) -> Iterator[FreedPlace]:
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
        for first in part.firsts:
            self._check_reach(first.node, "read")
            said = "the state of one device"
            yield self._around(first.node, first.of, f"{self._name}.first(", ")", said)
        for node in part.shown:
            self._check_reach(node, "given to another function")
            taken = stacking.firsts_in_leaves(self._module, self._module.parent(node), node)
            if taken:
                yield self._first_in_leaves(node, taken)
                continue
            said = "the state as pmap has it, for a function that takes it so"
            yield self._around(node, node, f"{self._name}.stacked(", ")", said)

    def _first_in_leaves(self, node: ast.expr, taken: list[ast.Subscript]) -> FreedPlace:
        """`x[0]` in what is done to each leaf: the tree is that of one device."""
        low, high = self._module.span(node)
        edits = [Edit(low, low, f"{self._name}.first("), Edit(high, high, ")")]
        for each in taken:
            edits.append(Edit(self._module.span(each.value)[1], self._module.span(each)[1], ""))
        said = "the state of one device"
        fix = Fix(said, Safety.UNSAFE, tuple(sorted(edits)), (), self._group)
        return FreedPlace(node, fix, said)

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
        uses: list[Any] = [*module.reads(self._scope, name)]
        uses += [
            binding.node for binding in self._scope.bindings[name] if binding.node is not target
        ]
        between = (step.end_lineno or step.lineno, made.lineno)
        if any(between[1] < each.lineno <= between[0] for each in uses):
            return ""
        if self._module.source.code[self._module.span(step)[1] :].lstrip(b" \t").startswith(b";"):
            return ""
        return name

    def _added(self, line: str, said: str) -> FreedPlace:
        """A statement below the step."""
        statement = self._module.statement(self._site.node)
        end = self._end_of_line(statement)
        indent = self._texts(self._site.node).indent_of(self._site.node)
        fix = Fix(said, Safety.UNSAFE, (Edit(end, end, f"\n{indent}{line}"),), (), self._group)
        return FreedPlace(self._site.node, fix, said)

    def _end_of_line(self, statement: ast.stmt) -> int:
        """Behind a statement, and the comment that follows it."""
        code, end = self._module.source.code, self._module.span(statement)[1]
        rest = code[end:].partition(b"\n")[0].rstrip()
        return end + len(rest) if rest.lstrip().startswith(b"#") else end

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

    def _mapped(self) -> FreedPlace:
        """The new name, and what is said of the state."""
        site, module = self._site, self._module
        name = self._namer.named(module, "global_view", site.reference)
        call: Any = site.node
        last = max(
            (each for each in [*call.args, *(word.value for word in call.keywords)]),
            key=lambda each: module.span(each)[1],
        )
        end = module.span(last)[1]
        positions = ", ".join(map(str, self._positions))
        state = positions if len(self._positions) == 1 else f"({positions})"
        quote = self._style.quote
        more = f", state={state}, shardings={quote}fsdp{quote}"
        edits = (Edit(*module.span(site.reference), name.text), *name.edits, Edit(end, end, more))
        fix = Fix(
            "use jax_dist.global_view",
            Safety.UNSAFE,
            tuple(sorted(edits)),
            name.imports,
            self._group,
        )
        said = f"its state, argument {positions}, is cut over the devices"
        return FreedPlace(site.reference, fix, said)

    def _around(self, node: ast.expr, of: ast.expr, start: str, end: str, said: str) -> FreedPlace:
        texts = self._texts(node)
        if node is of:
            low, high = self._module.span(node)
            edits: tuple[Edit, ...] = (Edit(low, low, start), Edit(high, high, end))
        else:
            edits = codegen.shell(texts, node, of, start, end)
        fix = Fix(said, Safety.UNSAFE, edits, texts.imports, self._group)
        return FreedPlace(node, fix, said)
