"""JXD203: the first slice of what a mapped function returned, or of what Flax replicated."""

import ast

from jax_dist.lint.model import stacking
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _mapped_results
from jax_dist.lint.rules._mapped_results import Origin

_FIRST_SHARD = "addressable_shards[0].data.squeeze(0)"


@Rule(
    "JXD203",
    what="`flax.jax_utils.unreplicate`; and `y[0]`, or `tree_map(lambda x: x[0], y)`, where the "
    "file shows that `y` has one slice for each device: a mapped function returned it, or Flax "
    "replicated it.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us "
    "to read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices); with several "
    "processes it can fail. The fix is unsafe: its result is on the first device only.",
    instead="loss = step(batch).addressable_shards[0].data.squeeze(0)\n"
    "saved = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), state)",
    triggers=(b"jax_utils", b"pmap"),
    since=(0, 8, 0),
)
def index_zero_of_sharded(module: Module) -> Findings:
    for node in module.uses(stacking.UNREPLICATE):
        message = "unreplicate takes `x[0]` of sharded arrays, which computes over the whole mesh"
        yield Found(node, message, _fix_of_flax(module, node))
    for call in filter(None, map(module.call_of, module.uses(*stacking.TREE_MAPS))):
        tree = stacking.first_of_leaves(module, call)  # of `tree_map(lambda x: x[0], tree)`
        tree_origins = [] if tree is None else _mapped_results.origins(module, tree)
        if tree_origins:
            message = "`x[0]` of sharded arrays computes over the whole mesh"
            index = call.args[0].body if isinstance(call.args[0], ast.Lambda) else None  # `x[0]`
            yield Found(call, message, _fix(module, index, tree_origins))
    for node in module.nodes(ast.Subscript) if _mapped_results.mapped_calls(module) else ():
        if module.text(node.slice) != "0" or not isinstance(node.ctx, ast.Load):
            continue
        origins = _mapped_results.origins(module, node.value)
        if origins and all(_mapped_results.is_array(module, origin) for origin in origins):
            message = "[0] of a sharded array computes over the whole mesh"
            yield Found(node, message, _fix(module, node, origins))


def _fix_of_flax(module: Module, function: ast.expr) -> Fix | None:
    """Return the fix that reads the first shard instead of `unreplicate(tree)`.

    None if a leaf may have no leading dimension over devices.
    """
    call = module.call_of(function)
    if call is None or len(call.args) != 1 or call.keywords:
        return None
    origins = _mapped_results.origins(module, call.args[0])
    if not origins or not all(origin.is_sliced for origin in origins):
        return None
    name, imports = module.name_for("jax.tree.map", call)
    start = module.span(call.args[0])[0]
    lambda_edit = Edit(start, start, f"lambda x: x.{_FIRST_SHARD}, ")
    edits = (Edit(*module.span(function), name), lambda_edit)
    return Fix("read the first shard", Safety.UNSAFE, edits, imports)


def _fix(module: Module, node: ast.AST | None, origins: list[Origin]) -> Fix | None:
    """Return the fix that reads the first shard instead of `x[0]`, the expression `node`.

    None if `node` is no `x[0]`, or a leaf of x may have no leading dimension over devices.
    """
    if not isinstance(node, ast.Subscript) or not all(origin.is_sliced for origin in origins):
        return None
    start, end = module.span(node.value)[1], module.span(node)[1]
    if module.source.code[start:end] != b"[0]":
        return None
    edit = Edit(start, end, f".{_FIRST_SHARD}")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))
