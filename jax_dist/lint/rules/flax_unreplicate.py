"""JXD202: Flax's `unreplicate`, or `x[0]` of each leaf."""

import ast

from jax_dist.lint.model import stacking
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _mapped_results


@Rule(
    "JXD202",
    "flax-unreplicate",
    what="`flax.jax_utils.unreplicate`, and `tree_map(lambda x: x[0], y)` where the file shows "
    "that `y` is stacked over devices.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us "
    "to read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices); with several "
    "processes it can fail. The fix is unsafe: its result is on the first device only.",
    instead="saved = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), state)",
    fix="unsafe",
    triggers=(b"jax_utils", b"*pmap"),
    since=(0, 8, 0),
)
def flax_unreplicate(module: Module) -> Findings:
    for node in module.uses(*stacking.UNREPLICATE):
        message = "unreplicate takes `x[0]` of sharded arrays, which computes over the whole mesh"
        yield Found(node, message, _fix_of_flax(module, node))
    for call in filter(None, map(module.call_of, module.uses(*stacking.TREE_MAPS))):
        tree = stacking.first_of_leaves(module, call)
        if tree is not None and _mapped_results.origins(module, tree):
            message = "`x[0]` of sharded arrays computes over the whole mesh"
            yield Found(call, message, _fix_of_lambda(module, call.args[0], tree))


def _fix_of_flax(module: Module, function: ast.expr) -> Fix | None:
    call = module.call_of(function)
    if call is None or len(call.args) != 1 or call.keywords or not _is_sliced(module, call.args[0]):
        return None
    name, imports = module.name_for("jax.tree.map", call)
    start = module.span(call.args[0])[0]
    edits = (
        Edit(*module.span(function), name),
        Edit(start, start, f"lambda x: x.{_mapped_results.FIRST_SHARD}, "),
    )
    return Fix("read the first shard", Safety.UNSAFE, edits, imports)


def _fix_of_lambda(module: Module, function: ast.expr, tree: ast.expr) -> Fix | None:
    body = function.body if isinstance(function, ast.Lambda) else None
    if not isinstance(body, ast.Subscript) or not _is_sliced(module, tree):
        return None
    edit = Edit(*module.span(body), f"{module.text(body.value)}.{_mapped_results.FIRST_SHARD}")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))


def _is_sliced(module: Module, tree: ast.expr) -> bool:
    """Return whether every leaf is surely a jax.Array with one slice for each device."""
    origins = _mapped_results.origins(module, tree)
    return bool(origins) and all(origin.is_sliced for origin in origins)
