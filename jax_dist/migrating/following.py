"""What is done with one value that has an axis over devices in front."""

import ast
import dataclasses
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

from jax_dist.checker import functions, pmaps, scopes, stacking
from jax_dist.checker.flow import Flow, Origin
from jax_dist.checker.modules import Module
from jax_dist.checker.stacking import Kind


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class First:
    """The part of one device is taken: `unreplicate(x)`, `x[0]`, `tree_map(lambda x: x[0], x)`."""

    node: ast.expr  # the whole
    of: ast.expr  # x


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """It is a positional argument of a mapped call."""

    call: ast.Call
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """It flows on to where it is looked at again, or nothing is done that depends on its shape."""

    caution: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Lost:
    """Something is done that is not followed."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collected:
    """It is put into a list whose elements lose the axis later, by flax's `get_metrics`."""

    calls: tuple[ast.Call, ...]  # of get_metrics


Use: TypeAlias = First | Given | Kept | Lost | Collected

GET_METRICS = "flax.training.common_utils.get_metrics"


def carriers(module: Module, flow: Flow) -> Iterator[ast.expr]:
    """Every expression that is read and may have the axis: names, `self.x`, calls that make it."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if any(origin.is_stacked for origin in flow.origins(node)):
                yield node
        elif isinstance(node, ast.Call) and not _is_leaf_call(module, node):
            if any(origin.is_stacked and origin.node is node for origin in flow.origins(node)):
                yield node
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if functions.is_self(node) and any(each.is_stacked for each in flow.origins(node)):
                yield node


def _is_leaf_call(module: Module, node: ast.Call) -> bool:
    """Whether it stands in the lambda of a tree_map: there it is done to each leaf."""
    for around in module.ancestors(node):
        if isinstance(around, ast.Lambda):
            call = module.parent(around)
            return isinstance(call, ast.Call) and module.qualified_name(call.func) in (
                stacking.TREE_MAPS
            )
        if isinstance(around, ast.stmt):
            return False
    return False


def use(module: Module, flow: Flow, node: ast.expr) -> Use:
    """What is done with a value, seen from the expression that reads it."""
    around = module.parent(node)
    match around:
        case ast.Attribute(value=value) if value is node:
            return _of_part(module, flow, node, around)
        case ast.Subscript(value=value) if value is node:
            return _of_part(module, flow, node, around)
        case ast.Call():
            return _in_call(module, flow, node, around)
        case ast.keyword():
            return _by_name(module, flow, node)
        case ast.Assign(value=value, targets=targets) if value is node:
            return _assigned(module, targets, node)
        case ast.Tuple() | ast.List() if isinstance(around.ctx, ast.Load):
            return _in_tuple(module, around, node)
        case ast.Return():
            return _returned(module, around)
        case ast.IfExp(test=test) if test is not node:
            return use(module, flow, around)
        case ast.Compare(ops=[ast.Is() | ast.IsNot()]) | ast.Expr():
            return Kept()
        case ast.Lambda():
            return Lost(f"a lambda in line {around.lineno} returns it")
    what = type(around).__name__.lower()
    return Lost(f"line {node.lineno} uses it in a {what}: {_short(module, around)}")


def _of_part(module: Module, flow: Flow, node: ast.expr, around: ast.expr) -> Use:
    origins = flow.origins(around)
    if origins and all(origin.kind is Kind.ONE for origin in origins):
        return First(around, node)
    if origins and all(origin.is_stacked for origin in origins):
        return use(module, flow, around)
    return Lost(f"line {node.lineno} uses {_short(module, around)}")


def _in_call(module: Module, flow: Flow, node: ast.expr, call: ast.Call) -> Use:
    if node is call.func:
        return Lost(f"line {node.lineno} calls it")
    if call in flow.mapped_calls:
        return Given(call, next(n for n, each in enumerate(call.args) if each is node))
    done = stacking.stacking(module, call)
    if done is not None and done.kind is Kind.ONE and done.of is node:
        return First(call, node)
    if stacking.first_of_leaves(module, call) is node:
        return First(call, node)
    name = module.qualified_name(call.func)
    if name == "jax.block_until_ready" and call.args == [node]:
        return use(module, flow, call)
    if _is_followed(module, call, node):
        return Kept()
    calls = _collected(module, call)
    if calls:
        return Collected(calls)
    return Lost(f"line {node.lineno} gives it to {_short(module, call.func)}")


def _collected(module: Module, call: ast.Call) -> tuple[ast.Call, ...]:
    """The calls of get_metrics on the list that `call` appends to; () where more is done to it."""
    match call.func:
        case ast.Attribute(value=ast.Name() as found, attr="append"):
            home = module.scope(found).lookup(found.id)
        case _:
            return ()
    if home is None or not all(_is_empty_or_metrics(module, each) for each in home[1]):
        return ()
    calls: list[ast.Call] = []
    for read in module.reads(home[0], found.id):
        around = module.parent(read)
        match around:
            case ast.Attribute(attr="append"):
                pass
            case ast.Call(args=[argument]) if argument is read:
                if module.qualified_name(around.func) == GET_METRICS:
                    calls.append(around)
                elif _is_filled(module, read):
                    return ()
            case _ if _is_filled(module, read):
                return ()
    return tuple(calls)


def _is_empty_or_metrics(module: Module, binding: Any) -> bool:
    match binding.value:
        case ast.List(elts=[]):
            return True
        case ast.Call(func=function):
            return module.qualified_name(function) == GET_METRICS
    return False


def _is_filled(module: Module, read: ast.Name) -> bool:
    """Whether a read may see the list; after `xs = get_metrics(xs)` it sees another value."""
    values = module.values(read)
    return values is None or any(not isinstance(value, ast.Call) for value in values)


def _by_name(module: Module, flow: Flow, node: ast.expr) -> Use:
    call = module.parent(module.parent(node))
    if not isinstance(call, ast.Call):
        return Lost(f"line {node.lineno} gives it to a class")
    if call in flow.mapped_calls:
        return Lost(f"line {node.lineno} gives it by name to a mapped function")
    if _is_followed(module, call, node):
        return Kept()
    return Lost(f"line {node.lineno} gives it to {_short(module, call.func)}")


def _is_followed(module: Module, call: ast.Call, node: ast.expr) -> bool:
    """Whether the flow goes on inside a function of this file."""
    function: Any = pmaps.definition(module, call.func)
    if function is None or isinstance(function, ast.Lambda) or not is_private(module, function):
        return False
    if functions.callers(module, function) is None:
        return False
    for parameter in scopes.parameters(function.args):
        if functions.argument_of(module, call, function, parameter) is node:
            return True
    return False


def _assigned(module: Module, targets: list[ast.expr], node: ast.expr) -> Use:
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
                return Lost(f"line {node.lineno} keeps it in {_short(module, each)}")
    return Kept()


def _in_tuple(module: Module, display: ast.expr, node: ast.expr) -> Use:
    around = module.parent(display)
    if isinstance(around, ast.Return):
        return _returned(module, around)
    if isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Tuple):
        return Kept()
    return Lost(f"line {node.lineno} puts it into a tuple or list")


def _returned(module: Module, statement: ast.stmt) -> Use:
    function: Any = module.function(statement)
    if function is None or isinstance(function, ast.Lambda):
        return Lost(f"line {statement.lineno} returns it")
    if is_private(module, function) and functions.callers(module, function) is not None:
        return Kept()
    return Kept(f"{function.name} returns it: its callers now get it without the device axis")


def stays_inside(module: Module, origin: Origin) -> bool:
    """Whether the functions it came through are called from this file only."""
    return all(
        isinstance(function, ast.Lambda) or is_private(module, function)
        for function in origin.through
    )


def is_private(module: Module, function: Any) -> bool:
    """Whether no other file is likely to call a function: no neighbour says its name."""
    if module.function(function) is not None:
        return True
    return module.once(_said_next_door).isdisjoint([function.name])


def _said_next_door(module: Module) -> frozenset[str]:
    """The functions of this file whose names other files of its folder say."""
    folder = os.path.dirname(os.path.abspath(module.source.path))
    own = os.path.basename(module.source.path)
    names = [each.name for each in module.tree.body if isinstance(each, ast.FunctionDef)]
    found: set[str] = set()
    try:
        others = sorted(each for each in os.listdir(folder) if each.endswith(".py") and each != own)
    except OSError:
        others = []
    for other in others:
        with open(os.path.join(folder, other), "rb") as file:
            data = file.read()
        if os.path.splitext(own)[0].encode() in data:
            found.update(name for name in names if name.encode() in data)
    return frozenset(found)


def is_iterated(module: Module, origin: Origin) -> bool:
    """Whether the value is an element of what the node makes."""
    assert isinstance(origin.node, ast.Call)
    name = module.qualified_name(origin.node.func)
    return name in stacking.PREFETCH or (name is None and _is_map(origin.node))


def _is_map(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "map"


def _short(module: Module, node: Any) -> str:
    text = " ".join(module.text(node).split()) if hasattr(node, "lineno") else "it"
    return text if len(text) <= 60 else f"{text[:57]}..."
