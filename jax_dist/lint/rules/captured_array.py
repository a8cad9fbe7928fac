"""JXD401: an array that a mapped or jitted function captures."""

import ast
import math
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import scopes, traced
from jax_dist.lint.rules import Findings, Found, Module, Rule

_LARGE = 1024  # numbers; 4 KiB of float32
_ARRAY_LIBRARIES = ("jax.numpy", "numpy", "jax.random", "numpy.random")
# Functions that make an array of a shape, with the position of the shape among their arguments.
_SHAPE_AT = {"zeros": 0, "ones": 0, "full": 0, "empty": 0, "eye": 0, "arange": 0, "linspace": 2}
_SHAPE_AT |= {"normal": 1, "uniform": 1, "randint": 1, "bernoulli": 2, "truncated_normal": 3}
# Functions whose results are about as large as their first argument, or of unknown size.
_LIKE_INPUT = {"array", "asarray", "stack", "concatenate", "tile", "repeat", "einsum", "matmul"}
_LIKE_INPUT |= {"dot", "outer", "tril", "triu", "broadcast_to", "reshape", "transpose"}
_LIKE_INPUT |= {"zeros_like", "ones_like", "full_like", "load", "loadtxt", "genfromtxt", "fromfile"}
_METHODS_THAT_KEEP_SIZE = ("reshape", "astype", "transpose", "copy")


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
        for function in traced.reach(module, body):  # the body, and what it calls in this file
            if function in functions_seen:
                continue
            functions_seen.add(function)
            for read, name, call in _find_array_reads(module, function):
                is_inner = module.is_inside(call, body) or module.is_inside(call, function)
                if read in reads_seen or is_inner:  # an inner array is made while tracing
                    continue
                reads_seen.add(read)
                maker = module.text(call.func)
                message = f"{name}, made by {maker}, becomes a constant of the program under "
                yield Found(read, f"{message}{by}")


def _find_array_reads(
    module: Module, function: scopes.Function
) -> Iterator[tuple[ast.expr, str, ast.Call]]:
    """Yield `(read, "x", call)` where a function first reads the large array of `x = call`.

    Also `(read, "self.x", call)` of `self.x = call`.
    """
    names_seen: set[str] = set()
    inner_scopes = traced.scopes_in(module, function)
    for scope in inner_scopes:
        for name, loads in scope.loads.items():
            _, bindings = scope.lookup(name) or (None, [])
            if name in names_seen or len(bindings) != 1 or bindings[0].kind != "assign":
                continue
            call = bindings[0].value
            if isinstance(call, ast.Call) and _makes_large_array(module, call):
                names_seen.add(name)
                yield min(loads, key=scopes.place), name, call
    selfs = (load for scope in inner_scopes for load in scope.loads.get("self", ()))
    attributes = [node for node in map(module.parent, selfs) if isinstance(node, ast.Attribute)]
    for read in sorted(attributes, key=scopes.place):
        values = [] if read.attr in names_seen else module.attribute_values(read)
        call = values[0] if len(values) == 1 else None
        if isinstance(call, ast.Call) and _makes_large_array(module, call):
            names_seen.add(read.attr)
            yield read, f"self.{read.attr}", call


def _makes_large_array(module: Module, call: ast.Call) -> bool:
    """Return whether a call, such as `jnp.zeros(n)`, makes an array that is not surely small."""
    function, name = call.func, module.qualified_name(call.func) or ""
    if not name and isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        keeps_size = function.attr in _METHODS_THAT_KEEP_SIZE  # `jnp.zeros(n).reshape(shape)`
        return keeps_size and _makes_large_array(module, function.value)
    library, _, last = name.rpartition(".")
    if library in _ARRAY_LIBRARIES and last in _SHAPE_AT:
        return _has_large_shape(call, _SHAPE_AT[last], library)
    is_as_large_as_input = library in _ARRAY_LIBRARIES and last in _LIKE_INPUT
    if not call.args or not (is_as_large_as_input or name == "jax.device_put"):
        return False
    return _may_be_large(module, call.args[0])


def _may_be_large(module: Module, argument: ast.expr) -> bool:
    """Return whether `jnp.array(argument)` may be large: it is no short literal."""
    if isinstance(argument, ast.Call):
        function = argument.func
        if isinstance(function, ast.Attribute) and function.attr in _METHODS_THAT_KEEP_SIZE:
            return _may_be_large(module, function.value)
        is_known = (module.qualified_name(function) or "").startswith(_ARRAY_LIBRARIES)
        return not is_known or _makes_large_array(module, argument)
    if isinstance(argument, ast.Constant):  # a number, or the name of a file, as in `np.load("a")`
        return isinstance(argument.value, str)
    nodes = list(ast.walk(argument))  # of a literal, one for each number that it writes out
    return len(nodes) >= _LARGE or any(isinstance(node, ast.Name | ast.Call) for node in nodes)


def _has_large_shape(call: ast.Call, shape_position: int, library: str) -> bool:
    """Return whether a call such as `jnp.zeros(shape)` may make an array of 1024 numbers."""
    shapes = [word.value for word in call.keywords if word.arg in ("shape", "size", "num")]
    if library != "numpy.random":  # whose functions differ in the position of the size
        shapes += call.args[shape_position : shape_position + 1]
    if not shapes:
        return False  # a single number
    sizes = shapes[0].elts if isinstance(shapes[0], ast.Tuple | ast.List) else [shapes[0]]
    numbers: list[Any] = [getattr(size, "value", None) for size in sizes]
    is_literal = all(isinstance(number, int | float) for number in numbers)
    return not is_literal or math.prod(numbers) >= _LARGE
