"""JXD401: an array that a mapped or jitted function captures."""

import ast
import math
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import scopes, traced
from jax_dist.lint.rules import Findings, Found, Module, Rule

_SMALL = 1024  # numbers; 4 KiB of float32
_LIBRARIES = ("jax.numpy", "numpy", "jax.random", "numpy.random")
# By name of a function that takes a shape: the position of the shape.
_SHAPED = {"zeros": 0, "ones": 0, "full": 0, "empty": 0, "eye": 0, "arange": 0, "linspace": 2}
_SHAPED |= {"normal": 1, "uniform": 1, "randint": 1, "bernoulli": 2, "truncated_normal": 3}
# Functions whose results are about as large as what they are given, or not known.
_OF_ARRAYS = {"array", "asarray", "stack", "concatenate", "tile", "repeat", "einsum", "matmul"}
_OF_ARRAYS |= {"dot", "outer", "tril", "triu", "broadcast_to", "reshape", "transpose"}
_OF_ARRAYS |= {"zeros_like", "ones_like", "full_like", "load", "loadtxt", "genfromtxt", "fromfile"}
_METHODS = {"reshape", "astype", "transpose", "copy"}


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
    for by, body in traced.traced(module):
        if by == "jax_dist.pmap":  # which makes arguments of them
            continue
        for function in traced.reached(module, body):
            if function in looked_at:
                continue
            looked_at.add(function)
            for read, name, value in _captured(module, function):
                if read in seen or any(module.is_inside(value, one) for one in (body, function)):
                    continue
                seen.add(read)
                maker = module.text(value.func)
                message = f"{name}, made by {maker}, becomes a constant of the program under "
                yield Found(read, f"{message}{by}")


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
    match node.func:
        case ast.Attribute(value=ast.Call() as inner, attr=method) if not name:
            return method in _METHODS and _is_array(module, inner)
    root, _, last = (name or "").rpartition(".")
    if root in _LIBRARIES and last in _SHAPED:
        return _has_size(node, _SHAPED[last], root)
    is_of_arrays = name == "jax.device_put" or (root in _LIBRARIES and last in _OF_ARRAYS)
    return is_of_arrays and bool(node.args) and _may_be_large(module, node.args[0])


def _may_be_large(module: Module, node: ast.expr) -> bool:
    """Return whether an array made of this may have many numbers: it is not written out."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return _may_be_large(module, node.func.value)
        is_known = (module.qualified_name(node.func) or "").startswith(_LIBRARIES)
        return _is_array(module, node) if is_known else True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)  # of a file
    nodes = list(ast.walk(node))
    return len(nodes) >= _SMALL or any(isinstance(each, ast.Name | ast.Call) for each in nodes)


def _has_size(call: ast.Call, place: int, root: str) -> bool:
    """Return whether the sizes are not written as numbers, or are large."""
    sizes = [each.value for each in call.keywords if each.arg in ("shape", "size", "num")]
    if root != "numpy.random":  # whose functions take sizes in many places
        sizes += call.args[place : place + 1]
    if not sizes:
        return False  # a single number
    parts = sizes[0].elts if isinstance(sizes[0], ast.Tuple | ast.List) else [sizes[0]]
    numbers: list[Any] = [getattr(each, "value", None) for each in parts]
    is_written = all(isinstance(each, int | float) for each in numbers)
    return not is_written or math.prod(numbers) >= _SMALL
