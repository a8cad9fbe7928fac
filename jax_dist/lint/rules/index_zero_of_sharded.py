"""JXD203: `y[0]` of what a mapped function returned."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _mapped_results


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
    for node in module.nodes(ast.Subscript) if _mapped_results.mapped_calls(module) else ():
        match node:
            case ast.Subscript(
                value=value, slice=ast.Constant(value=int() as index), ctx=ast.Load()
            ):
                origins = _mapped_results.origins(module, value) if index == 0 else []
            case _:
                continue
        if not origins or not all(_mapped_results.is_array(module, each) for each in origins):
            continue
        start, end = module.span(value)[1], module.span(node)[1]
        fix = None
        if module.source.code[start:end] == b"[0]" and all(each.is_sliced for each in origins):
            edit = Edit(start, end, f".{_mapped_results.FIRST_SHARD}")
            fix = Fix("read the first shard", Safety.UNSAFE, (edit,))
        yield Found(node, "[0] of a sharded array computes over the whole mesh", fix)
