"""JXD402: a primitive of `custom_partitioning` under jit, not under shard_map."""

import ast
from collections.abc import Iterator

from jax_dist.checker import pmaps, scopes, traced
from jax_dist.checker.modules import Module
from jax_dist.checker.page import Page
from jax_dist.checker.registry import Case, Flag, Found, Keep, rule

PAGE = Page(
    code="JXD402",
    name="custom-partitioning-outside-shard-map",
    what="Finds calls of a function made by `custom_partitioning`, inside a function that the file "
    "passes to jit and not to shard_map.",
    why="The program contains the address of a Python object, so its key in the persistent cache "
    "differs in each process and nothing is reused: one new entry in each run, and none if "
    "the call is inside a shard_map (jax 0.10.2).",
    example="@jax.experimental.custom_partitioning.custom_partitioning\n"
    "def norm(x):\n    return x / x.sum()\n\n\nstep = jax.jit(lambda x: norm(x) + 1)\n",
    instead="step = jax.jit(jax.shard_map(lambda x: norm(x) + 1, mesh=mesh, in_specs=P('i'), "
    "out_specs=P('i')))\n",
    fix="None: only the `partition` callback knows the specs. `jax_dist.rewrite` inserts a "
    "shard_map with the specs that the compiler would choose.",
    since="Any jax with custom_partitioning.",
    source="https://docs.jax.dev/en/latest/persistent_compilation_cache.html; measured.",
)

_MAKERS = (
    "jax.experimental.custom_partitioning.custom_partitioning",
    "jax.experimental.custom_partitioning",
)


@rule(PAGE, triggers=(b"*custom_partitioning*",))
def check(module: Module) -> Iterator[Found]:
    if not module.uses(*_MAKERS):
        return
    for call in _calls(module):
        under = {
            each.by
            for each in traced.traced(module)
            if traced.is_inside(module, call, each.function)
        }
        if under == {"jit"}:
            yield Found(call, "custom_partitioning under jit makes a new cache key in each process")


def _calls(module: Module) -> Iterator[ast.Call]:
    """The calls of what the file makes with custom_partitioning."""
    for made in traced.applied(module, _MAKERS):
        for read in _reads(module, made):
            around = module.parent(read)
            if isinstance(around, ast.Call) and around.func is read:
                yield around


def _reads(module: Module, made: traced.Application) -> Iterator[ast.expr]:
    if isinstance(made.fun, scopes.Function) and not isinstance(made.fun, ast.Lambda):
        yield from module.reads(module.scope(made.fun), made.fun.name)
    else:
        yield from pmaps.reads_of(module, made.node)


_TOP = (
    "import functools\nimport jax\n"
    "from jax.experimental.custom_partitioning import custom_partitioning\n"
    "@functools.partial(custom_partitioning, static_argnums=(1,))\n"
    "def norm(x, n):\n    return x / n\n"
)

CASES: tuple[Case, ...] = (
    Keep("only defined", _TOP),
    Keep("called outside of what the file traces", _TOP + "def f(x):\n    return norm(x, 2)\n"),
    Keep(
        "in a shard_map under jit",
        _TOP
        + "f = jax.jit(jax.shard_map(lambda x: norm(x, 2), mesh=m, in_specs=s, out_specs=s))\n",
    ),
    Keep(
        "in a shard_map in a jitted function",
        _TOP + "@jax.jit\ndef f(x):\n    body = lambda y: norm(y, 2)\n"
        "    return jax.shard_map(body, mesh=m, in_specs=s, out_specs=s)(x)\n",
    ),
    Flag("in a lambda under jit", _TOP + "f = jax.jit(lambda x: norm(x, 2))\n", (7,)),
    Flag(
        "by name, in a decorated function",
        "import jax\nfrom jax.experimental.custom_partitioning import custom_partitioning\n"
        "def body(x):\n    return x\nnorm = custom_partitioning(body)\n"
        "@jax.jit\ndef f(x):\n    return norm(x)\n",
        (8,),
    ),
)
