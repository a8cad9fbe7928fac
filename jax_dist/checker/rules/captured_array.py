"""JXD401: arrays that a traced function takes from around it."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import scopes, traced
from jax_dist.checker.model.scopes import NameScope
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD401",
    name="captured-array",
    what="Finds arrays that a function given to pmap, shard_map or jit captures instead of taking "
    "them as arguments: names of the module or of an enclosing function, and `self.` "
    "attributes, that are assigned from calls of jax.numpy, NumPy, jax.random or device_put. "
    "Arrays that clearly have fewer than 1024 numbers are ignored. jit is checked only in "
    "files that also mention pmap or shard_map.",
    why="The values become part of the program: it is as large as the array, compiles slowly, and "
    "has another key in the persistent cache whenever a value differs (measured in a second "
    "process, jax 0.10.2: the same values hit the cache, others missed it).",
    example="table = jnp.ones((4096, 4096))\nstep = jax.pmap(lambda x: x @ table)\n",
    instead="table = jnp.ones((4096, 4096))\n"
    "step = jax.pmap(lambda x, table: x @ table, in_axes=(0, None))\n",
    fix="None: all callers would have to pass the array. `jax_dist.rewrite` and `jax_dist.pmap` "
    "turn it into an argument automatically, and place it once.",
    since="Any jax; 0.6.1 warns from 2 GB on.",
    source="Measured on jax 0.10.2.",
)

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


@rule(PAGE, triggers=traced.TRIGGERS)
def check(module: Module) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for each in traced.traced(module):
        if each.by == "jax_dist.pmap":  # which makes arguments of them
            continue
        for read, name, value in _captured(module, each.function):
            if read in seen or traced.is_inside(module, value, each.function):
                continue
            seen.add(read)
            function = module.text(value.func)
            message = f"{name}, made by {function}, becomes a constant of the program under "
            yield Found(read, f"{message}{each.by}")


def _captured(
    module: Module, function: scopes.Function
) -> Iterator[tuple[ast.expr, str, ast.Call]]:
    """`(read, name, call that made it)`, once a name."""
    named: set[str] = set()
    for scope in _inside(module, function):
        for name, loads in scope.loads.items():
            value = None if name in named else _made_by(module, scope, name)
            if value is not None:
                named.add(name)
                yield min(loads, key=scopes.place), name, value
    for read in _self_reads(module, function):
        values = module.attribute_values(read)
        if len(values) == 1 and read.attr not in named and _is_array(module, values[0]):
            named.add(read.attr)
            yield read, f"self.{read.attr}", values[0]  # type: ignore[misc]


def _inside(module: Module, function: scopes.Function) -> list[NameScope]:
    """The function's own scope and those in it, in order."""
    children = module.once(_children)
    found = [module.scopes.of[function]]
    for scope in found:
        found += children.get(scope, [])
    return found


def _children(module: Module) -> dict[NameScope, list[NameScope]]:
    found: dict[NameScope, list[NameScope]] = {}
    for scope in module.scopes.all:
        if scope.parent is not None:
            found.setdefault(scope.parent, []).append(scope)
    return found


def _made_by(module: Module, scope: NameScope, name: str) -> ast.Call | None:
    """The one array call that a name is assigned from."""
    found = scope.lookup(name)
    if found is None:
        return None
    _, bindings = found
    if len(bindings) != 1:
        return None
    value = bindings[0].value
    if bindings[0].kind != "assign" or value is None or not _is_array(module, value):
        return None
    return value  # type: ignore[return-value] # a call


def _self_reads(module: Module, function: scopes.Function) -> list[ast.Attribute]:
    """`self.x` in a method, or in a function within one."""
    if module.class_of(function) is None:
        return []
    loads = (load for scope in _inside(module, function) for load in scope.loads.get("self", ()))
    around = map(module.parent, loads)
    return sorted((each for each in around if isinstance(each, ast.Attribute)), key=scopes.place)


def _is_array(module: Module, node: ast.expr) -> bool:
    """Whether a call makes an array that is not known to be small."""
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
    """Whether an array made of this may have many numbers."""
    if isinstance(node, ast.Call):
        name = module.qualified_name(node.func) or ""
        is_numpy = name.startswith(("jax.numpy.", "numpy.", "jax.random."))
        is_same = isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_SIZE
        return _is_array(module, node) if is_numpy or is_same else True
    return not _is_small_literal(node)


def _has_size(call: ast.Call, place: int, root: str) -> bool:
    """Whether the sizes are not written as numbers, or are large."""
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
    """The product of sizes that are written as numbers."""
    sizes: list[Any] = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
    product = 1
    for size in sizes:
        if not (isinstance(size, ast.Constant) and isinstance(size.value, int | float)):
            return None
        product *= int(size.value)
    return product


def _is_small_literal(node: ast.expr) -> bool:
    """A number, or a list of few numbers."""
    literal = (ast.Constant, ast.UnaryOp, ast.USub, ast.List, ast.Tuple, ast.Load, ast.BinOp)
    nodes = list(ast.walk(node))
    operators = (ast.operator, ast.unaryop)
    return len(nodes) < _SMALL and all(isinstance(each, (*literal, *operators)) for each in nodes)
