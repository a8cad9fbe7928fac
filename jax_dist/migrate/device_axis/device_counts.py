"""Which expressions make exactly one copy for each device, or split a whole batch among them."""

import ast
from typing import Any

from jax_dist.lint.model import pmaps, stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind, counts_devices, lists_devices

_PUT = "jax.device_put_replicated"
_JOINED = ("stack", "array", "asarray")


def why_not(module: Module, call: ast.Call) -> str:
    """Why what `stacking.stacking` takes for copies or a split cannot go; "" where it can."""
    done = stacking.stacking(module, call)
    if done is None or done.kind not in (Kind.REPLICATED, Kind.SPLIT):
        return "what it does is not followed"
    exact = _is_copy if done.kind is Kind.REPLICATED else _is_split
    if exact(module, call):
        return ""
    if done.kind is Kind.REPLICATED:
        return "it is not shown to hold one equal copy for each of all devices"
    return "it is not shown to keep the rows of the batch in order and whole"


def _is_copy(module: Module, call: ast.Call) -> bool:
    name = module.qualified_name(call.func)
    if name in stacking.REPLICATE or name == _PUT:
        return _on_all_devices(module, call) or first_devices(module, call) is not None
    if name in stacking.TREE_MAPS:
        return _of_each_leaf(module, call, _is_copy)
    if name == "jax.device_put_sharded":
        return _on_all_devices(module, call) and _equal_copies(module, call.args[0])
    last = (name or "").rpartition(".")[2]
    if len(call.args) == 1 and not call.keywords and last in _JOINED:
        return _equal_copies(module, call.args[0])
    if last == "broadcast_to" and len(call.args) == 2 and not call.keywords:
        return _is_broadcast(module, call.args[0], call.args[1])
    if last == "repeat" and len(call.args) == 2 and len(call.keywords) == 1:
        match call.keywords[0]:
            case ast.keyword(arg="axis", value=ast.Constant(value=0)):
                return counts_all(module, call.args[1])
    return False


def first_devices(module: Module, call: ast.Call) -> ast.expr | None:
    """`jax.local_devices()[:n]` of a `device_put_replicated`, as its text says it."""
    if module.qualified_name(call.func) != _PUT or len(call.args) != 2 or call.keywords:
        return None
    devices = call.args[1]
    values = module.values(devices) if isinstance(devices, ast.Name) else [devices]
    return devices if values and all(_lists_first(module, each) for each in values) else None


def _lists_first(module: Module, node: ast.expr) -> bool:
    match node:
        case ast.Subscript(value=whole, slice=ast.Slice(lower=None, upper=ast.expr(), step=None)):
            return _lists_all(module, whole)
    return False


def _on_all_devices(module: Module, call: ast.Call) -> bool:
    """Whether the devices are all there are, or are not given."""
    given = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    names = [keyword.arg for keyword in call.keywords]
    if len(given) > 1 or any(name != "devices" for name in names):
        return False
    return all(_lists_all(module, each) for each in given)


def _lists_all(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None
    if isinstance(node, ast.Call) and (node.args or node.keywords):
        return False  # jax.devices("cpu")
    if not lists_devices(module, node):
        return False
    values = _values(module, node)
    return values is None or (bool(values) and all(_lists_all(module, each) for each in values))


def _values(module: Module, node: ast.expr) -> list[ast.expr] | None:
    """What a name or an attribute may hold, [] where that is not known; None of another node."""
    match node:
        case ast.Name():
            return module.values(node) or []
        case ast.Attribute():
            return module.attribute_values(node) or []
    return None


def counts_all(module: Module, node: ast.expr) -> bool:
    """Whether an expression surely is the number of all devices: not a name that only says so."""
    if not counts_devices(module, node, by_name=False):
        return False
    values = _values(module, node)
    if values is not None:
        return bool(values) and all(counts_all(module, each) for each in values)
    match node:
        case ast.Call(func=ast.Name(id="len")):
            return _lists_all(module, node.args[0])
        case ast.Call(args=[], keywords=[]):
            return True
    return False


def _equal_copies(module: Module, node: ast.expr) -> bool:
    match node:
        case ast.BinOp(left=ast.List(elts=[_]), op=ast.Mult(), right=count):
            return counts_all(module, count)
        case ast.BinOp(left=count, op=ast.Mult(), right=ast.List(elts=[_])):
            return counts_all(module, count)
        case ast.ListComp(elt=one, generators=[ast.comprehension(iter=over)]):
            plain = ast.Name | ast.Attribute | ast.Constant | ast.Load  # a call may draw a number
            if not all(isinstance(each, plain) for each in ast.walk(one)):
                return False
            match over:
                case ast.Call(func=ast.Name(id="range"), args=[count], keywords=[]):
                    return counts_all(module, count) or _lists_all(module, over)
            return _lists_all(module, over)
    return False


def _is_broadcast(module: Module, array: ast.expr, shape: ast.expr) -> bool:
    """`broadcast_to(x, (n, *x.shape))`, `broadcast_to(x, (n,) + x.shape)`, `x[None]` for x too."""
    match array:
        case ast.Subscript(value=ast.Name() as inner, slice=ast.Constant(value=None)):
            array = inner
    match shape:
        case (
            ast.Tuple(elts=[count, ast.Starred(value=ast.Attribute(value=of, attr="shape"))])
            | ast.BinOp(
                left=ast.Tuple(elts=[count]),
                op=ast.Add(),
                right=ast.Attribute(value=of, attr="shape"),
            )
        ):
            return _same_name(of, array) and counts_all(module, count)
    return False


def _is_split(module: Module, call: ast.Call) -> bool:
    name = module.qualified_name(call.func)
    if name in stacking.SHARD:
        return len(call.args) == 1 and not call.keywords
    if name in stacking.TREE_MAPS:
        return _of_each_leaf(module, call, _is_split)
    if call.keywords:
        return False
    if (name or "").rpartition(".")[2] == "reshape" and len(call.args) == 2:
        is_copied = (name or "").startswith("jax.")
        array = call.args[0]
        return _keeps_rows(module, array, call.args[1]) and not any(
            # what sets parts of the array later does not set them in a copy
            is_copied
            and isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and _same_name(node.value, array)
            for node in ast.walk(module.tree)
        )
    match call:
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[shape]):
            return name is None and _keeps_rows(module, array, shape)
        case ast.Call(func=ast.Attribute(value=array, attr="reshape"), args=[_, _, *_]):
            shape = ast.Tuple(elts=call.args, ctx=ast.Load())
            return name is None and _keeps_rows(module, array, shape)
    return False


def _keeps_rows(module: Module, array: ast.expr, shape: ast.expr) -> bool:
    """`(n, -1) + x.shape[1:]`, `(n, b, *x.shape[1:])`: what follows says that b is what is left."""
    if isinstance(shape, ast.BinOp):
        left = stacking.named_tuple(module, shape.left)
        shape = ast.BinOp(left=left, op=shape.op, right=shape.right)
    match shape:
        case (
            ast.Tuple(elts=[count, _, ast.Starred(value=rest)])
            | ast.BinOp(left=ast.Tuple(elts=[count, _]), op=ast.Add(), right=rest)
        ):
            pass
        case _:
            return False
    match rest:
        case ast.Subscript(
            value=ast.Attribute(value=of, attr="shape"),
            slice=ast.Slice(lower=ast.Constant(value=1), upper=None, step=None),
        ):
            return _same_name(of, array) and counts_all(module, count)
    return False


def _of_each_leaf(module: Module, call: ast.Call, is_exact: Any) -> bool:
    function = call.args[0]
    if isinstance(function, ast.Name | ast.Attribute):
        name = module.qualified_name(function)
        if name in stacking.REPLICATE:
            return is_exact is _is_copy
        if name in stacking.SHARD:
            return is_exact is _is_split
    defined = pmaps.definition(module, function)
    body = None if defined is None else stacking.returned(defined)
    return isinstance(body, ast.Call) and is_exact(module, body)


def _same_name(one: Any, two: Any) -> bool:
    return isinstance(one, ast.Name) and isinstance(two, ast.Name) and one.id == two.id
