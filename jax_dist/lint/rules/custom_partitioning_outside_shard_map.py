"""JXD402: a `custom_partitioning` operation outside `shard_map`."""

import ast

from jax_dist.lint.model import pmaps, traced
from jax_dist.lint.rules import Findings, Found, Module, Rule

_MAKERS = ("jax.experimental.custom_partitioning.custom_partitioning",)
_MAKERS += ("jax.experimental.custom_partitioning",)


@Rule(
    "JXD402",
    what="Calls of a function made by `custom_partitioning`, inside a function that the file "
    "passes to jit and not to shard_map.",
    why="The program contains the address of a Python object, so its key in the persistent "
    "cache differs in each process and nothing is reused (jax 0.10.2).",
    instead="step = jax.jit(jax.shard_map(lambda x: norm(x), mesh=mesh, in_specs=P('i'), "
    "out_specs=P('i')))\n"
    "# jax_dist.rewrite inserts such a shard_map",
    triggers=(b"custom_partitioning",),
)
def custom_partitioning_outside_shard_map(module: Module) -> Findings:
    traced_by: dict[ast.AST, set[str]] = {}
    for by, function in traced.find_traced(module):
        traced_by.setdefault(function, set()).add(by)
    for site in pmaps.applications(module, _MAKERS):
        for call in pmaps.mapped_calls(module, site):
            names = {name for node in module.ancestors(call) for name in traced_by.get(node, ())}
            if names == {"jit"}:
                message = "custom_partitioning under jit makes a new cache key in each process"
                yield Found(call, message)
