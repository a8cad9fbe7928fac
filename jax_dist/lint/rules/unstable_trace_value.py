"""JXD403: values that differ in each process, read while tracing."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import traced
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule

_UNSTABLE = (
    *(f"random.{name}" for name in ("random", "randint", "uniform", "gauss", "choice", "shuffle")),
    *(f"numpy.random.{name}" for name in ("rand", "randn", "random", "normal", "uniform")),
    *(f"numpy.random.{name}" for name in ("randint", "choice", "permutation", "shuffle")),
    *(f"time.{name}" for name in ("time", "time_ns", "perf_counter", "monotonic")),
    *(f"uuid.{name}" for name in ("uuid1", "uuid4")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    *("os.getpid", "os.urandom", "secrets.token_hex"),
)


@rule(
    "JXD403",
    "unstable-trace-value",
    what="Python's and NumPy's random numbers, times, `uuid`, `os.getpid`, `id` and `hash`, "
    "and loops over a set, in functions passed to pmap, shard_map or jit. jit is looked"
    " at only in files that mention pmap or shard_map.",
    why="The value is computed once, while tracing, and becomes a constant: every call uses"
    " the same number. Every process has a different program, so the persistent cache "
    "misses in every run (jax 0.10.2); the order of a set of strings differs in each "
    "process, too.",
    instead="step = jax.pmap(lambda x, key: x + jax.random.normal(key))\n"
    "total = sum(x[name] for name in sorted({'a', 'b'}))",
    triggers=traced.TRIGGERS,
)
def unstable_trace_value(module: Module) -> Iterator[Found]:
    traced_by: dict[ast.AST, str] = {
        each.function: each.by for each in reversed(traced.traced(module))
    }
    if not traced_by:
        return
    calls = (call for call in module.nodes(ast.Call) if module.builtin(call.func) in ("id", "hash"))
    for call in (*module.calls(*_UNSTABLE), *calls):
        around = (each for each in module.ancestors(call) if each in traced_by)
        by = traced_by.get(next(around, call))
        if by is not None:
            name = module.text(call.func)
            yield Found(call, f"{name}() is called once, while {by} traces, not per call")
    for node in _loops(module):
        is_traced = not traced_by.keys().isdisjoint(module.ancestors(node))
        if is_traced and _is_set(module, node.iter) and not _is_order_lost(module, node):
            yield Found(node.iter, "the order of a set differs in each process")


_LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


def _is_order_lost(module: Module, node: ast.For | ast.comprehension) -> bool:
    """Return whether a comprehension makes a set again, or its taker does not mind the order."""
    if isinstance(node, ast.For):
        return False
    around = module.parent(node)
    if isinstance(around, ast.SetComp):
        return True
    match module.parent(around):
        case ast.Call(func=ast.Name(id=taker)):
            return taker in ("sorted", "set", "frozenset", "any", "all", "len")
    return False
