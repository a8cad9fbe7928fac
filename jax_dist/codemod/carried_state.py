"""What a mapped function carries from call to call, and whether it can be followed.

A function that changes a tree in place that it is given cannot take a copy.
"""

import ast
import os
from typing import Any

from jax_dist.checker.model import flow, functions, pmaps, scopes
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import uniformity
from jax_dist.codemod.axis_layout import Argument, AxisLayout, Component, Layouts, Result
from jax_dist.codemod.facts import is_default
from jax_dist.codemod.results import Left
from jax_dist.codemod.uniform_values import Same

BY_HAND = "Call jax_dist.global_view by hand: the page on sharded parameters shows how."
_CHANGING = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
)
_ATTRIBUTE_SETTERS = ("setattr", "delattr")
_DEEPEST = 4  # calls that are followed


def _is_first(axes: ast.expr | None, position: int | None) -> bool:
    """Whether `in_axes` or `out_axes` say 0 at a position."""
    match axes:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if position is not None:
            return position < len(parts) and is_default(parts[position])
    return is_default(axes)


class CarriedState:
    """One mapped function and its state.

    Args:
      module: the file.
      project: of it.
      layouts: of this function alone.
      site: what maps it.

    Raises:
      Left: the state cannot be followed.
    """

    def __init__(self, module: Module, project: Project, layouts: Layouts, site: Site):
        self.module, self.site = module, site
        self._project, self._layouts = project, layouts
        carried = self._carried()
        self.name, self.scope = self._bound()
        self.parts = self._states(carried)  # by the positions of the arguments

    def take(self, placed: dict[ast.expr, Site]) -> None:
        """Notes what this step puts in place, which no other step then does."""
        sources = [source.node for part in self.parts.values() for source in part.sources]
        for source in sources:
            if source in placed:
                line = placed[source].node.lineno
                raise Left(
                    "another mapped function carries the same state", BY_HAND, f"line {line}"
                )
        placed.update(dict.fromkeys(sources, self.site))

    def _carried(self) -> list[int]:
        """The positions of the arguments that come back as results. Raises Left."""
        own = {id(self._layouts.component(slot)) for slot in self._layouts.results(self.site)}
        arguments = self._layouts.arguments(self.site) or []
        found = [n for n, slot in enumerate(arguments) if id(self._layouts.component(slot)) in own]
        if not found:
            raise Left("no argument of it comes back as a result, so that it has no state to cut")
        return found

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
            raise Left("two of its arguments may be one state", BY_HAND)
        self._check_results(found)
        self._check_copies(found)
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
            raise Left("the mapped function has no name of its own, bound once", BY_HAND)
        return name, found[0]

    def _check_results(self, parts: dict[int, Component]) -> None:
        """A global view takes the first results of the structure of a state for the new one."""
        order = []
        for number in sorted(parts):
            slots = [slot for slot in parts[number].slots if isinstance(slot, Result)]
            order += [slot.position or 0 for slot in slots]
        if order != [*range(len(parts))]:
            raise Left("its new state is not its first result", BY_HAND)

    def _check(self, number: int, part: Component) -> None:
        """Raises Left where the state cannot be followed."""
        if part.kept:
            raise Left("its state is not followed to the end", BY_HAND, part.kept)
        if not part.sources or part.layout is not AxisLayout.SHARED:
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
                raise Left(f"its {option} may not map the state over its first dimension", BY_HAND)
        if part.forests:
            raise Left("get_metrics takes its state", BY_HAND, f"line {part.forests[0].lineno}")
        for source in part.sources:
            if source.devices is not None:
                raise Left("its state is replicated on chosen devices", BY_HAND)
        for node in part.shown:
            why = _why_not_copied(self.module, self._project, node)
            if why:
                raise Left("its state is changed in place", BY_HAND, why)

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
                    BY_HAND,
                    f"line {made.lineno}",
                )

    def _check_copies(self, parts: dict[int, Component]) -> None:
        """That no replicated argument which is no state gets into the state. Raises Left.

        A global view takes it as one value for each device, and so would not cut the state.
        """
        states = [n in parts for n in range(len(self._layouts.arguments(self.site) or []))]
        copied = [is_state or self._may_be_copies(n) for n, is_state in enumerate(states)]
        if copied == states or self._varies(copied) or not self._varies(states):
            return
        number = next(n for n, is_state in enumerate(states) if copied[n] and not is_state)
        raise Left(
            f"its argument {number} is replicated, is no state of it, and changes its state",
            "Give it by in_axes=None, or call jax_dist.global_view by hand.",
        )

    def _may_be_copies(self, number: int) -> bool:
        """Whether an argument may be replicated, or be another state, at any call."""
        found = flow.of(self.module)
        for call, site in found.mapped_calls.items():
            if site.node is not self.site.node:
                continue
            argument = call.args[number]
            if any(each.kind in (Kind.REPLICATED, Kind.MAPPED) for each in found.origins(argument)):
                return True
            match argument:
                case ast.Call(func=ast.Attribute(attr="stacked")):  # of a step that is done
                    return True
        return False

    def _varies(self, shared: list[bool]) -> bool:
        """Whether the new state differs from device to device, if these arguments do not."""
        results = self._layouts.results(self.site)
        arity = None if results[0].position is None else len(results)
        found = uniformity.of_results(self.module, self.site, shared, set(), arity)
        return found[0] is Same.NO


def _why_not_copied(module: Module, project: Project, node: ast.expr, depth: int = 0) -> str:
    """Why an argument of a call must be the value itself; "" where a copy does as well.

    Args:
      module: the file.
      project: where functions of other files are looked up. Of those that are in none of its files
        nothing is said.
      node: what is read.
      depth: how many calls there are around.
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
