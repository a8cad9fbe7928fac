"""JXD108: names that left jax, or moved."""

import re
from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import (
    Found,
    Page,
    _rename_edits,
    _renames,
    rule,
)

PAGE = Page(
    code="JXD108",
    name="removed-name",
    what="Finds imports and uses of names and modules that jax has removed or renamed: "
    "`jax.tree_map` and its family, `jax.host_id`, `jax.lib.xla_bridge`, "
    "`jax.experimental.host_callback`, `jax.core.Primitive`, `jax.random.KeyArray` and "
    "others.",
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

# One a line. Not "jax.core" itself, nor other words that many files hold: what a rule wants is
# parsed.
_WORDS = b"""
jax.tree_map
jax.tree_leaves
jax.tree_flatten
jax.tree_unflatten
jax.tree_structure
jax.tree_transpose
jax.tree_reduce
jax.tree_all
jax.treedef_is_leaf
jax import tree_map
jax import tree_leaves
jax import tree_flatten
jax import tree_unflatten
jax import tree_structure
jax import tree_transpose
jax import tree_reduce
jax import tree_all
jax import treedef_is_leaf
, tree_map
tree_multimap
host_id(
host_ids
host_count
import host_id
jax.host_id
jax.partial
jax import partial
lax.partial
lax import partial
*DeviceArray
*KeyArray
.device_buffer*
experimental.PartitionSpec
experimental import PartitionSpec
experimental.pjit
import pjit as
pjit.PartitionSpec
pjit.NamedSharding
experimental.maps
experimental import maps
experimental.optimizers
experimental import optimizers
experimental.stax
experimental import stax
experimental.export
experimental import export
experimental.enable_x64
experimental import enable_x64
experimental.disable_x64
experimental import disable_x64
experimental.host_callback
experimental import host_callback
interpreters.xla
interpreters.pxla
interpreters import
sharded_jit
use_mesh
jax.config import
import jax.config
jax.linear_util
jax import linear_util
jax.core import
jax import core
abstract_arrays
jax.lib.xla*
jax.lib import
jax import lib
jnp.product
numpy.product
numpy import product
cumproduct
sometrue
alltrue
row_stack
in1d
round_
trapz
ops.index*
jax.ops import
xla_computation
clear_backends
soft_pmap
tie_in
global_device_array
jax.api
jax import api
jax.util
jax import util
jax.config.config
config.config
jax import config as
jax import experimental as
jax import lax as
jax import ops as
import jax as
, jax as
"""
_CORE = tuple(entry.old.encode() for entry in _renames.NAMES if entry.old.startswith("jax.core."))
_NARROW = {
    b"*DeviceArray": re.compile(rb"(?:\.|Sharded)DeviceArray|(?<!\w)DeviceArray(?!\()"),  # no repr
    b"*KeyArray": re.compile(rb"(?<!\w)KeyArray|(?:[.,(]\s*|import[\s\\]+|\n[ \t]+)PRNGKeyArray"),
    b"interpreters import": re.compile(
        rb"interpreters import(?<!_src.interpreters import)"
        rb"\s*(?:\([^)]*?|(?:[^\n\\(]|\\\n)*?)\bp?xla\b"
    ),
}
_TRIGGERS = (*_WORDS.strip().split(b"\n"), b"\n    tree_map", *_CORE)


@rule(PAGE, triggers=_TRIGGERS, narrow=_NARROW)
def check(module: Module) -> Iterator[Found]:
    for found in _rename_edits.renamed(module, _renames.NAMES):
        yield _rename_edits.sketched(module, found)
    yield from _rename_edits.buffers(module)
