"""JXD401, JXD403, JXD404: what a trace takes up from around it, and makes a part of the program."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import pmaps, scopes, traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.scopes import NameScope
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, rule

_CAPTURED = Page(
    code="JXD401",
    name="captured-array",
    summary="an array that a mapped or jitted function captures",
    cost="a large program, slow to compile, that may miss the cache",
    what="Finds arrays that a function given to pmap, shard_map or jit, or a function of the file "
    "that it calls, captures instead of taking them as arguments: names of the module or of an "
    "enclosing function, and `self.` attributes, that are assigned from calls of jax.numpy, NumPy, "
    "jax.random or device_put. Arrays that clearly have fewer than 1024 numbers are ignored. jit "
    "is checked only in files that also mention pmap or shard_map.",
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


@rule(_CAPTURED, triggers=traced.TRIGGERS)
def _captured_array(module: Module) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for each in traced.traced(module):
        if each.by == "jax_dist.pmap":  # which makes arguments of them
            continue
        for function in _reached(module, each.function):
            for read, name, value in _captured(module, function):
                made_in = (each.function, function)
                if read in seen or any(traced.is_inside(module, value, one) for one in made_in):
                    continue
                seen.add(read)
                maker = module.text(value.func)
                message = f"{name}, made by {maker}, becomes a constant of the program under "
                yield Found(read, f"{message}{each.by}")


def _reached(module: Module, function: scopes.Function) -> list[scopes.Function]:
    """A function, and those of the file that it calls or hands on, and they."""
    found = [function]
    for each in found:
        for scope in _scopes_in(module, each):
            named = (scope.lookup(name) for name in scope.loads)
            once = [bound[0] for _, bound in filter(None, named) if len(bound) == 1]
            helpers = [one.node if one.kind == "def" else one.value for one in once]
            methods = map(module.parent, scope.loads.get("self", ()))
            helpers += [pmaps.definition(module, each) for each in methods]
            found += dict.fromkeys(
                each for each in helpers if isinstance(each, scopes.Function) and each not in found
            )
    return found


def _scopes_in(module: Module, function: scopes.Function) -> list[NameScope]:
    """The function's own scope and those in it, in order."""
    children = module.once(_children)
    inside = [module.scopes.of[function]]
    for scope in inside:
        inside += children.get(scope, [])
    return inside


def _captured(
    module: Module, function: scopes.Function
) -> Iterator[tuple[ast.expr, str, ast.Call]]:
    """`(read, name, call that made it)`, once a name."""
    named: set[str] = set()
    inside = _scopes_in(module, function)
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


def _children(module: Module) -> dict[NameScope, list[NameScope]]:
    found: dict[NameScope, list[NameScope]] = {}
    for scope in module.scopes.all:
        if scope.parent is not None:
            found.setdefault(scope.parent, []).append(scope)
    return found


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
        if is_same and isinstance(node.func, ast.Attribute):
            return _may_be_large(module, node.func.value)
        return _is_array(module, node) if is_numpy else True
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


_UNSTABLE_VALUE = Page(
    code="JXD403",
    name="unstable-trace-value",
    summary="a time, a random number or an `id` that is read while tracing",
    cost="one constant for all calls; the cache misses in every run",
    what="Finds Python's and NumPy's random numbers, times, `uuid`, `os.getpid`, `id` and `hash` "
    "in functions passed to pmap, shard_map or jit. jit is checked only in files that also "
    "mention pmap or shard_map.",
    why="The value is computed once, while tracing, and becomes a constant: every call uses the "
    "same number, and every process has a different program. The persistent cache misses in "
    "every run, and processes that must run the same program run different ones (measured for "
    "a random float and for a process id, jax 0.10.2).",
    example="step = jax.pmap(lambda x: x + np.random.normal())\n",
    instead="step = jax.pmap(lambda x, key: x + jax.random.normal(key))\n",
    fix="None: the value must become an argument, and all callers must pass it.",
    since="Any jax.",
    source="Measured on jax 0.10.2.",
)

_UNSTABLE = (
    *(f"random.{name}" for name in ("random", "randint", "uniform", "gauss", "choice", "shuffle")),
    *(f"numpy.random.{name}" for name in ("rand", "randn", "random", "normal", "uniform")),
    *(f"numpy.random.{name}" for name in ("randint", "choice", "permutation", "shuffle")),
    *(f"time.{name}" for name in ("time", "time_ns", "perf_counter", "monotonic")),
    *(f"uuid.{name}" for name in ("uuid1", "uuid4")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    *("os.getpid", "os.urandom", "secrets.token_hex"),
)


@rule(_UNSTABLE_VALUE, triggers=traced.TRIGGERS)
def _unstable_trace_value(module: Module) -> Iterator[Found]:
    ours = (call for call in module.nodes(ast.Call) if module.builtin(call.func) in ("id", "hash"))
    for call in (*module.calls(*_UNSTABLE), *ours):
        for each in traced.traced(module):
            if traced.is_inside(module, call, each.function):
                name = module.text(call.func)
                yield Found(call, f"{name}() is called once, while {each.by} traces, not per call")
                break


_SET_ORDER = Page(
    code="JXD404",
    name="set-order-in-trace",
    summary="a loop over a set while tracing",
    cost="another program in each process; the cache misses",
    what="Finds loops over a set in functions passed to pmap, shard_map or jit. jit is checked "
    "only in files that also mention pmap or shard_map.",
    why="The order of a set of strings differs in each process (PYTHONHASHSEED), and so does the "
    "order of the operations: the persistent cache misses in every run (measured, jax "
    "0.10.2), and processes that must run the same program run different ones.",
    example="step = jax.pmap(lambda x: sum(x[name] for name in {'a', 'b'}))\n",
    instead="step = jax.pmap(lambda x: sum(x[name] for name in sorted({'a', 'b'})))\n",
    fix="Unsafe: elements that cannot be compared cannot be sorted, and the order of a sum may "
    "change its last digits.",
    since="Any jax.",
    source="Measured on jax 0.10.2.",
)

_LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@rule(_SET_ORDER, triggers=traced.TRIGGERS)
def _set_order_in_trace(module: Module) -> Iterator[Found]:
    functions = {each.function for each in traced.traced(module)}
    for node in _loops(module) if functions else ():
        if not _is_set(module, node.iter) or functions.isdisjoint(_around(module, node)):
            continue
        if isinstance(node, ast.comprehension) and _is_order_lost(module, node):
            continue
        start, end = module.span(node.iter)
        edits = (Edit(start, start, "sorted("), Edit(end, end, ")"))
        fix = Fix("sort the set", Safety.UNSAFE, edits)
        yield Found(node.iter, "the order of a set differs in each process", fix)


def _around(module: Module, node: ast.AST) -> Iterator[ast.AST]:
    """The functions in whose bodies a node stands."""
    function = module.function(node)
    while function is not None:
        yield function
        function = module.function(function)


def _loops(module: Module) -> Iterator[ast.For | ast.comprehension]:
    for node in module.nodes(*_LOOPS):
        if isinstance(node, ast.For):
            yield node
        else:
            yield from node.generators


def _is_set(module: Module, node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        return module.builtin(node.func) in ("set", "frozenset")
    if isinstance(node, ast.Name):
        values = module.values(node)
        sets = (ast.Set, ast.SetComp, ast.Call)
        if not values or not all(isinstance(value, sets) for value in values):
            return False
        return all(_is_set(module, value) for value in values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub):
        return _is_set(module, node.left) and _is_set(module, node.right)
    return False


def _is_order_lost(module: Module, node: ast.comprehension) -> bool:
    """Whether the comprehension makes a set again, or what takes it does not mind the order."""
    around = module.parent(node)
    if isinstance(around, ast.SetComp):
        return True
    match module.parent(around):
        case ast.Call(func=ast.Name(id=taker)):
            return taker in ("sorted", "set", "frozenset", "any", "all", "len")
    return False
