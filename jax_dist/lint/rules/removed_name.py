"""JXD108: other names that left jax, or moved."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, _renames, rule
from jax_dist.lint.rules._old_names import NAMES

# Not "jax.core" itself, nor other words that many files hold: what a rule wants is parsed.
_WORDS = """
*DeviceArray *KeyArray .device_buffer* a_max= a_min= abstract_arrays alltrue clear_backends
config.FLAGS config.config cumproduct experimental.pjit global_device_array host_count host_id(
host_ids in1d interpreters.pxla interpreters.xla jax.config.config jax.lib.xla* jnp.product
ops.index* pjit.NamedSharding pjit.PartitionSpec round_ row_stack sharded_jit shuffle soft_pmap
sometrue tie_in trapz tree_multimap use_mesh xla_computation xla_pmap_p
"""


_IMPORTED = {  # with what they are imported from: "jax.tree_map", "jax import tree_map"
    "jax": "api host_id linear_util partial tree_all tree_flatten tree_leaves tree_map tree_reduce "
    "tree_structure tree_transpose tree_unflatten treedef_is_leaf util",
    "shard_map": "pmap",
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
    *("import jax as", ", jax as", "import jax.config", "import pjit as", "import shard_map as"),
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


@rule(
    "JXD108",
    "removed-name",
    what="Names and modules that jax has removed or renamed: `jax.tree_map`, "
    "`jax.lib.xla_bridge`, `jax.experimental.host_callback`, `jax.core.Primitive`, "
    "`jax.random.KeyArray`, `xla_pmap_p` and others; `a_min` and `a_max` of "
    "`jax.numpy.clip`; `flax.optim`.",
    why="An AttributeError or ImportError; the message names the version. The fix is unsafe"
    " for array types outside annotations, since `isinstance(x, jax.Array)` is true of "
    "more than before.",
    instead="y = jax.tree.map(lambda x: 2 * x, {'w': 1.0})",
    fix="safe",
    triggers=_TRIGGERS,
    narrow=_NARROW,
)
def removed_name(module: Module) -> Iterator[Found]:
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
    """Return the finding of `jax.ops.index_update` with `x.at[index].set(y)` as its fix."""
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
    """Yield `.device_buffer` and `.device_buffers`, which no other library's arrays have."""
    for node in module.nodes(ast.Attribute):
        if node.attr in _BUFFERS:
            text = _BUFFERS[node.attr].format(module.text(node.value))
            fix = Fix(f"use {text}", Safety.DISPLAY, (Edit(*module.span(node), text),))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}", fix)


_BOUNDS = {"a_min": "min", "a_max": "max"}


def _bounds(module: Module) -> Iterator[Found]:
    """Yield `jax.numpy.clip(x, a_min=0)`."""
    for call in module.calls("jax.numpy.clip"):
        for keyword in call.keywords:
            new = _BOUNDS.get(keyword.arg or "")
            if new is not None and not _renames.is_guarded(module, keyword):
                start = module.span(keyword)[0]
                edit = Edit(start, start + len("a_min"), new)
                said = f"jax.numpy.clip has no {keyword.arg} any more: it is {new}"
                yield Found(keyword, said, Fix(f"use {new}", Safety.SAFE, (edit,)), (0, 4, 27))
