"""JXD201, JXD202: copies by `flax.jax_utils`, one for each device, and how one is taken."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import flow, stacking
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.checker.rules import Found, Page, rule

_REPLICATE = Page(
    code="JXD201",
    name="flax-replicate",
    what="Finds every use of `flax.jax_utils.replicate`.",
    why="It adds a leading dimension with one copy for each device, because pmap splits its "
    "arguments along one. A replicated array needs no such dimension. With it, every shape "
    "that is saved, logged or compared has one dimension too many, which must be removed "
    "again (JXD202).",
    example="state = flax.jax_utils.replicate(state)\n",
    instead="state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))\n",
    fix="None by itself: the mapped functions that take the copies, and the code that unpacks "
    "them, must change too. `jax-dist migrate --to jax --idiomatic` changes them together.",
    since="jax 0.8.0: pmap is in maintenance mode. Before, pmap needed the copies.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured on jax 0.10.2: the copies "
    "are one array with the spec P('_device_put_sharded').",
)


@rule(_REPLICATE, triggers=(b"jax_utils",), since=(0, 8, 0))
def flax_replicate(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.REPLICATE):
        yield Found(node, "replicate stacks one copy for each device on a new leading dimension")


_UNREPLICATE = Page(
    code="JXD202",
    name="flax-unreplicate",
    what="Finds `flax.jax_utils.unreplicate`, and `tree_map(lambda x: x[0], tree)` if the file "
    "shows that the arrays come from a mapped call or were replicated.",
    why="Indexing a sharded array is a computation over the whole mesh: 1.9 ms, against 26 us to "
    "read the first shard (f32[8,256,256], jax 0.10.2, 8 simulated devices). The result is on "
    "all devices, and with several processes it can fail.",
    example="saved = flax.jax_utils.unreplicate(state)\n",
    instead="saved = jax.tree.map(lambda x: x.addressable_shards[0].data.squeeze(0), state)\n",
    fix="Unsafe: the values are the same, but they are on the first device only, while `x[0]` "
    "puts them on all. Offered only if the file shows that every leaf is a jax.Array with one "
    "slice for each device.",
    since="jax 0.8.0: before, `x[0]` of a result of pmap was as cheap as reading the shard "
    "(66 us and 15 us on jax 0.7.2).",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; measured.",
)

_FIRST = "addressable_shards[0].data.squeeze(0)"


@rule(_UNREPLICATE, triggers=(b"jax_utils", b"*pmap*"), since=(0, 8, 0))
def flax_unreplicate(module: Module) -> Iterator[Found]:
    for node in module.uses(*stacking.UNREPLICATE):
        yield Found(
            node,
            "unreplicate takes `x[0]` of sharded arrays, which computes over the whole mesh",
            _fix_of_flax(module, node),
        )
    for node in module.uses(*stacking.TREE_MAPS):
        call = module.parent(node)
        if isinstance(call, ast.Call) and call.func is node:
            yield from _tree_map(module, call)


def _fix_of_flax(module: Module, function: ast.expr) -> Fix | None:
    call = module.parent(function)
    if not (isinstance(call, ast.Call) and call.func is function and len(call.args) == 1):
        return None
    if call.keywords or not _is_sliced(module, call.args[0]):
        return None
    name, imports = module.name_for("jax.tree.map", call)
    start = module.span(call.args[0])[0]
    edits = (
        Edit(*module.span(function), name),
        Edit(start, start, f"lambda x: x.{_FIRST}, "),
    )
    return Fix("read the first shard", Safety.UNSAFE, edits, imports)


def _tree_map(module: Module, call: ast.Call) -> Iterator[Found]:
    tree = stacking.first_of_leaves(module, call)
    if tree is None or not flow.of(module).is_stacked(tree):
        return
    if any(origin.on_host for origin in flow.of(module).origins(tree)):
        return
    message = "`x[0]` of sharded arrays computes over the whole mesh"
    yield Found(call, message, _fix_of_lambda(module, call.args[0], tree))


def _fix_of_lambda(module: Module, function: ast.expr, tree: ast.expr) -> Fix | None:
    body = function.body if isinstance(function, ast.Lambda) else None
    if not isinstance(body, ast.Subscript) or not _is_sliced(module, tree):
        return None
    edit = Edit(*module.span(body), f"{module.text(body.value)}.{_FIRST}")
    return Fix("read the first shard", Safety.UNSAFE, (edit,))


def _is_sliced(module: Module, tree: ast.expr) -> bool:
    """Whether every leaf is surely a jax.Array with one slice for each device."""
    for origin in flow.of(module).origins(tree):
        if origin.on_host or not flow.is_whole(module, origin):
            return False
        if origin.kind is Kind.MAPPED and origin.site is not None:
            if "out_axes" in origin.site.arguments or origin.site.unknown:
                return False
        elif origin.kind is not Kind.REPLICATED or not _by_flax(module, origin.node):
            return False
    return True


def _by_flax(module: Module, node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords):
        return False
    return module.qualified_name(node.func) in stacking.REPLICATE
