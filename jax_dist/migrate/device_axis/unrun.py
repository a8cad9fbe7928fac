"""What of a file a run did not show, and may have to do with values that it did show.

A recording knows only what ran. A branch for another flag, a second source of batches or a function
that nobody called could make or read the same values, in the form that they had. So where such a
line mentions a function, a class or a variable through which a value went, its axis stays.
"""

import ast
import functools
import itertools
import os
import re
from collections.abc import Mapping
from typing import Any

from jax_dist.lint.model import stacking
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import imports
from jax_dist.migrate.device_axis import choices, escape, flow_uses
from jax_dist.migrate.device_axis.related_names import (
    Related,
    is_called,
    names_related,
    of_any_attribute,
)
from jax_dist.migrate.pmap_facts import PmapFacts
from jax_dist.migrate.recorded_flow import Component, FileFlow, variable
from jax_dist.migrate.results import Left

_REFLECTING = frozenset(("vars", "locals", "globals", "eval", "exec", "setattr", "getmembers"))
_REFLECTED = frozenset(
    ("__dict__", "f_locals", "f_globals", "__globals__", "__getattribute__", "__setattr__")
)


# What calls any function of its caller by a name of the command line, where it is given none.
_COMMAND_LINES = frozenset(("fire.Fire", "jsonargparse.CLI", "jsonargparse.auto_cli"))
_OF_CALLER = re.compile(
    rb"\bf_(?:globals|locals)\b|\binspect\.(?:stack|currentframe)\b|\b_getframe\b"
    rb"|\bimport __main__\b|\bmodules\[[\"']__main__"
)


class Seen:
    """Tells whether a run has shown all that makes or reads a component.

    Args:
      flow: what it has shown.
      facts: of the file.
    """

    def __init__(self, flow: FileFlow, facts: PmapFacts):
        self._flow, self._facts = flow, facts

    def check(self, component: Component) -> None:
        """Raises Left where what did not run, or is not seen, may make or read such values."""
        module, flow, serials = self._flow.module, self._flow, component.serials
        if any(slot.side == "word" for slot in component.slots):
            raise Left("it is given by name")
        if flow.is_held_elsewhere(serials):
            raise Left("another file uses it")
        if self._hidden:
            raise Left(self._hidden)
        names: dict[Any, str] = {}  # by variable
        bindings: dict[ast.AST, bool] = {}  # of names that held them: whether they were given them
        for node in flow.holders(serials):
            choices.check(flow, node, serials)
            choices.check_elements(flow, node, serials)
            _check_parts(flow, node)
            if isinstance(node, ast.Name | ast.Attribute):
                names[variable(module, node)] = module.text(node)
                bindings |= _bindings(flow, node, serials)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Del):
                text = names.get(variable(module, node))
                if text is None:
                    continue
                self._check_mention(node, text)
                is_holder = not serials.isdisjoint(flow.serials(node))
                if not is_holder:  # whose statements were looked at above
                    _check_parts(flow, node)
                _check_given(flow, node, text, serials)
                is_read = flow.watches(node) and not is_holder
                if is_read and _may_hold(flow, node, serials, bindings):
                    raise Left(f"in another run, it may be the {text} of line {node.lineno}")
        choices.check_kept_with_others(flow, serials)
        choices.check_merged(flow, serials)
        choices.check_returns(flow, serials)
        self._check_names(names_related(flow, serials))

    def _check_names(self, related: Related) -> None:
        """Raises Left where others may reach it by a name, or what has one never ran."""
        module = self._flow.module
        for name in related.crossed:
            if imports.is_used_elsewhere(module, name):
                raise Left(f"other files may use {name}, which takes or returns it")
        if found := related.unrun():
            raise Left(f"line {found.lineno} may have to do with it, and never ran")
        for name, line in related.other_definitions():
            raise Left(f"line {line} defines another {name}, which never ran")
        if found := related.by_name():
            raise Left(f"line {found.lineno} reads a field by a name of the run")
        for name, node in related.handed_on():
            raise Left(f"line {node.lineno} hands {name} on, and others may call it")
        for name, mark in related.marks():
            raise Left(f"line {mark.lineno} hands {name} to {module.text(mark)}")
        for name in related.classes():
            if self._facts.is_subclassed_elsewhere(name):
                raise Left(f"another file may have a subclass of {name}")

    @functools.cached_property
    def _hidden(self) -> str:
        """What may reach any value of the file without being seen; "" where nothing does."""
        return _reflection(self._flow) or _reader(self._flow.module) or _unrun_maker(self._flow)

    def _check_mention(self, node: ast.Name | ast.Attribute, text: str) -> None:
        """Raises Left where a variable is used that holds such values, and that is not seen."""
        module, flow = self._flow.module, self._flow
        within = any(isinstance(each, ast.JoinedStr) for each in module.ancestors(node))
        if within and not flow.watches(node):
            raise Left(f"line {node.lineno} formats {text}")
        is_set = isinstance(node.ctx, ast.Store)
        if is_set and isinstance(module.parent(node), ast.AugAssign):
            raise Left(f"line {node.lineno} changes {text} in place")
        if choices.sets_chosen_entry(module, node):
            raise Left(f"line {node.lineno} sets an entry of {text} by a name of the run")
        self._check_others_read(node, is_set=is_set)
        value = getattr(module.statement(node), "value", None)
        looked_at = value if is_set and flow.watches(value) else None if is_set else node
        if looked_at is not None and flow.watches(looked_at) and not flow.ran(looked_at):
            raise Left(f"line {node.lineno} has {text}, and never ran")

    def _check_others_read(self, node: ast.Name | ast.Attribute, *, is_set: bool) -> None:
        """Raises Left where other files may read a global name, or a field that is set here."""
        module = self._flow.module
        if isinstance(node, ast.Name):
            found = module.scope(node).lookup(node.id)
            is_global = found is not None and found[0] is module.scopes.module
            if is_global and imports.is_used_elsewhere(module, node.id):
                raise Left(f"other files may use {node.id} of line {node.lineno}")
        elif is_set and self._facts.is_read_elsewhere(node.attr):
            raise Left(f"other files may read .{node.attr}, which line {node.lineno} sets")


def _check_parts(flow: FileFlow, node: ast.expr) -> None:
    """Raises Left where the statement around may give more than it did, such as by an empty loop.

    `return state if flag else other` does; a condition gives nothing.
    """
    module = flow.module
    statement, function = module.statement(node), module.function(node)
    if isinstance(statement, ast.If | ast.While | ast.Assert | ast.ClassDef):
        return
    heads = (each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt))
    for each in itertools.chain.from_iterable(map(ast.walk, heads)):
        is_own = isinstance(each, ast.expr) and module.function(each) is function
        if is_own and flow.watches(each) and not flow.ran(each):
            text = " ".join(module.text(node).split())
            raise Left(f"line {node.lineno} has {text}, and a part of it never ran")


def _check_given(
    flow: FileFlow, node: ast.Name | ast.Attribute, text: str, serials: set[int]
) -> None:
    """Raises Left where a variable is given other values than some arrays.

    Args:
      flow: what a run has shown.
      node: where the variable is read or set.
      text: of the variable.
      serials: the arrays that it held.
    """
    statement = flow.module.statement(node)
    value: Any = getattr(statement, "value", None)
    if not isinstance(node.ctx, ast.Store) or not flow.watches(value):
        return
    is_of_them = flow.has_arrays(value) or not serials.isdisjoint(flow.held_in(value))
    if not is_of_them and not _is_empty(value):
        raise Left(f"line {node.lineno} may give {text} other values in another run")


def _is_empty(value: ast.expr) -> bool:
    """Whether an expression is a new container that holds nothing, in any run."""
    match value:
        case ast.Call(func=function, args=args, keywords=words):
            name = last_name(function)
            given = [*args, *(word.value for word in words)]
            is_plain = all(isinstance(each, ast.Name | ast.Constant) for each in given)
            return name in escape.NEW_CONTAINERS and is_plain
        case ast.BinOp(left=ast.List(elts=parts), op=ast.Mult()):
            return all(isinstance(each, ast.Constant) for each in parts)
    return False


def _bindings(flow: FileFlow, node: ast.expr, serials: set[int]) -> dict[ast.AST, bool]:
    """What may have given a name its value: arrays, or may be; or something that was empty then.

    Not what gave it other arrays alone.
    """
    found = flow.module.reaching(node) if isinstance(node, ast.Name) else None
    given: dict[ast.AST, bool] = {}
    for each in found or ():
        is_it = each.value is None or not serials.isdisjoint(flow.bound_by(each.value))
        if is_it or each.value is None or not flow.has_unmapped(each.value):
            given[each.node] = is_it
    return given


def _may_hold(
    flow: FileFlow,
    node: ast.Name | ast.Attribute,
    serials: set[int],
    bindings: Mapping[ast.AST, bool],
) -> bool:
    """Whether a variable that holds none of some arrays where it is read may in another run.

    Args:
      flow: what a run has shown.
      node: where it is read.
      serials: of the arrays.
      bindings: of all names that held them: whether they were given them.
    """
    module = flow.module
    if isinstance(node, ast.Name):
        own = _bindings(flow, node, serials).keys() & bindings.keys()
        # A container that was empty there is filled later; one with other arrays was changed.
        return any(bindings[each] for each in own) or (bool(own) and flow.has_unmapped(node))
    function = module.function(node)
    is_before = getattr(function, "name", "") == "__init__" and not any(
        isinstance(each, ast.Attribute) and each.lineno < node.lineno
        for each in flow.holders(serials)
        if module.function(each) is function
    )
    # `self.x = replicate(self.x)` does not read what it makes, and `__init__` runs once.
    statement = module.statement(node)
    made = flow.bound_by(statement.value) if isinstance(statement, ast.Assign) else set[int]()
    is_maker = not serials.isdisjoint(made)
    return flow.has_unmapped(node) and not (is_before or is_maker)


def _reflection(flow: FileFlow) -> str:
    """Where values are read by the text of their names; "" where they are not."""
    for node in ast.walk(flow.module.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _REFLECTING:
                return f"line {node.lineno} calls {name}"
            case ast.Call(func=ast.Attribute(attr="getmembers")):
                return f"line {node.lineno} calls getmembers"
            case ast.Call(args=[], keywords=[]):
                if flow.module.qualified_name(node.func) in _COMMAND_LINES:
                    return f"line {node.lineno} lets the command line name any function"
            case ast.Attribute(attr=name) if name in _REFLECTED:
                return f"line {node.lineno} reads {name}"
            case ast.Call() if _takes_by_name(flow, node):
                return f"line {node.lineno} takes a function by a name of the run"
    return ""


def _reader(module: Module) -> str:
    """The other file that may read any name of this one, as its caller; "" where there is none."""
    graph = module.graph
    if graph is None:
        return ""
    for other in sorted(graph.reached(os.path.abspath(module.source.path))):
        if _OF_CALLER.search(graph.files.get(other, b"")):
            return f"{os.path.relpath(other)} reads what its callers have"
    return ""


def _takes_by_name(flow: FileFlow, call: ast.Call) -> bool:
    """Whether a call may give any function of the file: `getattr(trainer, args.mode)`."""
    if of_any_attribute(flow.module, call) is not None:
        return flow.is_callable(call)
    is_getter = last_name(call.func) in ("attrgetter", "methodcaller")
    return is_getter and not all(isinstance(each, ast.Constant) for each in call.args)


def _unrun_maker(flow: FileFlow) -> str:
    """Where something makes or takes off a device axis, and may give it to what ran; "" if nothing.

    Or a function that never ran, and is handed on, and so may give anything in another run.
    """
    module = flow.module
    for node in flow.nodes:
        if flow.ran(node) or not isinstance(node, ast.Call):
            continue
        changes = stacking.stacking(module, node) or flow_uses.made(flow, node)
        if changes is not None and escape.escapes(flow, node):
            text = " ".join(module.text(node.func).split())
            return f"line {node.lineno} calls {text}, and never ran"
    functions = module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    idle = {function for function in functions if _is_idle(flow, function)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Lambda) and _is_idle(flow, node) and not is_called(module, node):
            around = module.function(module.parent(node))
            given_to = next(filter(flow.watches, module.ancestors(node)), None)
            was_made = given_to is None or flow.ran(given_to)
            if was_made and (around is None or not _is_idle(flow, around)):
                return f"line {node.lineno} hands on a lambda, which never ran"
        if not isinstance(node, ast.Name) or is_called(module, node):
            continue
        found = module.scope(node).lookup(node.id)
        if found is None or all(each.node not in idle for each in found[1]):
            continue
        if flow.ran(node) or not flow.watches(node):  # such as a default value
            return f"line {node.lineno} hands on {node.id}, which never ran"
    return ""


def _is_idle(flow: FileFlow, function: ast.AST) -> bool:
    inside = [each for each in ast.walk(function) if flow.watches(each)]
    return bool(inside) and not any(map(flow.ran, inside))
