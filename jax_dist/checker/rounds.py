"""Whether the rounds of a loop could be calls of one function: nothing passes between them."""

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax_dist.checker import order, structure
from jax_dist.checker.modules import Module
from jax_dist.checker.scopes import Binding, Scope

_ELSEWHERE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
# Builtins that give the same for the same, and change nothing.
_PURE = frozenset(
    ("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "getattr", "hasattr")
    + ("int", "isinstance", "len", "list", "max", "min", "range", "reversed", "round", "slice")
    + ("sorted", "str", "sum", "tuple", "zip")
)
_OF_TRACED = frozenset(("len", "isinstance", "getattr", "hasattr", "tuple", "list", "zip", "sum"))
_TAKING = frozenset(("pop", "popitem", "setdefault", "send", "__next__", "next"))
# What keeps the books of its own while a function is traced.
_KEEPING = ("haiku.", "flax.", "numpyro.", "objax.", "oryx.")
_IN_INDICES = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_DRAWS = frozenset(("split", "normal", "uniform", "randint", "bernoulli", "permutation"))
_OF_JAX = ("jax.numpy.", "jax.lax.", "jax.nn.")
# Attributes by which a parameter shows that it is an array.
_OF_ARRAYS = frozenset(("shape", "ndim", "dtype", "at", "T", "size", "reshape", "astype"))


def are_independent(module: Module, loop: ast.For, collecting: Sequence[ast.stmt]) -> bool:
    """Whether each round needs nothing of the others, and leaves behind only what it collects.

    Args:
      module: its file.
      loop: whose rounds these are.
      collecting: the statements of its body that hand its results on.
    """
    scope = module.scope(loop)
    rest = [each for each in loop.body if each not in collecting]
    if not all(_is_plain(each) for each in rest) or not _is_target(loop.target):
        return False
    inside = [node for each in loop.body for node in ast.walk(each)]
    if any(isinstance(node, _ELSEWHERE) for node in inside):
        return False
    names = set(_bound(loop.target)) | {name for each in rest for name in _bound_in(each)}
    if names & scope.outer or not _Order(module, scope, names).holds(loop):
        return False
    if any(_is_read_behind(module, scope, loop, name) for name in names):
        return False
    rows = set(_bound(loop.target))
    return all(_is_pure(module, node, rows) for node in inside)


def _is_plain(statement: ast.stmt) -> bool:
    """Whether it assigns plain names, and nothing else."""
    match statement:
        case ast.Assign(targets=targets):
            return all(map(_is_target, targets))
        case ast.AnnAssign(target=target, value=ast.expr()) | ast.AugAssign(target=target):
            return isinstance(target, ast.Name)
        case ast.If(body=body, orelse=orelse):
            return all(map(_is_plain, (*body, *orelse)))
        case ast.For(target=target, body=body, orelse=orelse):
            return _is_target(target) and all(map(_is_plain, (*body, *orelse)))
        case ast.Expr(value=ast.Constant()):
            return True
    return isinstance(statement, ast.Assert | ast.Pass)


def _is_target(target: ast.expr) -> bool:
    if isinstance(target, ast.Tuple | ast.List):
        return all(map(_is_target, target.elts))
    return isinstance(target, ast.Name)


def _bound(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def _bound_in(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        targets: list[Any] = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For):
            for target in targets:
                yield from _bound(target)


class _Order:
    """Whether each name is given its value in a round before the round reads it.

    Args:
      module: the file.
      scope: that of the loop.
      names: all that the loop binds.
    """

    def __init__(self, module: Module, scope: Scope, names: set[str]):
        self._module, self._scope, self._names = module, scope, names

    def holds(self, loop: ast.For) -> bool:
        return self._block(loop.body, set(_bound(loop.target))) is not None

    def _block(self, block: Iterable[ast.stmt], known: set[str]) -> set[str] | None:
        """The names that surely have a value behind a block; None where one is read too early."""
        for statement in block:
            after = self._statement(statement, known)
            if after is None:
                return None
            known = after
        return known

    def _statement(self, statement: Any, known: set[str]) -> set[str] | None:
        if isinstance(statement, ast.If):
            return self._branches(statement, known)
        if isinstance(statement, ast.For):
            return self._inner_loop(statement, known)
        if not self._are_known(statement, known):
            return None
        if isinstance(statement, ast.AugAssign) and not known.issuperset(_bound(statement.target)):
            return None
        return known | set(_bound_in(statement))

    def _branches(self, statement: ast.If, known: set[str]) -> set[str] | None:
        one = self._block(statement.body, known)
        other = self._block(statement.orelse, known)
        if one is None or other is None or not self._are_known(statement.test, known):
            return None
        return one & other

    def _inner_loop(self, loop: ast.For, known: set[str]) -> set[str] | None:
        """It may have no rounds at all."""
        inside = known | set(_bound(loop.target))
        blocks = [self._block(loop.body, inside), self._block(loop.orelse, known)]
        return known if self._are_known(loop.iter, known) and None not in blocks else None

    def _are_known(self, node: ast.AST, known: set[str]) -> bool:
        return all(
            each.id in known or not self._is_of_loop(each)
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        )

    def _is_of_loop(self, read: ast.Name) -> bool:
        """Not so for the names of a comprehension."""
        if read.id not in self._names:
            return False
        found = self._module.scope(read).lookup(read.id)
        return found is not None and found[0] is self._scope


def _is_read_behind(module: Module, scope: Scope, loop: ast.For, name: str) -> bool:
    """Whether the value of the last round is used."""
    for read in module.reads(scope, name):
        if order.holds(loop, read):
            continue
        bindings = module.reaching(read)
        if bindings is None or any(order.holds(loop, each.node) for each in bindings):
            return True
    return False


def _is_pure(module: Module, node: ast.AST, rows: set[str]) -> bool:
    """Whether a node may run for a traced row too, and changes nothing that others see."""
    if isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.While):
        return not _reads(node.test, rows)
    if not isinstance(node, ast.Call):
        return True
    name = module.qualified_name(node.func)
    if name is not None:
        return not name.startswith(_KEEPING)
    if isinstance(node.func, ast.Attribute):
        return node.func.attr not in _TAKING
    if isinstance(node.func, ast.Name) and module.scope(node.func).lookup(node.func.id) is None:
        return _is_pure_builtin(node, node.func.id, rows)
    return True


def _is_pure_builtin(call: ast.Call, name: str, rows: set[str]) -> bool:
    if not hasattr(builtins, name):
        return True  # of `from x import *`
    is_of_row = _reads(call, rows)
    return name in _PURE and (name in _OF_TRACED or not is_of_row)


def _reads(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def is_only_an_index(module: Module, loop: ast.For) -> bool:
    """Whether the number of the round is only used where a traced one will do.

    That is as an index of arrays made by jax.numpy, and of parameters that are asked for what only
    arrays have; and in `jax.random.fold_in`.
    """
    if not isinstance(loop.target, ast.Name):
        return False
    scope, name = module.scope(loop), loop.target.id
    reads = [each for each in module.reads(scope, name) if order.holds(loop, each)]
    return all(_is_index(module, each) for each in reads)


def _is_index(module: Module, read: ast.expr) -> bool:
    around = module.parent(read)
    if isinstance(around, ast.Call):
        name = module.qualified_name(around.func)
        return name == "jax.random.fold_in" and around.args[1:] == [read]
    while isinstance(around, ast.BinOp) and isinstance(around.op, _IN_INDICES):
        around = module.parent(around)
    if isinstance(around, ast.Tuple):
        around = module.parent(around)
    if not isinstance(around, ast.Subscript):
        return False
    if isinstance(around.value, ast.Attribute) and around.value.attr == "at":
        return True
    return isinstance(around.value, ast.Name) and _is_array(module, around.value)


def _is_array(module: Module, name: ast.Name) -> bool:
    """Whether a name is an array of JAX, and not a list, a dict or an array of NumPy."""
    found = module.scope(name).lookup(name.id)
    bindings = module.reaching(name)
    if found is None or not bindings:
        return False
    return all(_makes_array(module, found[0], name.id, each) for each in bindings)


def _makes_array(module: Module, scope: Scope, name: str, binding: Binding) -> bool:
    if binding.kind == "parameter":
        return any(_asks_for_array(module, read) for read in module.reads(scope, name))
    if binding.kind != "assign" or not isinstance(binding.value, ast.Call):
        return False
    made = module.qualified_name(binding.value.func) or ""
    if made.startswith("jax.random."):
        return made.rpartition(".")[2] in _DRAWS
    return made.startswith(_OF_JAX) and structure.is_array(module, binding.value)


def _asks_for_array(module: Module, read: ast.expr) -> bool:
    """Whether a name is read as only an array is: `x.shape`, `x[0, i]`, `x[:, 0]`."""
    match module.parent(read):
        case ast.Attribute(attr=attr):
            return attr in _OF_ARRAYS
        case ast.Subscript(value=value, slice=ast.Tuple()):
            return value is read
    return False
