"""What of a file a run did not show, and may have to do with values that it did show.

A recording knows only what ran. A branch for another flag, a second source of batches or a function
that nobody called could make or read the same values, in the form that they had. So where such a
line mentions a function, a class or a variable through which a value went, its axis stays.
"""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import stacking
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.codemod import flow_uses
from jax_dist.codemod.recorded_flow import FileFlow, variable

_REFLECTING = frozenset(("vars", "locals", "globals", "eval", "exec"))
_REFLECTED = frozenset(("__dict__", "f_locals", "f_globals", "__globals__", "__getattribute__"))
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def reflection(flow: FileFlow) -> str:
    """Where values are read by the text of their names; "" where they are not."""
    for node in ast.walk(flow.module.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in _REFLECTING:
                return f"line {node.lineno} calls {name}"
            case ast.Attribute(attr=name) if name in _REFLECTED:
                return f"line {node.lineno} reads {name}"
    return ""


def unrun_maker(flow: FileFlow) -> str:
    """Where something makes or takes off a device axis and never ran; "" where nothing does.

    Or a function that never ran, and is handed on, and so may give anything in another run.
    """
    module = flow.module
    for node in flow.nodes:
        if flow.ran(node) or not isinstance(node, ast.Call):
            continue
        if stacking.stacking(module, node) is not None or flow_uses.made(flow, node) is not None:
            text = " ".join(module.text(node.func).split())
            return f"line {node.lineno} calls {text}, and never ran"
    idle = {name: function for name, function in _functions(module) if _is_idle(flow, function)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Name) or node.id not in idle or _is_called(module, node):
            continue
        if flow.ran(node) or not flow.watches(node):  # such as a default value
            return f"line {node.lineno} hands on {node.id}, which never ran"
    return ""


def _is_called(module: Module, node: ast.expr) -> bool:
    """Whether a name is called, or given to a transformation of jax, whose calls are all seen."""
    around = module.parent(node)
    if isinstance(around, ast.Call) and around.func is node:
        return True
    name = module.qualified_name(around.func) if isinstance(around, ast.Call) else None
    return (name or "").startswith("jax.") or name in PARTIAL


def _functions(module: Module) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node


def _is_idle(flow: FileFlow, function: ast.AST) -> bool:
    inside = [each for each in ast.walk(function) if flow.watches(each)]
    return bool(inside) and not any(map(flow.ran, inside))


@dataclasses.dataclass(frozen=True)
class Related:
    """What has to do with some arrays: where they are held, and what comes from there."""

    flow: FileFlow
    definitions: frozenset[str]  # functions, methods and classes
    fields: frozenset[str]  # of objects
    variables: frozenset[Any]  # that hold an object, a generator or the like from there

    def unrun(self) -> ast.expr | None:
        """The first expression that mentions any of it and never ran."""
        for node in self.flow.nodes:
            if not self.flow.ran(node) and self._is_mentioned(node):
                return node
        return None

    def _is_mentioned(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=function) if isinstance(function, ast.Name | ast.Attribute):
                return self._is_mentioned(function)
            case ast.Name(id=name):
                held = variable(self.flow.module, node)
                return name in self.definitions or held in self.variables
            case ast.Attribute(attr=name):
                return name in self.definitions | self.fields
        return False


def related(flow: FileFlow, serials: set[int]) -> Related:
    """What has to do with some arrays."""
    module = flow.module
    definitions: set[str] = set()
    fields: set[str] = set()
    for node in flow.holders(serials):
        definitions |= {e.name for e in module.ancestors(node) if isinstance(e, _DEFINED)}
    for node in ast.walk(module.tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                value = getattr(module.statement(node), "value", None)
                if value is not None and not serials.isdisjoint(_held_in(flow, value)):
                    fields.add(name)
    variables: set[Any] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Assign(targets=targets, value=ast.Call(func=function)):
                name = getattr(function, "attr", getattr(function, "id", ""))
                names = [e for t in targets for e in ast.walk(t) if isinstance(e, ast.Name)]
                if name in definitions:
                    variables |= {variable(module, each) for each in names}
    return Related(flow, frozenset(definitions), frozenset(fields), frozenset(variables))


def _held_in(flow: FileFlow, value: ast.AST) -> set[int]:
    return {serial for each in ast.walk(value) for serial in flow.serials(each)}
