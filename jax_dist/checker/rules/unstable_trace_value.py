"""JXD403: values that differ in each process, in traced functions."""

from collections.abc import Iterator

from jax_dist.checker.model import traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD403",
    name="unstable-trace-value",
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
_BUILTINS = ("id", "hash")


@rule(PAGE, triggers=traced.TRIGGERS)
def check(module: Module) -> Iterator[Found]:
    for call in (*module.calls(*_UNSTABLE), *traced.calls_of_builtins(module, _BUILTINS)):
        for each in traced.traced(module):
            if traced.is_inside(module, call, each.function):
                name = module.text(call.func)
                yield Found(call, f"{name}() is called once, while {each.by} traces, not per call")
                break
