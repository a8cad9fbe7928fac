"""JXD403: values that differ in each process, read while tracing."""

import ast

from jax_dist.lint.model import traced
from jax_dist.lint.rules import Findings, Found, Module, Rule

_UNSTABLE = (
    *(f"random.{name}" for name in ("random", "randint", "uniform", "gauss", "choice", "shuffle")),
    *(f"numpy.random.{name}" for name in ("rand", "randn", "random", "normal", "uniform")),
    *(f"numpy.random.{name}" for name in ("randint", "choice", "permutation", "shuffle")),
    *(f"time.{name}" for name in ("time", "time_ns", "perf_counter", "monotonic")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    *("uuid.uuid1", "uuid.uuid4", "os.getpid", "os.urandom", "secrets.token_hex"),
)


@Rule(
    "JXD403",
    what="Python's and NumPy's random numbers, times, `uuid`, `os.getpid`, `id` and `hash` in "
    "functions passed to pmap, shard_map or jit. jit counts only in files that mention pmap or "
    "shard_map.",
    why="The value is computed once, while tracing: every call uses the same number. Every "
    "process has a different program, so the persistent cache misses in every run (jax 0.10.2).",
    instead="step = jax.pmap(lambda x, key: x + jax.random.normal(key))",
    triggers=traced.TRIGGERS,
)
def unstable_trace_value(module: Module) -> Findings:
    traced_by: dict[ast.AST, str] = {}
    for by, function in traced.find_traced(module):
        traced_by.setdefault(function, by)
    if not traced_by:
        return
    ids = [call for call in module.nodes(ast.Call) if module.builtin(call.func) in ("id", "hash")]
    for call in (*module.calls(*_UNSTABLE), *ids):
        around = module.ancestors(call)
        by = next((traced_by[node] for node in around if node in traced_by), None)
        if by is not None:
            name = module.text(call.func)
            yield Found(call, f"{name}() is called once, while {by} traces, not per call")
