"""JXD401: an array that a mapped or jitted function captures."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import scopes, traced
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule

_SMALL = 1024  # numbers; 4 KiB of float32


_MAKERS = frozenset(
    ("zeros", "ones", "full", "empty", "eye", "identity", "arange", "linspace", "logspace")
)


_READERS = frozenset(("load", "loadtxt", "genfromtxt", "fromfile", "frombuffer"))


_OTHERS = frozenset(
    ("array", "asarray", "stack", "concatenate", "vstack", "hstack", "tile", "repeat", "einsum")
    + ("matmul", "dot", "outer", "tril", "triu", "zeros_like", "ones_like", "full_like")
    + ("broadcast_to", "reshape", "transpose")
)


_RANDOM = frozenset(("normal", "uniform", "randint", "bernoulli", "truncated_normal"))


_PLACE_OF_SHAPE = {"linspace": 2, "logspace": 2, "bernoulli": 2, "truncated_normal": 3}


_SAME_SIZE = frozenset(("reshape", "astype", "transpose", "copy"))


@rule(
    "JXD401",
    "captured-array",
    what="Arrays that a function given to pmap, shard_map or jit, or a function of the file "
    "that it calls, captures instead of taking them as arguments: names and `self.` "
    "attributes that are assigned from calls of jax.numpy, NumPy, jax.random or "
    "device_put. Arrays of fewer than 1024 numbers are ignored; jit is looked at only "
    "in files that mention pmap or shard_map.",
    why="The values become part of the program: it is as large as the array, compiles "
    "slowly, and has another key in the persistent cache whenever a value differs (jax "
    "0.10.2).",
    instead="step = jax.pmap(lambda x, table: x @ table, in_axes=(0, None))\n"
    "# jax_dist.rewrite and jax_dist.pmap make it an argument by themselves",
    triggers=traced.TRIGGERS,
)
def captured_array(module: Module) -> Iterator[Found]:
    looked_at: set[scopes.Function] = set()
    seen: set[ast.AST] = set()
    for each in traced.traced(module):
        if each.by == "jax_dist.pmap":  # which makes arguments of them
            continue
        for function in traced.reached(module, each.function):
            if function in looked_at:
                continue
            looked_at.add(function)
            for read, name, value in _captured(module, function):
                made_in = (each.function, function)
                if read in seen or any(module.is_inside(value, one) for one in made_in):
                    continue
                seen.add(read)
                maker = module.text(value.func)
                message = f"{name}, made by {maker}, becomes a constant of the program under "
                yield Found(read, f"{message}{each.by}")


def _captured(
    module: Module, function: scopes.Function
) -> Iterator[tuple[ast.expr, str, ast.Call]]:
    """Yield `(read, name, call that made it)`, once a name."""
    named: set[str] = set()
    inside = traced.scopes_in(module, function)
    for scope in inside:
        for name, loads in scope.loads.items():
            _, bindings = scope.lookup(name) or (None, [])
            if name in named or len(bindings) != 1 or bindings[0].kind != "assign":
                continue
            value = bindings[0].value
            if isinstance(value, ast.Call) and _is_array(module, value):
                named.add(name)
                yield min(loads, key=scopes.place), name, value
    if module.class_of(function) is None:
        return
    around = [module.parent(load) for scope in inside for load in scope.loads.get("self", ())]
    reads = [each for each in around if isinstance(each, ast.Attribute)]
    for read in sorted(reads, key=scopes.place):
        match module.attribute_values(read):
            case [ast.Call() as value] if read.attr not in named and _is_array(module, value):
                named.add(read.attr)
                yield read, f"self.{read.attr}", value


def _is_array(module: Module, node: ast.expr) -> bool:
    """Return whether a call makes an array that is not known to be small."""
    if not isinstance(node, ast.Call):
        return False
    name = module.qualified_name(node.func)
    if name is None and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_SIZE:
        return _is_array(module, node.func.value)
    root, _, last = (name or "").rpartition(".")
    if name == "jax.device_put" and node.args:
        return _may_be_large(module, node.args[0])
    if root in ("jax.random", "numpy.random"):
        return last in _RANDOM and _has_size(node, _PLACE_OF_SHAPE.get(last, 1), root)
    if root not in ("jax.numpy", "numpy") or not node.args:
        return False
    if last in _READERS:
        return True
    if last in _MAKERS:
        return _has_size(node, _PLACE_OF_SHAPE.get(last, 0), root)
    return last in _OTHERS and any(_may_be_large(module, each) for each in node.args)


def _may_be_large(module: Module, node: ast.expr) -> bool:
    """Return whether an array made of this may have many numbers."""
    if isinstance(node, ast.Call):
        name = module.qualified_name(node.func) or ""
        is_numpy = name.startswith(("jax.numpy.", "numpy.", "jax.random."))
        is_same = isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_SIZE
        if is_same and isinstance(node.func, ast.Attribute):
            return _may_be_large(module, node.func.value)
        return _is_array(module, node) if is_numpy else True
    return not _is_small_literal(node)


def _has_size(call: ast.Call, place: int, root: str) -> bool:
    """Return whether the sizes are not written as numbers, or are large."""
    by_name = [each.value for each in call.keywords if each.arg in ("shape", "size", "num")]
    sizes = by_name or call.args[place : place + 1]
    if not sizes:
        return False  # a single number
    count = _count(sizes[0])
    is_square = isinstance(call.func, ast.Attribute) and call.func.attr in ("eye", "identity")
    if root == "numpy.random" and not by_name:
        return False  # its functions take sizes in many places
    return count is None or (count * count if is_square else count) >= _SMALL


def _count(node: ast.expr) -> int | None:
    """Return the product of sizes that are written as numbers."""
    sizes: list[Any] = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    product = 1
    for size in sizes:
        if not (isinstance(size, ast.Constant) and isinstance(size.value, int | float)):
            return None
        product *= int(size.value)
    return product


def _is_small_literal(node: ast.expr) -> bool:
    """Return a number, or a list of few numbers."""
    literal = (ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Load, ast.BinOp)
    nodes = list(ast.walk(node))
    operators = (ast.operator, ast.unaryop)
    return len(nodes) < _SMALL and all(isinstance(each, (*literal, *operators)) for each in nodes)
