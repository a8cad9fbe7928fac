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
# Functions whose results are about as large as their arguments, or of unknown size.
_OF_ARRAYS = {"array", "asarray", "stack", "concatenate", "tile", "repeat", "einsum", "matmul"}
_OF_ARRAYS |= {"dot", "outer", "tril", "triu", "broadcast_to", "reshape", "transpose"}
_OF_ARRAYS |= {"zeros_like", "ones_like", "full_like", "load", "loadtxt", "genfromtxt", "fromfile"}
_METHODS = {"reshape", "astype", "transpose", "copy"}


@Rule(
    "JXD401",
    what="Arrays of 1024 numbers or more that a function given to pmap, shard_map or jit captures, "
    "itself or in functions of the file that it calls: names and `self.` attributes. jit counts "
    "only in files that mention pmap or shard_map.",
    why="The values become part of the program: it is as large as the array, compiles slowly, "
    "and has another key in the persistent cache whenever a value differs (jax 0.10.2).",
    instead="step = jax.pmap(lambda x, table: x @ table, in_axes=(0, None))\n"
    "# jax_dist.rewrite and jax_dist.pmap make it an argument by themselves",
    triggers=traced.TRIGGERS,
)
def captured_array(module: Module) -> Findings:
    functions_seen: set[scopes.Function] = set()
    reads_seen: set[ast.AST] = set()
    for by, body in traced.find_traced(module):
        if by == "jax_dist.pmap":  # it passes captured arrays as arguments
            continue
        for function in traced.reach(module, body):
            if function in functions_seen:
                continue
            functions_seen.add(function)
            for read, name, value in _find_captured(module, function):
                is_inner = module.is_inside(value, body) or module.is_inside(value, function)
                if read in reads_seen or is_inner:
                    continue
                reads_seen.add(read)
                maker = module.text(value.func)
                message = f"{name}, made by {maker}, becomes a constant of the program under "
                yield Found(read, f"{message}{by}")


def _find_captured(
    module: Module, function: scopes.Function
) -> Iterator[tuple[ast.expr, str, ast.Call]]:
    """Yield `(read, name, call)` for each name in a function that is an array made by `call`."""
    names_seen: set[str] = set()
    inner_scopes = traced.scopes_in(module, function)
    for scope in inner_scopes:
        for name, loads in scope.loads.items():
            _, bindings = scope.lookup(name) or (None, [])
            if name in names_seen or len(bindings) != 1 or bindings[0].kind != "assign":
                continue
            value = bindings[0].value
            if isinstance(value, ast.Call) and _is_array(module, value):
                names_seen.add(name)
                yield min(loads, key=scopes.place), name, value
    selfs = (load for scope in inner_scopes for load in scope.loads.get("self", ()))
    attributes = [node for node in map(module.parent, selfs) if isinstance(node, ast.Attribute)]
    for read in sorted(attributes, key=scopes.place):
        match module.attribute_values(read):
            case [ast.Call() as value] if read.attr not in names_seen and _is_array(module, value):
                names_seen.add(read.attr)
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
    """Return whether `array(node)` may be large: the node is no short literal."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return _may_be_large(module, node.func.value)
        is_known = (module.qualified_name(node.func) or "").startswith(_LIBRARIES)
        return _is_array(module, node) if is_known else True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)  # of a file
    nodes = list(ast.walk(node))
    return len(nodes) >= _SMALL or any(isinstance(part, ast.Name | ast.Call) for part in nodes)


def _has_size(call: ast.Call, position: int, root: str) -> bool:
    """Return whether `zeros(shape)` may make a large array; its shape is at a position."""
    shapes = [word.value for word in call.keywords if word.arg in ("shape", "size", "num")]
    if root != "numpy.random":  # whose functions take sizes in many places
        shapes += call.args[position : position + 1]
    if not shapes:
        return False  # a single number
    sizes = shapes[0].elts if isinstance(shapes[0], ast.Tuple | ast.List) else [shapes[0]]
    numbers: list[Any] = [getattr(size, "value", None) for size in sizes]
    is_written = all(isinstance(number, int | float) for number in numbers)
    return not is_written or math.prod(numbers) >= _SMALL
