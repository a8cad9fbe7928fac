"""Where the values of expressions that never ran may go: an escape analysis of one file.

A function that evaluates, and that no run called, may make copies for all devices as it likes,
while what it makes ends there. Where such values are kept, or given to code that ran, they may come
in the place of what a run did show.
"""

import ast

from jax_dist.checker.model.scopes import Binding, NameScope
from jax_dist.codemod import imports
from jax_dist.codemod.recorded_flow import FileFlow

# What has the value of a part of it, or a value that was made of it.
_MADE_OF_PARTS = (
    ast.Attribute,
    ast.Await,
    ast.BinOp,
    ast.BoolOp,
    ast.Compare,
    ast.Dict,
    ast.DictComp,
    ast.FormattedValue,
    ast.GeneratorExp,
    ast.IfExp,
    ast.JoinedStr,
    ast.List,
    ast.ListComp,
    ast.Set,
    ast.SetComp,
    ast.Starred,
    ast.Subscript,
    ast.Tuple,
    ast.UnaryOp,
)
_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant)
# They read a value, and nothing of it goes on.
_ENDS = (ast.Expr, ast.If, ast.While, ast.Assert)
# Each call gives a container that nothing else holds.
NEW_CONTAINERS = frozenset(
    ("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict"),
)


class Escapes:
    """Tells whether values may leave the code that never ran.

    Args:
      flow: what a run of the file has shown.
    """

    def __init__(self, flow: FileFlow):
        self._flow, self._module = flow, flow.module
        self._ends: set[ast.AST] = set()  # looked at: it does not escape, or is being followed

    def check(self, node: ast.expr) -> bool:
        """Whether the value of an expression may be kept, or come to code that ran."""
        if node in self._ends:
            return False
        self._ends.add(node)
        around = self._module.parent(node)
        if self._flow.ran(node):
            return True
        if isinstance(around, ast.keyword):
            around = self._module.parent(around)
        match around:
            case ast.Call(func=function):
                return (function is not node and self._keeps(function)) or self.check(around)
            case ast.comprehension(target=target):
                return self._is_bound(target) or self._check_around(around)
            case ast.NamedExpr(target=target):
                return self._is_bound(target) or self.check(around)
            case ast.Assign(targets=targets):
                return any(map(self._is_bound, targets))
            case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                return self._is_bound(target)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                return self._is_bound(target)
            case ast.Return() | ast.Yield() | ast.YieldFrom():
                return self._is_returned(around)
        if isinstance(around, _MADE_OF_PARTS):
            return self.check(around)
        return not isinstance(around, _ENDS)

    def _check_around(self, part: ast.AST) -> bool:
        around = self._module.parent(part)
        return not isinstance(around, ast.expr) or self.check(around)

    def _keeps(self, function: ast.expr) -> bool:
        """Whether what is called may keep what it is given: `queue.put(batch)`."""
        is_method = isinstance(function, ast.Attribute)
        if not is_method or self._module.qualified_name(function) is not None:
            return False
        return self._is_bound(function.value)

    def _is_bound(self, target: ast.expr) -> bool:
        """Whether a value may escape from what is bound to it, or holds it from now on."""
        match target:
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return any(map(self._is_bound, parts))
            case ast.Starred(value=value):
                return self._is_bound(value)
            case ast.Subscript(value=ast.Name() as name):
                return self._is_bound(name)
            case ast.Name(id=name):
                found = self._module.scope(target).lookup(name)
                return found is None or self._is_read(*found, name, target)
        return True

    def _is_read(
        self, scope: NameScope, bindings: list[Binding], name: str, target: ast.Name
    ) -> bool:
        """Whether a variable, or a container in it, is read where a value may escape."""
        module = self._module
        # `found["loss"] = ...`, `found.append(...)`, `found += ...`
        is_changed = isinstance(target.ctx, ast.Load) or self._is_changed(target)
        if is_changed and not all(map(self._is_new, bindings)):
            return True
        is_global = scope is module.scopes.module
        if scope.is_class or (is_global and imports.is_used_elsewhere(module, name)):
            return True
        return any(self.check(read) for read in module.reads(scope, name) if read is not target)

    def _is_returned(self, statement: ast.AST) -> bool:
        """Whether a value may escape from where the function around is called."""
        module, function = self._module, self._module.function(statement)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return True
        name = function.name
        if name.startswith("__") or function.decorator_list:
            return True
        if imports.is_used_elsewhere(module, name):
            return True
        found = module.scope(function).lookup(name)
        reads: list[ast.expr] = [*module.reads(found[0], name)] if found is not None else []
        reads += [each for each in module.nodes(ast.Attribute) if each.attr == name]
        calls = map(module.call_of, reads)
        return any(call is None or self.check(call) for call in calls)

    def _is_changed(self, name: ast.AST) -> bool:
        return isinstance(self._module.parent(name), ast.AugAssign)

    def _is_new(self, binding: Binding) -> bool:
        """Whether what gives a variable its value is a container that nothing else holds."""
        match binding.value:
            case ast.Call(func=ast.Name(id=name)):
                return name in NEW_CONTAINERS
        return isinstance(binding.value, _DISPLAYS) or self._is_changed(binding.node)
