"""Where a value may go, by the text of one file: an escape analysis.

A recording shows where a value went in one run. Where code that never ran would take it, or where
what such code makes would come, only the text says: through variables, containers, fields,
arguments and results. What is not followed is lost, and may be anywhere.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterable
from typing import Literal

from jax_dist.lint.model import functions, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate import imports
from jax_dist.migrate.device_axis.flow_uses import KEEPING
from jax_dist.migrate.recorded_flow import FileFlow

# What has the value of a part of it, or a value that was made of it.
_MADE_OF_PARTS = (
    *(ast.Await, ast.BinOp, ast.BoolOp, ast.Compare, ast.Dict, ast.DictComp, ast.FormattedValue),
    *(ast.GeneratorExp, ast.IfExp, ast.JoinedStr, ast.Lambda, ast.List, ast.ListComp, ast.Set),
    *(ast.SetComp, ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp),
)
_ENDS = (ast.Expr, ast.If, ast.While, ast.Assert, ast.Delete)  # nothing of the value goes on
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant)
# Each call gives a container that nothing else holds.
NEW_CONTAINERS = frozenset(
    ("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict"),
)
# They may put one argument into another, or keep it.
_KEEPING = frozenset(("numpy.copyto", "numpy.put", "numpy.place", "numpy.putmask", "map", "filter"))
_FILLING = KEEPING | {"send"}
# Of the libraries of Python, those that do not.
_PLAIN = frozenset(
    ("collections", "copy", "dataclasses", "functools", "itertools", "json", "logging", "math")
    + ("os", "pickle", "pprint", "random", "statistics", "time", "typing")
)
_KEEPING_ROOTS = sys.stdlib_module_names - _PLAIN
# Types of what has values that are no leaves of it.
_HIDING = re.compile(
    r"iterator$|^(generator|dict_\w+|zip|enumerate|map|filter|reversed|chain)$|method"
)


def escapes(flow: FileFlow, node: ast.expr) -> bool:
    """Whether the value of an expression that never ran may be kept, or come to code that ran."""
    reach = _Reach(flow.module, "made of it")
    reach.follow([node])
    return reach.is_lost or any(map(flow.ran, reach.expressions))


def unrun_call(flow: FileFlow, site: Site, number: int) -> ast.expr | None:
    """What never ran, and may call what a place maps in another run; None where nothing does.

    Args:
      flow: what a run has shown.
      site: the place.
      number: its number in the run.
    """
    module, reach = flow.module, _Reach(flow.module, "calls it")
    calls = [each for each in flow.nodes if number in flow.called_sites(each)]
    reach.held_by(each.func for each in calls if isinstance(each, ast.Call))
    statement = module.statement(site.node)
    if isinstance(statement, ast.FunctionDef):  # that it decorates
        reach.defines(statement)
    else:
        reach.follow([site.node])
    for node in sorted(reach.expressions, key=scopes.place):
        read = module.call_of(node) or node
        if flow.watches(read) and not flow.ran(read):
            return read
    return None


def hidden_in(flow: FileFlow, serials: set[int], makers: Collection[str]) -> set[ast.expr]:
    """The expressions that may be something in which a run does not see arrays, and which has them.

    An iterator, a view of a dictionary, a method that is not called yet, or what was given them to
    keep: `queue.put(state)`.

    Args:
      flow: what a run has shown.
      serials: of the arrays.
      makers: the names of functions through which they went, which may be generators.
    """
    module, reach = flow.module, _Reach(flow.module, "has it")
    calls = (each for each in module.nodes(ast.Call) if scopes.last_name(each.func) in makers)
    found: list[ast.expr] = [each for each in calls if _HIDING.search(flow.type_of(each))]
    for node in flow.holders(serials):
        around = module.parent(node)
        if isinstance(around, ast.keyword):
            around = module.parent(around)
        if isinstance(around, ast.Attribute):
            around = module.call_of(around) or around
        if isinstance(around, ast.Call | ast.Attribute):
            if _HIDING.search(flow.type_of(around)):
                found.append(around)
            function = getattr(around, "func", None)
            if isinstance(function, ast.Attribute) and function.attr in _FILLING:
                reach.held_by([function.value])
    reach.follow(found)
    return {*found, *reach.expressions}


class _Reach:
    """What may have a value, or something that holds it.

    Args:
      module: the file.
      wanted: what is asked for: what has the value, what may call it, or what is made of it, too.
    """

    def __init__(self, module: Module, wanted: Literal["has it", "calls it", "made of it"]):
        self._module, self._wanted = module, wanted
        self._is_made = wanted == "made of it"
        self._waiting: list[ast.expr] = []
        self.expressions: set[ast.expr] = set()
        self.is_lost = False

    def follow(self, nodes: Iterable[ast.expr]) -> None:
        """Goes on from some expressions, to the end."""
        self._waiting += nodes
        while self._waiting:
            self._step(self._waiting.pop())

    def held_by(self, names: Iterable[ast.expr]) -> None:
        """Goes on from names, fields and entries that had it in a run, and so have it here."""
        for each in names:
            self._fill(each, is_new=True)
        self.follow([])

    def defines(self, function: ast.FunctionDef) -> None:
        """Goes on from the uses of a function."""
        self._name(function.name, function)
        self.follow([])

    def _add(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if not isinstance(node, ast.expr):
                self.is_lost = True
            elif node not in self.expressions:
                self.expressions.add(node)
                self._waiting.append(node)

    def _step(self, node: ast.expr) -> None:
        """Goes from an expression to all that has its value."""
        around = self._module.parent(node)
        match around:
            case ast.Call(func=function) if function is node:
                if self._is_made:
                    self._add(around)
            case ast.Call():
                self._give(around, node)
            case ast.keyword():
                self._give(self._module.parent(around), node)
            case ast.Attribute():
                self._add(self._module.call_of(around) or around)
            case ast.comprehension(target=target):
                self._bind(target)
                self._add(self._module.parent(around))
            case ast.NamedExpr(target=target):
                self._bind(target)
                self._add(around)
            case ast.Assign(targets=targets):
                self._bind(*targets)
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                self._bind(target)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                self._bind(target)
            case ast.withitem(optional_vars=target):
                self._bind(*filter(None, [target]))
            case ast.Return() | ast.Yield() | ast.YieldFrom():
                self._return(around)
            case ast.arguments():
                self._default(around, node)
            case _ if isinstance(around, _MADE_OF_PARTS):
                self._add(around)
            case _:
                self.is_lost |= not isinstance(around, _ENDS)

    # --- variables, containers, fields

    def _bind(self, *targets: ast.expr) -> None:
        for target in targets:
            match target:
                case ast.Tuple(elts=parts) | ast.List(elts=parts):
                    self._bind(*parts)
                case ast.Starred(value=value):
                    self._bind(value)
                case ast.Name(id=name):
                    if isinstance(self._module.parent(target), ast.AugAssign):
                        self._fill(target)
                    self._name(name, target)
                case ast.Attribute(attr=name):
                    self._field(name)
                case _:
                    self._fill(target)

    def _name(self, name: str, at: ast.AST) -> None:
        """Goes on to all reads of a variable."""
        module = self._module
        found = module.scope(at).lookup(name)
        if found is None:
            self.is_lost = True
            return
        scope, _ = found
        if scope is module.scopes.module:
            self._lose_elsewhere(name)
        self._add(*module.reads(scope, name))
        if scope.is_class:
            self._field(name)

    def _field(self, name: str) -> None:
        """Goes on to all reads of a field, of whatever object."""
        self._lose_elsewhere(name)
        for read in functions.attribute_reads(self._module, name):
            is_called = functions.is_self(read) or self._module.call_of(read) is not None
            # Where `self.step` is a mapped function, `state.step` is none.
            if is_called or self._wanted != "calls it":
                self._add(read)

    def _lose_elsewhere(self, name: str) -> None:
        """Other files may have what a name of this one has; who asks for calls looks by itself."""
        if self._is_made:
            self.is_lost |= imports.is_used_elsewhere(self._module, name)

    def _fill(self, container: ast.expr, *, is_new: bool = False) -> None:
        """Goes on to all that reads a container, which has the value from now on.

        Args:
          container: an expression of it, or of an entry.
          is_new: nothing else holds it.
        """
        while isinstance(container, ast.Subscript):
            container = container.value
        match container:
            case ast.Name(id=name):
                found = self._module.scope(container).lookup(name)
                is_new = is_new or (found is not None and all(map(self._is_new, found[1])))
                self._name(name, container)
            case ast.Attribute(attr=name):
                self._field(name)
        self.is_lost |= not is_new

    def _is_new(self, binding: Binding) -> bool:
        """Whether what gives a variable its value is a container that nothing else holds."""
        if isinstance(self._module.parent(binding.node), ast.AugAssign):
            return True
        if isinstance(binding.node, ast.Assign) and len(binding.node.targets) > 1:
            return False
        match binding.value:
            case ast.Call(func=ast.Name(id=name)):
                return name in NEW_CONTAINERS
        return isinstance(binding.value, _DISPLAYS)

    # --- functions

    def _give(self, call: ast.AST, argument: ast.expr) -> None:
        """Goes on to what a call does with an argument."""
        if not isinstance(call, ast.Call):  # `class Trainer(Base, step=p_step)`
            self.is_lost = True
            return
        known = self._called(call.func)
        for each in known:
            self._parameter(each, call, argument)
        function = call.func
        is_own = not isinstance(function, ast.Attribute) or functions.is_self(function)
        if not known or not is_own:  # a method of that name may be of another class
            self._add(call)
            self._keep(call)

    def _called(self, function: ast.expr) -> list[ast.AST]:
        """The functions and classes of the file that a call may mean."""
        module = self._module
        match function:
            case ast.Name(id=name):
                found = module.scope(function).lookup(name)
                bindings = found[1] if found is not None else []
                is_known = all(each.kind in ("def", "class") for each in bindings)
                return [each.node for each in bindings] if is_known else []
            case ast.Attribute(attr=name) if module.qualified_name(function) is None:
                return [*module.once(_methods).get(name, ())]
        return []

    def _parameter(self, called: ast.AST, call: ast.Call, argument: ast.expr) -> None:
        module = self._module
        if isinstance(called, ast.ClassDef):
            made = [each for each in called.body if getattr(each, "name", "") == "__init__"]
            if self._is_made:
                self._add(call)  # the object holds it
            if not made:
                names = (each.target for each in called.body if isinstance(each, ast.AnnAssign))
                for each in names:
                    self._field(scopes.last_name(each))
                self.is_lost |= bool(called.bases) or not called.body
                return
            called = made[0]
        if not isinstance(called, ast.FunctionDef | ast.AsyncFunctionDef):
            self.is_lost = True
            return
        is_static = any(scopes.last_name(each) == "staticmethod" for each in called.decorator_list)
        taken = [
            each
            for each in scopes.parameters(called.args)
            if functions.argument_of(module, call, called, each) is argument
        ]
        if not taken or is_static:
            self.is_lost = True
            self._add(call)
        for each in taken:
            self._add(*module.reads(module.scopes.of[called], each.arg))

    def _keep(self, call: ast.Call) -> None:
        """What is called, and is no function of the file, may keep an argument, or fill another."""
        module, function = self._module, call.func
        name = module.qualified_name(function) or module.builtin(function)
        if any(each.arg == "out" for each in call.keywords):
            self.is_lost = True
        if name is not None:
            self.is_lost |= name in _KEEPING or name.split(".")[0] in _KEEPING_ROOTS
            for each in call.args:
                self._hand_on(each)
            return
        made = module.values(function) or []
        if made and all(isinstance(each, ast.Call) for each in made):
            return  # such as what jax.pmap gave
        if isinstance(function, ast.Attribute):
            self._fill(function.value)
        else:
            self.is_lost = True

    def _hand_on(self, function: ast.expr) -> None:
        """Goes on to the parameters of a function that a library may call with the value."""
        module = self._module
        known = [function] if isinstance(function, ast.Lambda) else self._called(function)
        for each in known:
            if isinstance(each, scopes.Function):
                for parameter in scopes.parameters(each.args):
                    self._add(*module.reads(module.scopes.of[each], parameter.arg))
        self.is_lost |= scopes.last_name(function) in _FILLING

    def _return(self, statement: ast.AST) -> None:
        """Goes on to where the function around is called."""
        module, function = self._module, self._module.function(statement)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            self.is_lost = True
            return
        name = function.name
        is_seen = not name.startswith("__") and not function.decorator_list
        self.is_lost |= not is_seen or name in module.once(_written_names)
        self._lose_elsewhere(name)
        found = module.scope(function).lookup(name)
        reads: list[ast.expr] = [*module.reads(found[0], name)] if found is not None else []
        if isinstance(module.parent(function), ast.ClassDef):
            reads += functions.attribute_reads(module, name)
        for read in reads:
            self._add(module.call_of(read))

    def _default(self, arguments: ast.arguments, value: ast.expr) -> None:
        """Goes on from the default of a parameter."""
        function = self._module.parent(arguments)
        for parameter, default in functions.defaults(arguments):
            if default is value:
                self._add(*self._module.reads(self._module.scopes.of[function], parameter.arg))


def _written_names(module: Module) -> set[str]:
    """The texts by which something may be asked for: `getattr(source, "entries")`."""
    return {
        e.value
        for e in ast.walk(module.tree)
        if isinstance(e, ast.Constant) and isinstance(e.value, str)
    }


def _methods(module: Module) -> dict[str, list[ast.AST]]:
    """The methods of all classes, by their names."""
    found: dict[str, list[ast.AST]] = {}
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        if isinstance(module.parent(node), ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found
