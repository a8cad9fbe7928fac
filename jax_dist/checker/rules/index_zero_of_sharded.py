"""JXD203: `y[0]` of the result of a mapped call."""

import ast
import re
from collections.abc import Iterator

from jax_dist.checker.model import flow, semantic_model, stacking
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.flow import Origin
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD203",
    name="index-zero-of-sharded",
    what="Finds `y[0]` if the file shows that `y` is an array that a mapped function returned, "
    "with one slice for each device. It says nothing if `y` may be a tuple.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us to "
    "read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices). In a training "
    "loop that logs each step, the devices wait during this time.",
    example="step = jax.pmap(lambda x: jnp.sum(x))\nloss = step(batch)[0]\n",
    instead="step = jax.pmap(lambda x: jnp.sum(x))\n"
    "loss = step(batch).addressable_shards[0].data.squeeze(0)\n",
    fix="Unsafe: the value is the same, but it is on the first device only, while `y[0]` puts it "
    "on all.",
    since="jax 0.8.0: before, `y[0]` of a result of pmap was cheap (66 us on jax 0.7.2).",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured.",
)

_FIRST = re.compile(rb"\[\s*0\s*\]")


@rule(PAGE, triggers=(b"*pmap*",), since=(0, 8, 0))
def check(module: Module) -> Iterator[Found]:
    values = flow.of(module)
    if not values.mapped_calls:
        return
    for node in _first_items(module):
        found = values.origins(node.value)
        if all(_is_array(module, origin) for origin in found):
            fix = _fix(module, node, found)
            yield Found(node, "[0] of a sharded array computes over the whole mesh", fix)


def _is_array(module: Module, origin: Origin) -> bool:
    """Whether it is one array that a mapped function returned, and still is on the devices."""
    if origin.kind is not Kind.MAPPED or origin.on_host:
        return False
    return flow.is_tree(module, origin) is False


def _first_items(module: Module) -> list[ast.Subscript]:
    """Every `y[0]` that is read."""
    return [
        node
        for node in semantic_model.of_kind(module, ast.Subscript, _FIRST)
        if isinstance(node.slice, ast.Constant)
        and type(node.slice.value) is int
        and node.slice.value == 0
        and isinstance(node.ctx, ast.Load)
        and not _is_leaf_of_tree_map(module, node)
    ]


def _is_leaf_of_tree_map(module: Module, node: ast.Subscript) -> bool:
    """JXD202 speaks of `tree_map(lambda x: x[0], ...)`."""
    function = module.function(node)
    call = None if function is None else module.parent(function)
    return isinstance(call, ast.Call) and stacking.first_of_leaves(module, call) is not None


def _fix(module: Module, node: ast.Subscript, found: tuple[Origin, ...]) -> Fix | None:
    for origin in found:
        if origin.site is None or "out_axes" in origin.site.arguments or origin.site.unknown:
            return None
        if not flow.is_whole(module, origin):
            return None
    start, end = module.span(node.value)[1], module.span(node)[1]
    if module.source.code[start:end].replace(b" ", b"") != b"[0]":
        return None  # a parenthesis or a comment stands between
    edit = Edit(start, end, ".addressable_shards[0].data.squeeze(0)")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))
