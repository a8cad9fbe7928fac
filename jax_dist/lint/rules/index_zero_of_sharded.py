"""JXD203: `y[0]` of what a mapped function returned."""

import ast

from jax_dist.lint.model import stacking
from jax_dist.lint.model.stacking import Kind
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety


@Rule(
    "JXD203",
    "index-zero-of-sharded",
    what="`y[0]` where the file shows that `y` is an array that a mapped function returned, "
    "with one slice for each device.",
    why="As JXD202. In a training loop that logs each step, the devices wait during this time.",
    instead="loss = step(batch).addressable_shards[0].data.squeeze(0)",
    fix="unsafe",
    triggers=(b"*pmap",),
    since=(0, 8, 0),
)
def index_zero_of_sharded(module: Module) -> Findings:
    values = stacking.flow(module)
    for node in module.nodes(ast.Subscript) if values.mapped_calls else ():
        match node:
            case ast.Subscript(slice=ast.Constant(value=int() as index), ctx=ast.Load()):
                origins = values.origins(node.value) if index == 0 else ()
            case _:
                continue
        is_array = all(
            origin.kind is Kind.MAPPED
            and not origin.on_host
            and stacking.is_tree(module, origin) is False
            for origin in origins
        )
        if not origins or not is_array or _is_of_leaf(module, node):
            continue
        sites = [origin.site for origin in origins]
        start, end = module.span(node.value)[1], module.span(node)[1]
        fix = None
        if module.source.code[start:end] == b"[0]" and all(
            site and "out_axes" not in site.arguments and not site.unknown for site in sites
        ):
            edit = Edit(start, end, f".{stacking.FIRST_SHARD}")
            fix = Fix("read the first shard", Safety.UNSAFE, (edit,))
        yield Found(node, "[0] of a sharded array computes over the whole mesh", fix)


def _is_of_leaf(module: Module, node: ast.Subscript) -> bool:
    """Return whether it is that of `tree_map(lambda x: x[0], y)`, of which JXD202 speaks."""
    function = module.function(node)
    call = None if function is None else module.parent(function)
    return isinstance(call, ast.Call) and stacking.first_of_leaves(module, call) is not None
