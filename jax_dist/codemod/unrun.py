"""What of a file a run did not show, and may have to do with values that it did show.

A recording knows only what ran. A branch for another flag, a second source of batches or a function
that nobody called could make or read the same values, in the form that they had. So where such a
line mentions a function, a class or a variable through which a value went, its axis stays.
"""

import ast
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jax_dist.checker.model import stacking
from jax_dist.checker.model.scopes import last_name
from jax_dist.checker.model.semantic_model import KNOWN, PARTIAL, Module
from jax_dist.codemod import choices, flow_uses, imports
from jax_dist.codemod.pmap_facts import PmapFacts
from jax_dist.codemod.recorded_flow import Component, FileFlow, variable
from jax_dist.codemod.results import Left

_REFLECTING = frozenset(("vars", "locals", "globals", "eval", "exec", "setattr", "getmembers"))
_REFLECTED = frozenset(
    ("__dict__", "f_locals", "f_globals", "__globals__", "__getattribute__", "__setattr__")
)
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


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
            if isinstance(node, ast.Name | ast.Attribute):
                names[variable(module, node)] = module.text(node)
                bindings |= _bindings(flow, node, serials)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Del):
                text = names.get(variable(module, node))
                if text is None:
                    continue
                self._check_mention(node, text)
                _check_parts(flow, node, text, serials)
                is_read = flow.watches(node) and serials.isdisjoint(flow.serials(node))
                if is_read and _may_hold(flow, node, serials, bindings):
                    raise Left(f"in another run, it may be the {text} of line {node.lineno}")
        choices.check_kept_with_others(flow, serials)
        choices.check_returns(flow, serials)
        related = _related(flow, serials)
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
        return _reflection(self._flow) or _unrun_maker(self._flow)

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


def _check_parts(
    flow: FileFlow, node: ast.Name | ast.Attribute, text: str, serials: set[int]
) -> None:
    """Raises Left where a statement may give a variable more than it did, such as by an empty loop.

    Args:
      flow: what a run has shown.
      node: where the variable is read or set.
      text: of the variable.
      serials: the arrays that it held.
    """
    module = flow.module
    statement = module.statement(node)
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        return
    function = module.function(node)
    for each in ast.walk(statement):
        is_own = isinstance(each, ast.expr) and module.function(each) is function
        if is_own and flow.watches(each) and not flow.ran(each):
            raise Left(f"line {node.lineno} has {text}, and a part of it never ran")
    value = statement.value
    if not isinstance(node.ctx, ast.Store) or value is None or not flow.watches(value):
        return
    is_of_them = flow.has_arrays(value) or not serials.isdisjoint(flow.held_in(value))
    if not is_of_them and not _is_empty(value):
        raise Left(f"line {node.lineno} may give {text} other values in another run")


_EMPTY = frozenset(("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict"))


def _is_empty(value: ast.expr) -> bool:
    """Whether an expression is a new container that holds nothing, in any run."""
    match value:
        case ast.Call(func=function, args=args, keywords=words):
            name = last_name(function)
            given = [*args, *(word.value for word in words)]
            return name in _EMPTY and all(isinstance(e, ast.Name | ast.Constant) for e in given)
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
            case ast.Attribute(attr=name) if name in _REFLECTED:
                return f"line {node.lineno} reads {name}"
            case ast.Call() if _takes_by_name(flow, node):
                return f"line {node.lineno} takes a function by a name of the run"
    return ""


def _takes_by_name(flow: FileFlow, call: ast.Call) -> bool:
    """Whether a call may give any function of the file: `getattr(trainer, args.mode)`."""
    match call:
        case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *_]):
            is_other = flow.module.qualified_name(of) is not None  # another module
            is_one = isinstance(name, ast.Constant) or is_other
            return not is_one and flow.is_callable(call)
        case ast.Call(func=function, args=args):
            is_getter = last_name(function) in ("attrgetter", "methodcaller")
            return is_getter and not all(isinstance(each, ast.Constant) for each in args)
    return False


def _unrun_maker(flow: FileFlow) -> str:
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
        if isinstance(node, ast.Lambda) and _is_idle(flow, node) and not _is_called(module, node):
            around = module.function(module.parent(node))
            given_to = next(filter(flow.watches, module.ancestors(node)), None)
            was_made = given_to is None or flow.ran(given_to)
            if was_made and (around is None or not _is_idle(flow, around)):
                return f"line {node.lineno} hands on a lambda, which never ran"
        if not isinstance(node, ast.Name) or node.id not in idle or _is_called(module, node):
            continue
        if flow.ran(node) or not flow.watches(node):  # such as a default value
            return f"line {node.lineno} hands on {node.id}, which never ran"
    return ""


def _is_called(module: Module, node: ast.expr) -> bool:
    """Whether a function is called, or given to a transformation of jax: its calls are all seen."""
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
class _Related:
    """What has to do with some arrays: where they are held, and what comes from there."""

    flow: FileFlow
    definitions: frozenset[str]  # functions, methods and classes
    crossed: frozenset[str]  # functions that are given them, or give them back
    fields: frozenset[str]  # of objects
    variables: frozenset[Any]  # that hold an object, a generator or the like from there

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
        for node in module.nodes(ast.Call):
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[of, name, *_]):
                    is_one = isinstance(name, ast.Constant) or module.qualified_name(of) is not None
                    if not is_one and self.fields and flow.type_of(of) in types:
                        return node
        return None

    def handed_on(self) -> Iterator[tuple[str, ast.expr]]:
        """Where a function that takes or gives it is read, and neither called nor given to jax."""
        module = self.flow.module
        for node in module.nodes(ast.Attribute):
            is_method = node.attr in self.crossed and self.flow.ran(node)
            if is_method and self.flow.is_callable(node) and not _is_called(module, node):
                yield node.attr, node
        for scope in module.scopes.all:
            for name in self.crossed & scope.bindings.keys():
                if any(each.kind in ("def", "class") for each in scope.bindings[name]):
                    for read in module.reads(scope, name):
                        if not _is_called(module, read):
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
        match node:
            case ast.Call(func=function) if isinstance(function, ast.Name | ast.Attribute):
                return self._is_mentioned(function)
            case ast.Name(id=name):
                held = variable(self.flow.module, node)
                return name in self.definitions or held in self.variables
            case ast.Attribute(attr=name):
                return name in self.definitions | self.fields
        return False


def _related(flow: FileFlow, serials: set[int]) -> _Related:
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
    return _Related(
        flow,
        frozenset(definitions),
        frozenset(crossed - {""}),
        frozenset(fields),
        frozenset(variables),
    )


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
