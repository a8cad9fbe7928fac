"""JXD101, JXD102, JXD103, JXD108: names that left jax, or moved."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, _renames, rule
from jax_dist.lint.rules._old_names import NAMES, PLACEMENTS, SHARDINGS

_REPLICATED = Page(
    code="JXD101",
    name="removed-device-put-replicated",
    summary="`jax.device_put_replicated`",
    cost="AttributeError since jax 0.10",
    what="Finds `jax.device_put_replicated`, under any alias.",
    why="It was removed: jax 0.10.2 raises an AttributeError. Brax 0.14.2 does not start on that "
    "version for this reason.",
    example="import jax\n\nstate = jax.device_put_replicated(state, jax.local_devices())\n",
    instead="import jax\nimport jax_dist\n\n"
    "state = jax_dist.device_put_replicated(state, jax.local_devices())\n",
    fix="Safe: `jax_dist.device_put_replicated` gives the same shapes and values on the same "
    "devices, without a copy on the host for each device. In plain JAX, "
    "`jax.device_put(state, NamedSharding(mesh, P()))` has no leading device dimension, so "
    "the mapped function has to change too: `jax-dist migrate` does that.",
    since="jax 0.8.1: deprecated; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
)


@rule(_REPLICATED, triggers=(b"device_put_replicated",))
def _removed_device_put_replicated(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, PLACEMENTS[:1])


_SHARDED = Page(
    code="JXD102",
    name="removed-device-put-sharded",
    summary="`jax.device_put_sharded`",
    cost="AttributeError since jax 0.10",
    what="Finds `jax.device_put_sharded`, under any alias.",
    why="It was removed: jax 0.10.2 raises an AttributeError.",
    example="import jax\n\nbatch = jax.device_put_sharded(shards, jax.local_devices())\n",
    instead="import jax\nimport jax_dist\n\n"
    "batch = jax_dist.device_put_sharded(shards, jax.local_devices())\n",
    fix="Safe: `jax_dist.device_put_sharded` gives the same shapes and values on the same "
    "devices. In plain JAX, `jax.device_put(np.stack(shards), NamedSharding(mesh, P('i')))` "
    "is similar.",
    since="jax 0.8.1: deprecated; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html#drop-in-replacements",
)


@rule(_SHARDED, triggers=(b"device_put_sharded",))
def _removed_device_put_sharded(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, PLACEMENTS[1:])


_SHARDING_CLASS = Page(
    code="JXD103",
    name="removed-sharding-class",
    summary="`PmapSharding` and other removed shardings",
    cost="AttributeError; `isinstance` tests answer False before",
    what="Finds `PmapSharding`, `PositionalSharding`, `GSPMDSharding` and other removed classes of "
    "`jax.sharding`.",
    why="Using the name raises an AttributeError or ImportError, even in an `isinstance`. The "
    "answer of such a test had changed earlier: on jax 0.9.2, results of pmap have a "
    "`NamedSharding`, so a test for `PmapSharding` was False.",
    example="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.PmapSharding)\n",
    instead="import jax\n\nmapped = isinstance(x.sharding, jax.sharding.NamedSharding)\n",
    fix="Safe for `MeshPspecSharding` and `XLACompatibleSharding`, which were renamed. None for "
    "the others: a `NamedSharding` needs a mesh and a spec, and a test has to check something "
    "else.",
    since="jax 0.7.1: PositionalSharding removed; 0.10.0: PmapSharding and GSPMDSharding removed.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)


@rule(
    _SHARDING_CLASS,
    triggers=(
        b"PmapSharding",
        b"PositionalSharding",
        b"GSPMDSharding",
        b"XLACompatibleSharding",
        b"MeshPspecSharding",
        b"OpShardingSharding",
    ),
)
def _removed_sharding_class(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, SHARDINGS)


_NAME = Page(
    code="JXD108",
    name="removed-name",
    summary="another removed name, such as `jax.tree_map`",
    cost="AttributeError or ImportError",
    what="Finds imports and uses of names and modules that jax has removed or renamed: "
    "`jax.tree_map` and its family, `jax.host_id`, `jax.lib.xla_bridge`, "
    "`jax.experimental.host_callback`, `jax.core.Primitive`, `jax.random.KeyArray` and "
    "others; `a_min` and `a_max` of `jax.numpy.clip`; `flax.optim`.",
    why="The program fails with an AttributeError or an ImportError. Of the names in the table, "
    "jax 0.12.0.1 still has only `host_id`, `host_count`, `host_ids` and `thread_resources`, "
    "with a warning.",
    example="import jax\n\ny = jax.tree_map(lambda x: 2 * x, {'w': 1.0})\n",
    instead="import jax\n\ny = jax.tree.map(lambda x: 2 * x, {'w': 1.0})\n",
    fix="Safe if the name has a successor with the same meaning. Unsafe for array types outside "
    "annotations, since `isinstance(x, jax.Array)` is true of more than before, and for "
    "`use_mesh` outside a `with`, since `jax.set_mesh` then sets the mesh permanently. "
    "Display-only for `jax.ops.index_update` and similar functions, and for the buffers of "
    "arrays. None for the others: the message names the replacement.",
    since="Any jax; the message names the version that removed it.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)

# Not "jax.core" itself, nor other words that many files hold: what a rule wants is parsed.
_WORDS = """
*DeviceArray *KeyArray .device_buffer* a_max= a_min= abstract_arrays alltrue clear_backends
config.FLAGS config.config cumproduct experimental.pjit global_device_array host_count host_id(
host_ids in1d interpreters.pxla interpreters.xla jax.config.config jax.lib.xla* jnp.product
ops.index* pjit.NamedSharding pjit.PartitionSpec round_ row_stack sharded_jit shuffle soft_pmap
sometrue tie_in trapz tree_multimap use_mesh xla_computation
"""
_IMPORTED = {  # with what they are imported from: "jax.tree_map", "jax import tree_map"
    "jax": "api host_id linear_util partial tree_all tree_flatten tree_leaves tree_map tree_reduce "
    "tree_structure tree_transpose tree_unflatten treedef_is_leaf util",
    "experimental": "PartitionSpec disable_x64 enable_x64 export host_callback maps optimizers "
    "stax",
    "flax": "optim",
    "lax": "partial",
    "nn": "normalize",
    "numpy": "product",
}
_MODULES = ("jax.config", "jax.core", "jax.lib", "jax.ops", "interpreters")
_ALIASED = ("config", "experimental", "lax", "nn", "ops", "random")
_IMPORTS = (
    *(f"{home}.{name}" for home, names in _IMPORTED.items() for name in names.split()),
    *(f"{home} import {name}" for home, names in _IMPORTED.items() for name in names.split()),
    *(f"{home} import" for home in _MODULES),
    *(f"jax import {home} as" for home in _ALIASED),
    *("import jax as", ", jax as", "import jax.config", "import pjit as"),
    *("jax import core", "jax import lib", ", tree_map", "\n    tree_map", ", optim"),
)
_OF_CORE = tuple(entry.old.encode() for entry in NAMES if entry.old.startswith("jax.core."))
_NARROW = {
    b"shuffle": re.compile(rb"(?:rand|jr|rng)\w*\.shuffle\b|import\b[^\n]*\bshuffle\b"),
    b"*DeviceArray": re.compile(rb"(?:\.|Sharded)DeviceArray|(?<!\w)DeviceArray(?!\()"),  # no repr
    b"*KeyArray": re.compile(rb"(?<!\w)KeyArray|(?:[.,(]\s*|import[\s\\]+|\n[ \t]+)PRNGKeyArray"),
    b"interpreters import": re.compile(
        rb"interpreters import(?<!_src.interpreters import)"
        rb"\s*(?:\([^)]*?|(?:[^\n\\(]|\\\n)*?)\bp?xla\b"
    ),
}
_TRIGGERS = (*(each.encode() for each in (*_WORDS.split(), *_IMPORTS)), *_OF_CORE)


@rule(_NAME, triggers=_TRIGGERS, narrow=_NARROW)
def _removed_name(module: Module) -> Iterator[Found]:
    for found in _renames.renamed(module, NAMES):
        yield _sketched(module, found)
    yield from _buffers(module)
    yield from _bounds(module)


_UPDATES = {
    "jax.ops.index_update": "set",
    "jax.ops.index_add": "add",
    "jax.ops.index_mul": "multiply",
    "jax.ops.index_min": "min",
    "jax.ops.index_max": "max",
}
_BUFFERS = {
    "device_buffer": "{}.addressable_data(0)",
    "device_buffers": "[shard.data for shard in {}.addressable_shards]",
}
_SIMPLE = ast.Name | ast.Attribute | ast.Call | ast.Subscript


def _sketched(module: Module, found: Found) -> Found:
    """The finding of `jax.ops.index_update` and its like with `x.at[index].set(y)` as its fix."""
    call = module.call_of(found.node)
    if found.fix is not None or call is None or len(call.args) != 3 or call.keywords:
        return found
    method = _UPDATES.get(module.qualified_name(found.node) or "")
    if method is None:
        return found
    array, index, value = call.args
    if isinstance(index, ast.Subscript) and module.qualified_name(index.value) == "jax.ops.index":
        index = index.slice  # `jax.ops.index[a, b]` was a way to write `a, b` with slices
    text = module.text(array) if isinstance(array, _SIMPLE) else f"({module.text(array)})"
    text += f".at[{module.text(index)}].{method}({module.text(value)})"
    fix = Fix(f"use .at[...].{method}", Safety.DISPLAY, (Edit(*module.span(call), text),))
    return dataclasses.replace(found, fix=fix)


def _buffers(module: Module) -> Iterator[Found]:
    """`.device_buffer` and `.device_buffers`, which no other library's arrays have."""
    for node in module.nodes(ast.Attribute):
        if node.attr in _BUFFERS:
            text = _BUFFERS[node.attr].format(module.text(node.value))
            fix = Fix(f"use {text}", Safety.DISPLAY, (Edit(*module.span(node), text),))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}", fix)


_BOUNDS = {"a_min": "min", "a_max": "max"}


def _bounds(module: Module) -> Iterator[Found]:
    """`jax.numpy.clip(x, a_min=0)`."""
    for call in module.calls("jax.numpy.clip"):
        for keyword in call.keywords:
            new = _BOUNDS.get(keyword.arg or "")
            if new is not None and not _renames.is_guarded(module, keyword):
                start = module.span(keyword)[0]
                edit = Edit(start, start + len("a_min"), new)
                said = f"jax.numpy.clip has no {keyword.arg} any more: it is {new}"
                yield Found(keyword, said, Fix(f"use {new}", Safety.SAFE, (edit,)), (0, 4, 27))
