"""JXD402: a primitive of `custom_partitioning` under jit, not under shard_map."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps, scopes, traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

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
