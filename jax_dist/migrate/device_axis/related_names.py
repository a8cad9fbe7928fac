"""What has to do with some arrays of a run: functions, classes, fields, and who may reach them.

Other runs may call a function that was handed on, read a field by a name, or come upon another
function of the same name.
"""

import ast
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import KNOWN, PARTIAL, Module
from jax_dist.migrate.device_axis import escape
from jax_dist.migrate.recorded_flow import FileFlow, variable

_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclasses.dataclass(frozen=True)
class Related:
    """What has to do with some arrays: where they are held, and what comes from there."""

    flow: FileFlow
    definitions: frozenset[str]  # functions, methods and classes
    crossed: frozenset[str]  # functions that are given them, or give them back
    fields: frozenset[str]  # of objects
    variables: frozenset[Any]  # that hold an object, a generator or the like from there
    hidden: frozenset[ast.expr]  # that may be an iterator, a queue or the like that has them

    def unrun(self) -> ast.expr | None:
        """The first expression that mentions any of it and never ran."""
        for node in self.flow.nodes:
            if not self.flow.ran(node) and self._is_mentioned(node) and not self._starts(node):
                return node
        return None

    def _starts(self, node: ast.expr) -> bool:
        """Whether it stands in `main()` or `app.run(main)` of a file that is also run as a program.

        Nothing has the result, and what is called is not given such arrays.
        """
        module = self.flow.module
        statement = module.statement(node)
        match module.parent(statement), statement:
            case (
                ast.If(test=ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()])) as guard,
                ast.Expr(value=ast.Call(func=function, args=args, keywords=words)),
            ):
                given = [*args, *(word.value for word in words)]
                is_plain = all(
                    isinstance(e, ast.Name | ast.Attribute | ast.Constant) for e in given
                )
                name = last_name(function)
                return statement in guard.body and is_plain and name not in self.crossed
        return False

    def classes(self) -> Iterator[str]:
        """The classes of the file whose methods have to do with it."""
        for node in ast.walk(self.flow.module.tree):
            if isinstance(node, ast.ClassDef) and node.name in self.definitions:
                yield node.name

    def by_name(self) -> ast.Call | None:
        """What reads any field of an object that has such arrays in a field."""
        module, flow = self.flow.module, self.flow
        holding = (e for e in module.nodes(ast.Attribute) if e.attr in self.fields)
        types = {flow.type_of(each.value) for each in holding} | {""}
        for node in module.nodes(ast.Call) if self.fields else ():
            of = of_any_attribute(module, node)
            if of is not None and flow.type_of(of) in types:
                return node
        return None

    def handed_on(self) -> Iterator[tuple[str, ast.expr]]:
        """Where a function that takes or gives it is read, and neither called nor given to jax."""
        module = self.flow.module
        for node in module.nodes(ast.Attribute):
            is_method = node.attr in self.crossed and self.flow.ran(node)
            if is_method and self.flow.is_callable(node) and not is_called(module, node):
                yield node.attr, node
        for scope in module.scopes.all:
            for name in self.crossed & scope.bindings.keys():
                if any(each.kind in ("def", "class") for each in scope.bindings[name]):
                    for read in module.reads(scope, name):
                        if not is_called(module, read):
                            yield name, read

    def marks(self) -> Iterator[tuple[str, ast.expr]]:
        """The decorators that may keep what takes or gives it, so that others call it."""
        module = self.flow.module
        for node in module.nodes(ast.FunctionDef, ast.ClassDef):
            wanted = self.definitions if isinstance(node, ast.ClassDef) else self.crossed
            for mark in node.decorator_list if node.name in wanted else ():
                if not _is_of_library(module, mark):
                    yield node.name, mark

    def other_definitions(self) -> Iterator[tuple[str, int]]:
        """What never ran and has the name of a function that did: a call may mean it, too."""
        for node in ast.walk(self.flow.module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name in self.definitions and not any(map(self.flow.ran, ast.walk(node))):
                    yield node.name, node.lineno
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    targets = each.targets if isinstance(each, ast.Assign) else []
                    for name in {getattr(target, "id", "") for target in targets}:
                        if name in self.definitions:
                            yield name, each.lineno
        for scope in self.flow.module.scopes.all:
            for name in self.definitions & scope.bindings.keys():
                for binding in scope.bindings[name]:
                    if binding.kind == "outer":  # `global name`, in a function
                        yield name, getattr(binding.node, "lineno", 0)

    def _is_mentioned(self, node: ast.expr) -> bool:
        if node in self.hidden:
            return True
        match node:
            case ast.Call(func=function) if isinstance(function, ast.Name | ast.Attribute):
                return self._is_mentioned(function)
            case ast.Name(id=name):
                held = variable(self.flow.module, node)
                return name in self.definitions or held in self.variables
            case ast.Attribute(attr=name):
                return name in self.definitions | self.fields
        return False


def names_related(flow: FileFlow, serials: set[int]) -> Related:
    """What has to do with some arrays."""
    module = flow.module
    definitions: set[str] = set()
    fields: set[str] = set()
    crossed: set[str] = set()
    for node in flow.holders(serials):
        definitions |= {e.name for e in module.ancestors(node) if isinstance(e, _DEFINED)}
        found = module.scope(node).lookup(node.id) if isinstance(node, ast.Name) else None
        if found is not None and found[1][0].kind == "parameter":
            crossed.add(_called_as(module, found[0].node))
    variables: set[Any] = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.Return(value=value) | ast.Yield(value=value) | ast.YieldFrom(value=value):
                if value is not None and _gives(flow, value, serials):
                    crossed.add(_called_as(module, module.function(node)))
            case ast.Attribute(attr=name, ctx=ast.Store()):
                value = getattr(module.statement(node), "value", None)
                if value is not None and not serials.isdisjoint(flow.held_in(value)):
                    fields.add(name)
            case ast.Assign(targets=targets, value=ast.Call(func=function)):
                name = last_name(function)
                names = [e for t in targets for e in ast.walk(t) if isinstance(e, ast.Name)]
                if name in definitions:
                    variables |= {variable(module, each) for each in names}
    return Related(
        flow,
        frozenset(definitions),
        frozenset(crossed - {""}),
        frozenset(fields),
        frozenset(variables),
        frozenset(escape.hidden_in(flow, serials, definitions)),
    )


def known_as(module: Module, site: Site) -> Iterator[str]:
    """The names by which other files may get at what a place maps."""
    statement = module.statement(site.node)
    names = set(map(last_name, _set_by(statement))) | {getattr(statement, "name", "")} - {""}
    around = module.function(statement)
    if around is None or any(isinstance(each, ast.Attribute) for each in _set_by(statement)):
        yield from names
    if not isinstance(around, ast.FunctionDef):
        return
    for node in ast.walk(around):
        if isinstance(node, ast.Return) and node.value is not None:
            for each in ast.walk(node.value):
                is_named = isinstance(each, ast.Name) and each.id in names
                if each is site.node or (is_named and module.call_of(each) is None):
                    yield around.name


def _set_by(statement: ast.stmt) -> list[ast.expr]:
    """The names, fields and entries that a statement sets."""
    if isinstance(statement, ast.FunctionDef):
        return []
    nodes = (each for each in ast.walk(statement) if isinstance(each, ast.expr))
    return [each for each in nodes if isinstance(getattr(each, "ctx", None), ast.Store)]


def _is_of_library(module: Module, mark: ast.expr) -> bool:
    """Whether a decorator is one of Python, or of a library that keeps no function."""
    function = mark.func if isinstance(mark, ast.Call) else mark
    if isinstance(function, ast.Attribute) and function.attr in ("setter", "getter", "deleter"):
        return True
    root = (module.qualified_name(function) or "").split(".")[0]
    return module.builtin(function) is not None or root in KNOWN or root in sys.stdlib_module_names


def _called_as(module: Module, function: Any) -> str:
    """The name by which other files call a function; "" of a lambda."""
    name, owner = getattr(function, "name", ""), module.parent(function) if function else None
    return owner.name if name.startswith("__") and isinstance(owner, ast.ClassDef) else name


def _gives(flow: FileFlow, value: ast.AST, serials: set[int]) -> bool:
    """Whether the value of an expression holds some of the arrays, and not only what is inside."""
    if flow.watches(value):
        return not serials.isdisjoint(flow.serials(value))
    return any(_gives(flow, each, serials) for each in ast.iter_child_nodes(value))


def of_any_attribute(module: Module, call: ast.Call) -> ast.expr | None:
    """The object of `getattr(trainer, args.mode)`, which no other module is; None of others."""
    match call:
        case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *_]):
            is_one = isinstance(name, ast.Constant) or module.qualified_name(of) is not None
            return None if is_one else of
    return None


def is_called(module: Module, node: ast.expr) -> bool:
    """Whether a function is called, or given to a transformation of jax: its calls are all seen."""
    around = module.parent(node)
    if isinstance(around, ast.Call) and around.func is node:
        return True
    name = module.qualified_name(around.func) if isinstance(around, ast.Call) else None
    return (name or "").startswith("jax.") or name in PARTIAL
