"""What a file does with values that carry the device axis: how each is made, and how it is used."""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jax_dist.lint.model import functions, pmaps, stacking
from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.device_axis import device_counts
from jax_dist.migrate.recorded_flow import FileFlow

Way: TypeAlias = Literal[
    "passes",  # the value goes on as it is
    "first",  # the copy of one device is taken: `unreplicate(x)`, `x[0]`
    "row",  # and something of it: `x[0, j]`
    "reduced",  # to one number, over all that there is
    "forest",  # flax's `get_metrics`: the first copy of each leaf of a list of trees, stacked
    "needs axis",  # anything else
]


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """What is done with the value of one expression."""

    way: Way
    node: ast.expr  # the expression; of "first" and "row", that which takes the part
    of: ast.expr
    said: str = ""  # of what needs the axis
    can_show: bool = True  # it can have the axis again, and nothing else sees that


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """How an expression makes values with a device axis.

    `copies` are equal on all devices. Without the axis, `of` is left of the expression; or the
    text of `at`, a part of it, changes by `edits`.
    """

    node: ast.expr
    copies: bool
    of: ast.expr | None = None
    devices: ast.expr | None = None
    at: ast.expr | None = None
    edits: tuple[Edit, ...] = ()


# --- how it is made

# Their result has the shape that they are given, and its elements come in that order.
_SHAPED = frozenset(
    ("reshape", "zeros", "ones", "full", "empty", "normal", "uniform", "randint", "bernoulli")
    + ("standard_normal", "integers", "random", "split", "broadcast_to")
)
# Element by element, or not at all.
_ELEMENTWISE_METHODS = frozenset(("astype", "copy", "block_until_ready"))
_ELEMENTWISE = frozenset(
    ("numpy.asarray", "numpy.array", "jax.numpy.asarray", "jax.numpy.array", "jax.device_put")
)


def made(flow: FileFlow, node: ast.expr) -> Made | None:
    """How an expression makes what it is; None where that is not known."""
    return None if flow.has_others(node) else _made(flow.module, node)


def _made(module: Module, node: ast.expr) -> Made | None:
    done = stacking.stacking(module, node)
    if isinstance(node, ast.Call) and done is not None and not device_counts.why_not(module, node):
        devices = device_counts.first_devices(module, node)
        return Made(node, done.kind is Kind.REPLICATED, done.of, devices)
    match node:
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _ELEMENTWISE_METHODS:
            return _inside(module, node, inner)
        case ast.Call(func=function, args=[inner, *_]):
            if module.qualified_name(function) in _ELEMENTWISE:
                return _inside(module, node, inner)
    if not isinstance(node, ast.Call):
        return None
    shape = _shape(module, node)
    name = last_name(node.func)
    if shape is None or name not in _SHAPED or not device_counts.counts_all(module, shape[0]):
        return None
    if name == "broadcast_to":  # the first dimension is new: all along it is alike
        return Made(node, copies=True, at=node, edits=_without_first(module, shape))
    return Made(node, copies=False, at=node, edits=_with_product(module, shape))


def _inside(module: Module, node: ast.expr, inner: ast.expr) -> Made | None:
    found = _made(module, inner)
    is_edited = found is not None and found.edits
    return dataclasses.replace(found, node=node) if found is not None and is_edited else None


def _shape(module: Module, call: ast.Call) -> list[ast.expr] | None:
    """The dimensions that a call is given, two or more: `(n, b, 3)`, `(n, b) + x.shape`, `n, b`."""
    if any(each.arg in ("order", "axis", None) for each in call.keywords):
        return None
    is_method = isinstance(call.func, ast.Attribute) and module.qualified_name(call.func) is None
    if is_method and last_name(call.func) == "reshape" and len(call.args) > 1:
        return [*call.args]
    named = [each.value for each in call.keywords if each.arg in ("shape", "size", "num")]
    for given in (*call.args, *named):
        whole = given
        while isinstance(given, ast.BinOp) and isinstance(given.op, ast.Add):
            given = given.left
        match given:
            case ast.Tuple(elts=[first, *rest]) if not isinstance(first, ast.Starred):
                return given.elts if rest or whole is not given else None
    return None


def _without_first(module: Module, shape: list[ast.expr]) -> tuple[Edit, ...]:
    start = module.span(shape[0])[0]
    if len(shape) == 1:  # `(n,) + x.shape`
        return (Edit(start, module.span(shape[0])[1], ""),)
    end = module.span(shape[1])[0]
    edits = (Edit(start, end, ""),)
    if len(shape) > 2:
        return edits
    after = module.span(shape[1])[1]
    return (*edits, Edit(after, after, ","))  # a tuple of one


def _with_product(module: Module, shape: list[ast.expr]) -> tuple[Edit, ...]:
    """`(n, b, 3)` as `(n * b, 3)`; `(n, -1)` as `(-1,)`."""
    if len(shape) < 2 or isinstance(shape[1], ast.Starred):
        return ()
    start, end = module.span(shape[0])[0], module.span(shape[1])[1]
    simple = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant
    text = lambda each: module.text(each) if isinstance(each, simple) else f"({module.text(each)})"
    product = f"{text(shape[0])} * {text(shape[1])}"
    if isinstance(shape[1], ast.UnaryOp):
        product = module.text(shape[1])
    is_tuple = isinstance(module.parent(shape[0]), ast.Tuple)
    return (Edit(start, end, product + ("," if is_tuple and len(shape) == 2 else "")),)


def makers(
    flow: FileFlow, serials: set[int]
) -> Iterator[tuple[ast.expr, Made | None] | tuple[None, None]]:
    """What first held arrays that no mapped function gave, and how it makes them.

    None and None: it is not in this file.
    """
    for node, own in flow.makers(serials).items():
        if node is None:
            yield None, None
        elif not flow.called_sites(node):
            outer = _maps_leaves(flow, node, own)
            yield node, (outer and made(flow, outer)) or made(flow, node)


def _maps_leaves(flow: FileFlow, node: ast.expr, serials: set[int]) -> ast.Call | None:
    """The `tree_map(f, tree)` whose `f` has made the arrays; None where it is not all of them."""
    module, function = flow.module, flow.module.function(node)
    if function is None:
        return None
    calls = [
        each
        for each in flow.holders(serials)
        if isinstance(each, ast.Call) and module.qualified_name(each.func) in stacking.TREE_MAPS
        if each.args and pmaps.definition(module, each.args[0]) is function
    ]
    is_all = len(calls) == 1 and serials <= flow.serials(calls[0])
    return calls[0] if is_all and isinstance(function, ast.Lambda) else None


# --- how it is used

_GET_METRICS = "flax.training.common_utils.get_metrics"
_REDUCING = frozenset(("mean", "sum", "max", "min", "std", "var", "any", "all", "prod", "size"))
KEEPING = frozenset(("append", "appendleft", "extend", "insert", "add", "put", "update"))
_CONTAINERS = frozenset(
    ("list", "dict", "set", "deque", "defaultdict", "OrderedDict", "UserList", "UserDict")
    + ("Queue", "LifoQueue", "PriorityQueue", "SimpleQueue")
)
# Methods of trees and train states that change nothing in place.
_OF_TREES = frozenset(
    ("copy", "get", "items", "keys", "pop", "replace", "values", "_asdict", "_replace")
)
_LEAVING = frozenset(("filter", "filterfalse", "takewhile", "dropwhile"))
_DISPLAYS = (ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Starred, ast.keyword)
_PASSING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Yield, ast.Expr, ast.Lambda),
    *(ast.For, ast.comprehension, ast.IfExp, ast.Await),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def use_of(flow: FileFlow, node: ast.expr) -> Use:
    """What is done with the value of an expression that held arrays of mapped functions."""
    module, is_array = flow.module, flow.is_array(node)
    inner: ast.AST = node
    around = module.parent(node)
    while isinstance(around, _DISPLAYS):
        inner, around = around, module.parent(around)
    passes = Use("passes", node, node)
    needs = Use("needs axis", node, node, f"line {node.lineno} needs it")
    stuck = dataclasses.replace(needs, can_show=False)
    match around:
        case ast.Call() if around.func is not inner:
            return _of_argument(flow, around, node)
        case ast.Attribute(attr=name):
            return _of_attribute(flow, around, node, name)
        case ast.Subscript(value=value) if value is node and is_array:
            return _of_index(flow, around, node)
        case ast.Subscript(value=value):
            return passes if value is node else needs
        case ast.IfExp(test=test) if test is node:
            return needs
        case ast.For(iter=over) | ast.comprehension(iter=over) if over is node and is_array:
            return stuck
        case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value) if value is node:
            return stuck if is_array else passes  # a slice of each device in a name
        case ast.Compare(ops=ops) if all(isinstance(each, ast.Is | ast.IsNot) for each in ops):
            return passes
        case ast.Return() | ast.Yield() | ast.Lambda() if not _comes_back(flow, node):
            said = f"line {node.lineno} returns it to where it is not seen"
            return dataclasses.replace(needs, said=said)
        case ast.BoolOp():
            return stuck
    return passes if isinstance(around, _PASSING) else needs


def _comes_back(flow: FileFlow, node: ast.expr) -> bool:
    """Whether what a function returns was seen where this file calls it, or of a lambda anywhere.

    What it calls itself has seen it too, which shows nothing.
    """
    function = flow.module.function(node)
    inside = {*ast.walk(function)} if function is not None else set()
    serials, found = flow.serials(node), set[int]()
    is_plain = isinstance(function, ast.FunctionDef) and not any(
        isinstance(each, ast.Yield | ast.YieldFrom) for each in functions.own_nodes(function)
    )
    for each in flow.holders(serials):
        name = last_name(each.func if isinstance(each, ast.Call) else each)
        if each not in inside and not (is_plain and name != getattr(function, "name", "")):
            found |= flow.serials(each)
    return serials <= found


def _of_argument(flow: FileFlow, call: ast.Call, node: ast.expr) -> Use:
    module, serials = flow.module, flow.serials(node)
    name = module.qualified_name(call.func) or ""
    if flow.called_sites(call) and not flow.called_sites(call).isdisjoint(flow.takers(serials)):
        return Use("passes", node, node)
    is_only = call.args == [node] and not call.keywords
    if name in stacking.UNREPLICATE and is_only:
        outer = module.parent(call)
        if isinstance(outer, ast.Call) and module.qualified_name(outer.func) == name:
            said = f"line {call.lineno} takes a part of it twice"
            return Use("needs axis", node, node, said, can_show=False)
        return Use("first", call, node)
    if stacking.first_of_leaves(module, call) is node:
        return Use("first", call, node)
    if name == _GET_METRICS and is_only:
        return Use("forest", call, node)
    if serials <= flow.serials(call) or _keeps(flow, call, node):
        return Use("passes", node, node)
    root, _, last = name.rpartition(".")
    if is_only and root in ("numpy", "jax.numpy") and last in _REDUCING and flow.is_array(node):
        return Use("reduced", node, node)
    is_chosen = last_name(call.func) in _LEAVING  # what it gives was not seen
    if not is_chosen and any(serials <= _read_inside(flow, e) for e in _called(module, call)):
        return Use("passes", node, node)
    to = " ".join(module.text(call.func).split())
    return Use("needs axis", node, node, f"line {call.lineno} gives it to {to}")


def _keeps(flow: FileFlow, call: ast.Call, node: ast.expr) -> bool:
    """Whether a call puts a value into a container as it is; `np.append(losses, loss)` does not."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in KEEPING:
        return False
    goes_through = function.attr in ("extend", "update") and node in call.args
    is_container = flow.type_of(function.value) in _CONTAINERS
    return is_container and not (goes_through and flow.is_array(node))


def _called(module: Module, call: ast.Call) -> Iterator[ast.AST]:
    """The functions of the file that a call may run."""
    name = last_name(call.func)
    for each in (call.func, *call.args, *(word.value for word in call.keywords)):
        if (found := pmaps.definition(module, each)) is not None:
            yield found
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            yield node


def _read_inside(flow: FileFlow, function: ast.AST) -> set[int]:
    """The arrays that a function, or a method of a class, has held."""
    return {serial for each in ast.walk(function) for serial in flow.serials(each)}


def _of_attribute(flow: FileFlow, around: ast.Attribute, node: ast.expr, name: str) -> Use:
    module, serials = flow.module, flow.serials(node)
    passes = Use("passes", node, node)
    call = module.call_of(around)
    if not flow.is_array(node):
        if call is None or name in _OF_TREES | KEEPING:
            return passes
        seen = (flow.serials(call), *(_read_inside(flow, each) for each in _called(module, call)))
        if not all(map(serials.isdisjoint, seen)):
            return passes
    elif call is not None and serials <= flow.serials(call):  # `x.block_until_ready()`
        return passes
    elif call is not None and name in _REDUCING and not (call.args or call.keywords):
        return Use("reduced", node, node)
    elif name == "dtype":
        return passes
    return Use("needs axis", node, node, f"line {node.lineno} uses its {name}")


def _of_index(flow: FileFlow, around: ast.Subscript, node: ast.expr) -> Use:
    if not isinstance(around.ctx, ast.Load):
        said = f"line {node.lineno} changes it in place"
        return Use("needs axis", node, node, said, can_show=False)
    match around.slice:
        case ast.Constant(value=0) if around.slice.value is not False:
            return Use("passes" if _is_of_leaves(flow, node) else "first", around, node)
        case ast.Tuple(elts=[ast.Constant(value=0), ast.Constant(value=int(j)), *_]) if j >= 0:
            return Use("row", around, node)
    text = " ".join(flow.module.text(around).split())
    return Use("needs axis", node, node, f"line {node.lineno} uses {text}")


def _is_of_leaves(flow: FileFlow, node: ast.expr) -> bool:
    """Whether it is the `x` of `tree_map(lambda x: x[0], tree)` alone: a use of the tree."""
    module, function, held = flow.module, flow.module.function(node), set[int]()
    for call in flow.nodes:
        tree = stacking.first_of_leaves(module, call)
        if tree is not None and isinstance(call, ast.Call):
            is_it = pmaps.definition(module, call.args[0]) is function
            held |= flow.serials(tree) if is_it else set()
    return function is not None and flow.serials(node) <= held


def without_first_index(module: Module, around: ast.Subscript) -> Edit:
    """`x[0, j]` as `x[j]`."""
    assert isinstance(around.slice, ast.Tuple)
    first, second, *_ = around.slice.elts
    return Edit(module.span(first)[0], module.span(second)[0], "")
