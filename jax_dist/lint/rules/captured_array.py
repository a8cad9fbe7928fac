"""JXD401: an array that a mapped or jitted function captures."""

import ast
import math
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import scopes, traced
from jax_dist.lint.rules import Findings, Found, Module, Rule

_SMALL = 1024  # numbers; 4 KiB of float32
_RANDOM = ("jax.random", "numpy.random")
_READERS = {"load", "loadtxt", "genfromtxt", "fromfile", "frombuffer"}
# By name of a function that takes a shape: the position of the shape.
_SHAPED = {"zeros": 0, "ones": 0, "full": 0, "empty": 0, "eye": 0, "identity": 0, "arange": 0}
_SHAPED |= {"linspace": 2, "logspace": 2, "normal": 1, "uniform": 1, "randint": 1}
_SHAPED |= {"bernoulli": 2, "truncated_normal": 3}
# Functions of arrays, whose results are about as large as what they are given.
_OF_ARRAYS = {"array", "asarray", "stack", "concatenate", "vstack", "hstack", "tile", "repeat"}
_OF_ARRAYS |= {"einsum", "matmul", "dot", "outer", "tril", "triu", "broadcast_to", "reshape"}
_OF_ARRAYS |= {"zeros_like", "ones_like", "full_like", "transpose"}
_METHODS = {"reshape", "astype", "transpose", "copy"}  # whose results are as large as the array
_LITERALS = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.List, ast.Tuple, ast.Load)


@Rule(
    "JXD401",
    "captured-array",
    what="Arrays that a function given to pmap, shard_map or jit captures instead of taking "
    "them as arguments, itself or in functions of the file that it calls: names and `self.` "
    "attributes with values of jax.numpy, NumPy, jax.random or device_put, of 1024 numbers or "
    "more. jit counts only in files that mention pmap or shard_map.",
    why="The values become part of the program: it is as large as the array, compiles slowly, "
    "and has another key in the persistent cache whenever a value differs (jax 0.10.2).",
    instead="step = jax.pmap(lambda x, table: x @ table, in_axes=(0, None))\n"
    "# jax_dist.rewrite and jax_dist.pmap make it an argument by themselves",
    triggers=traced.TRIGGERS,
)
def captured_array(module: Module) -> Findings:
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
    around = [module.parent(load) for scope in inside for load in scope.loads.get("self", ())]
    reads = [each for each in around if isinstance(each, ast.Attribute)]
    for read in sorted(reads, key=scopes.place):
        match module.attribute_values(read):
            case [ast.Call() as value] if read.attr not in named and _is_array(module, value):
                named.add(read.attr)
                yield read, f"self.{read.attr}", value


def _is_array(module: Module, node: ast.Call) -> bool:
    """Return whether a call makes an array that is not known to be small."""
    name = module.qualified_name(node.func)
    if name is None and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        inner = node.func.value
        return isinstance(inner, ast.Call) and _is_array(module, inner)
    root, _, last = (name or "").rpartition(".")
    if name == "jax.device_put":
        return bool(node.args) and _may_be_large(module, node.args[0])
    if root not in ("jax.numpy", "numpy", *_RANDOM):
        return False
    if last in _SHAPED:
        return _has_size(node, _SHAPED[last], root)
    if last in _READERS:
        return bool(node.args)
    return last in _OF_ARRAYS and any(_may_be_large(module, each) for each in node.args)


def _may_be_large(module: Module, node: ast.expr) -> bool:
    """Return whether an array made of this may have many numbers."""
    if not isinstance(node, ast.Call):
        nodes = list(ast.walk(node))
        plain = (*_LITERALS, ast.operator, ast.unaryop)
        return len(nodes) >= _SMALL or not all(isinstance(each, plain) for each in nodes)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        return _may_be_large(module, node.func.value)
    name = module.qualified_name(node.func) or ""
    is_known = name.startswith(("jax.numpy.", "numpy.", "jax.random."))
    return _is_array(module, node) if is_known else True


def _has_size(call: ast.Call, place: int, root: str) -> bool:
    """Return whether the sizes are not written as numbers, or are large."""
    by_name = [each.value for each in call.keywords if each.arg in ("shape", "size", "num")]
    # The functions of numpy.random take sizes in many places.
    by_place = [] if root == "numpy.random" else call.args[place : place + 1]
    sizes = [*by_name, *by_place]
    if not sizes:
        return False  # a single number
    parts = sizes[0].elts if isinstance(sizes[0], ast.Tuple | ast.List) else [sizes[0]]
    numbers: list[Any] = [getattr(each, "value", None) for each in parts]
    if not all(isinstance(each, int | float) for each in numbers):
        return True
    is_square = isinstance(call.func, ast.Attribute) and call.func.attr in ("eye", "identity")
    return math.prod(numbers) ** (1 + is_square) >= _SMALL
