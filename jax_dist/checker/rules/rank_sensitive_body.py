"""JXD304: bodies of shard_map that read their block as pmap gave it."""

import ast
from collections.abc import Iterator
from typing import Any

from jax_dist.checker.model import functions, scopes, traced
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD304",
    name="rank-sensitive-body",
    what="Finds, in functions passed to `shard_map`, reductions without an axis, `reshape`, `dot`, "
    "`len` and `shape[0]` of an unmodified parameter.",
    why="pmap removes the mapped dimension before the function sees its argument; `shard_map` "
    "keeps it, with the size of the block. A body that moves from pmap to `shard_map` "
    "unchanged then counts or sums over one more dimension, without an error: `x.shape[0]` is "
    "2 under pmap and 1 under `shard_map` (f32[8,2] on 8 simulated devices, jax 0.10.2).",
    example="step = jax.shard_map(lambda x: x - jnp.mean(x), mesh=mesh, in_specs=P('i'), "
    "out_specs=P('i'))\n",
    instead="step = jax.shard_map(lambda x: x - jnp.mean(x, axis=1, keepdims=True), mesh=mesh, "
    "in_specs=P('i'), out_specs=P('i'))\n",
    fix="None: the text does not show whether the whole block was meant.",
    since="Any jax with shard_map.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured on jax 0.10.2.",
    default=False,
)

_REDUCTIONS = ("sum", "mean", "max", "min", "prod", "std", "var")
_WHOLE = (*_REDUCTIONS, "reshape", "ravel", "flatten", "dot")


@rule(PAGE, triggers=(b"*shard_map*",))
def check(module: Module) -> Iterator[Found]:
    seen: set[ast.AST] = set()
    for each in traced.applications(module, "shard_map"):
        function = functions.innermost(module, each.fun)
        if function is None or function in seen:
            continue
        seen.add(function)
        scope = module.scopes.of[function]
        for parameter in scopes.parameters(function.args):
            for read in module.reads(scope, parameter.arg):
                found = _whole(module, read) if _is_parameter(module, read) else None
                if found is not None:
                    message = f"{found} of a whole block may count the mapped dimension too"
                    yield Found(read, message)


def _is_parameter(module: Module, read: ast.Name) -> bool:
    """Whether nothing else was given this name since."""
    reaching = module.reaching(read) or []
    return all(binding.kind == "parameter" for binding in reaching)


def _whole(module: Module, read: ast.Name) -> str | None:
    """What is asked of a whole block: "sum", "shape[0]"; None for anything else."""
    around: Any = module.parent(read)
    if isinstance(around, ast.Attribute):
        outer = module.parent(around)
        if around.attr == "shape":
            is_first = isinstance(outer, ast.Subscript) and module.text(outer.slice) == "0"
            return "shape[0]" if is_first else None
        if not (isinstance(outer, ast.Call) and outer.func is around and around.attr in _WHOLE):
            return None
        axisless = not outer.args and not outer.keywords
        return around.attr if around.attr not in _REDUCTIONS or axisless else None
    if not (isinstance(around, ast.Call) and around.args[:1] == [read]):
        return None
    if isinstance(around.func, ast.Name) and around.func.id == "len":
        return "len"
    root, _, name = (module.qualified_name(around.func) or "").rpartition(".")
    if root != "jax.numpy" or name not in _WHOLE:
        return None
    axisless = len(around.args) == 1 and not around.keywords
    return name if name not in _REDUCTIONS or axisless else None
