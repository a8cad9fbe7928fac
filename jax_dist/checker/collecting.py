"""Loops that put what they compute from each row of an array into lists, to be stacked behind."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jax_dist.checker import order, rounds, scopes, structure
from jax_dist.checker.modules import Module

_STACKS = ("jax.numpy.stack", "jax.numpy.array", "jax.numpy.asarray")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """One list: begun empty above the loop, filled once a round, and only stacked behind it."""

    name: str
    begun: ast.stmt  # `xs = []`, or `xs, ys = [], []`
    append: ast.Expr
    stacks: tuple[ast.Call, ...]  # `jnp.stack(xs)`, in order

    @property
    def element(self) -> ast.expr:
        return self.append.value.args[0]  # type: ignore[attr-defined] # a call


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Collecting:
    """A loop whose rounds do not depend on each other."""

    loop: ast.For
    block: Sequence[ast.stmt]  # that holds the loop
    lists: tuple[Collected, ...]  # in the order of their appends


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How many rows there are, as far as the file says it."""

    text: str = ""  # "8", "PAIRS"
    number: int | None = None


def collecting(module: Module, loop: ast.For) -> Collecting | None:
    """What a loop collects; None where it does anything else, or where that cannot be seen."""
    scope = module.scope(loop)
    block = order.block_of(module, loop)
    if block is None or loop.orelse or not isinstance(scope.node, scopes.Function):
        return None
    begun = _begun(block[: block.index(loop)])
    appends = [each for each in loop.body if isinstance(each, ast.Expr) and _appended(each)]
    lists: list[Collected] = []
    for append in appends:
        name = _appended(append) or ""
        stacks = _stacks(module, loop, block, name, begun.get(name), append)
        if not stacks:
            return None
        lists.append(Collected(name, begun[name], append, tuple(stacks)))
    independent = rounds.are_independent(module, loop, appends)
    return Collecting(loop, block, tuple(lists)) if lists and independent else None


def rows(module: Module, node: ast.expr) -> Rows | None:
    """The rows that a loop goes over.

    Args:
      module: its file.
      node: what the loop goes over.

    Returns:
      None for all but arrays made by jax.numpy, keys made by `split`, and `range(n)`, with a number
      or a number of the module for `n`.
    """
    if isinstance(node, ast.Name):
        values = module.values(node) or []
        only = values[0] if len(values) == 1 else None
        return rows(module, only) if isinstance(only, ast.Call) else None
    if is_range(module, node):
        count = node.args[0]  # type: ignore[attr-defined] # a call
        number = _number(module, count)
        return None if number is None else Rows(module.text(count), number)
    name = module.qualified_name(node.func) if isinstance(node, ast.Call) else None
    if name == "jax.random.split":
        return _keys(module, node)
    is_array = (name or "").startswith("jax.numpy.") and structure.is_array(module, node)
    return Rows() if is_array else None


def is_range(module: Module, node: ast.AST) -> bool:
    """Whether it is `range(n)`, of Python."""
    match node:
        case ast.Call(func=ast.Name(id="range") as name, args=[_], keywords=[]):
            return module.scope(name).lookup("range") is None
    return False


def _keys(module: Module, call: Any) -> Rows:
    counts = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "num")]
    if not counts:
        return Rows("2", 2)
    is_short = isinstance(counts[0], ast.Constant | ast.Name)
    return Rows(module.text(counts[0]) if is_short else "", _number(module, counts[0]))


def _number(module: Module, node: ast.expr) -> int | None:
    """A number, also one to which the module gives a name."""
    if isinstance(node, ast.Name):
        found = module.scope(node).lookup(node.id)
        values = module.values(node) or []
        is_global = found is not None and found[0] is module.scopes.module
        if not is_global or len(values) != 1:
            return None
        node = values[0]
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int)
    return node.value if is_number else None  # type: ignore[attr-defined] # a constant


def _begun(above: Sequence[ast.stmt]) -> dict[str, ast.stmt]:
    """The lists that begin empty, by name; of several the last."""
    found: dict[str, ast.stmt] = {}
    for statement in above:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=[])):
                found[name] = statement
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.List(elts=[])):
                found[name] = statement
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                if len(names) == len(values) and all(map(_is_empty, names, values)):
                    found |= {each.id: statement for each in names}  # type: ignore[attr-defined]
    return found


def _is_empty(target: ast.expr, value: ast.expr) -> bool:
    return isinstance(target, ast.Name) and isinstance(value, ast.List) and not value.elts


def _appended(statement: ast.stmt) -> str | None:
    """`xs` of `xs.append(x)`."""
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[each], keywords=[]
            )
        ) if not isinstance(each, ast.Starred):
            return name
    return None


def _stacks(
    module: Module,
    loop: ast.For,
    block: Sequence[ast.stmt],
    name: str,
    begun: ast.stmt | None,
    append: ast.stmt,
) -> list[ast.Call] | None:
    """The calls that stack a list; None where anything else is done with it."""
    scope = module.scope(loop)
    bound = {module.statement(each.node): each for each in scope.bindings.get(name, ())}
    again = [each for each in bound if each is not begun]
    if begun not in bound or len(again) > 1:
        return None
    rebound = again[0] if again else None
    if rebound is not None and not _stacks_in_place(module, rebound, loop, block, name):
        return None
    found: list[ast.Call] = []
    appended = 0
    for read in module.reads(scope, name):
        stack = module.parent(read)
        if module.statement(read) is append:
            appended += 1
        elif rebound is not None and _is_after(read, rebound):
            pass  # of the array
        elif _is_after(read, loop) and _is_stack(module, stack, read):
            found.append(stack)  # type: ignore[arg-type] # a call
        else:
            return None
    return found if appended == 1 else None


def _stacks_in_place(
    module: Module, statement: ast.stmt, loop: ast.For, block: Sequence[ast.stmt], name: str
) -> bool:
    """`xs = jnp.stack(xs)` behind the loop, also where others are assigned beside it."""
    if statement not in block or not _is_after(statement, loop):
        return False
    for target, value in assigned(statement):
        if isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Call):
            read = value.args[0] if value.args else None
            is_itself = isinstance(read, ast.Name) and read.id == name
            return is_itself and _is_stack(module, value, read)
    return False


def _is_stack(module: Module, call: ast.AST, read: ast.expr | None) -> bool:
    if not isinstance(call, ast.Call) or call.args[:1] != [read]:
        return False
    return module.qualified_name(call.func) in _STACKS


def assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """`(target, value)` of an assignment, one by one where tuples of one length are assigned."""
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            if len(targets) == len(values):
                yield from zip(targets, values, strict=True)
        case ast.Assign(targets=[target], value=value):
            yield target, value


def _is_after(node: Any, other: Any) -> bool:
    return (node.lineno, node.col_offset) >= (other.end_lineno, other.end_col_offset)
