"""JXD203: `y[0]` of what a mapped function returned."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model import flow, stacking
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.flow import Origin
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.lint.rules import Found, rule


@rule(
    "JXD203",
    "index-zero-of-sharded",
    what="`y[0]` where the file shows that `y` is an array that a mapped function returned, "
    "with one slice for each device.",
    why="As JXD202. In a training loop that logs each step, the devices wait during this time.",
    instead="loss = step(batch).addressable_shards[0].data.squeeze(0)",
    fix="unsafe",
    triggers=(b"*pmap*",),
    since=(0, 8, 0),
)
def index_zero_of_sharded(module: Module) -> Iterator[Found]:
    values = flow.of(module)
    for node in _first_items(module) if values.mapped_calls else ():
        found = values.origins(node.value)
        if all(
            origin.kind is Kind.MAPPED
            and not origin.on_host
            and flow.is_tree(module, origin) is False
            for origin in found
        ):
            fix = _fix_of_index(module, node, found)
            yield Found(node, "[0] of a sharded array computes over the whole mesh", fix)


def _first_items(module: Module) -> Iterator[ast.Subscript]:
    """Yield every `y[0]` that is read; JXD202 speaks of `tree_map(lambda x: x[0], ...)`."""
    for node in module.nodes(ast.Subscript):
        match node:
            case ast.Subscript(slice=ast.Constant(value=0 as zero), ctx=ast.Load()):
                function = module.function(node)
                call = None if function is None else module.parent(function)
                of_leaf = isinstance(call, ast.Call) and stacking.first_of_leaves(module, call)
                if type(zero) is int and not of_leaf:
                    yield node


def _fix_of_index(module: Module, node: ast.Subscript, found: tuple[Origin, ...]) -> Fix | None:
    for origin in found:
        if origin.site is None or "out_axes" in origin.site.arguments or origin.site.unknown:
            return None
    start, end = module.span(node.value)[1], module.span(node)[1]
    if module.source.code[start:end].replace(b" ", b"") != b"[0]":
        return None  # a parenthesis or a comment stands between
    return Fix(
        "read the first shard", Safety.UNSAFE, (Edit(start, end, f".{stacking.FIRST_SHARD}"),)
    )
