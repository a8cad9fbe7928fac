"""JXD101, JXD102, JXD103, JXD108: names that left jax, or moved.

The versions are those of jax's change log; what is called gone was looked up on jax 0.10.2, and
what is called new on jax 0.7.2, 0.10.2 and 0.12.0.1.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator

from jax_dist.checker.model import semantic_model
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _renames, rule
from jax_dist.checker.rules._renames import Rename


def _family(old: str, new: str, names: str, gone: str = "", **common: object) -> Iterator[Rename]:
    for name in names.split():
        before, _, after = name.partition(":")
        yield Rename(f"{old}.{before}", f"{new}.{after or before}", gone, **common)  # type: ignore[arg-type]


def _hints(old: str, names: str, gone: str, hint: str) -> Iterator[Rename]:
    yield from (Rename(f"{old}.{name}", "", gone, hint) for name in names.split())


def _trees() -> Iterator[Rename]:
    names = "map leaves flatten unflatten structure transpose"
    for name in (*names.split(), "reduce", "all"):
        old = f"tree_{name}"
        gone = "0.6.0" if name in names else ""
        imported = f"jax.tree_util.{old}"
        yield Rename(f"jax.{old}", f"jax.tree.{name}", gone, "", (0, 4, 25), imported)
    yield Rename("jax.treedef_is_leaf", "jax.tree_util.treedef_is_leaf", "0.6.0")
    for module in ("jax", "jax.tree_util"):
        old = f"{module}.tree_multimap"
        yield Rename(old, "jax.tree.map", "0.3.16", "", (0, 4, 25), "jax.tree_util.tree_map")


_CORE = "ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var jaxpr_as_fun"

_INTERNAL = "it was internal; jax.extend.core and jax.typeof have what is public"

NAMES: tuple[Rename, ...] = (
    *_trees(),
    Rename("jax.host_id", "jax.process_index", "", deprecated="0.2.13"),
    Rename("jax.host_count", "jax.process_count", "", deprecated="0.2.13"),
    Rename("jax.host_ids", "jax.process_indices", "", deprecated="0.2.13", needs=(0, 4, 32)),
    Rename("jax.partial", "functools.partial", "0.2.21"),
    Rename("jax.lax.partial", "functools.partial", "0.2.21"),
    # Types of arrays and keys.
    Rename("jax.numpy.DeviceArray", "jax.Array", "0.4.14", safe="annotation"),
    Rename("jax.interpreters.xla.DeviceArray", "jax.Array", "0.4.11", safe="annotation"),
    Rename("jax.interpreters.xla.Buffer", "jax.Array", "0.4.11", safe="annotation"),
    Rename("jax.interpreters.xla.Device", "jax.Device", "0.4.11", needs=(0, 4, 11)),
    Rename("jax.interpreters.pxla.ShardedDeviceArray", "jax.Array", "0.4.14", safe="annotation"),
    Rename("jax.random.KeyArray", "jax.Array", "0.4.24", safe="annotation"),
    Rename("jax.random.PRNGKeyArray", "jax.Array", "0.4.24", safe="annotation"),
    # Meshes and specs at their old places.
    Rename("jax.experimental.PartitionSpec", "jax.sharding.PartitionSpec", "0.4.11"),
    Rename("jax.experimental.pjit.PartitionSpec", "jax.sharding.PartitionSpec", "0.4.11"),
    Rename("jax.interpreters.pxla.PartitionSpec", "jax.sharding.PartitionSpec", "0.4.11"),
    Rename("jax.experimental.pjit.NamedSharding", "jax.sharding.NamedSharding", "0.4.11"),
    Rename("jax.experimental.maps.Mesh", "jax.sharding.Mesh", "0.4.11"),
    Rename("jax.interpreters.pxla.Mesh", "jax.sharding.Mesh", "0.4.11"),
    Rename("jax.sharding.use_mesh", "jax.set_mesh", "0.7.1", needs=(0, 7, 1), safe="with"),
    # Modules that moved whole.
    Rename("jax.config.config", "jax.config", "0.4.25"),
    Rename("jax.linear_util", "jax.extend.linear_util", "0.4.24", needs=(0, 4, 16), is_module=True),
    *(
        Rename(
            f"jax.experimental.{name}", f"jax.example_libraries.{name}", "0.3.16", is_module=True
        )
        for name in ("optimizers", "stax")
    ),
    Rename("jax.experimental.export", "", "0.4.36", "use jax.export, whose calls differ"),
    # jax.core and jax.lib.
    *_family("jax.core", "jax.extend.core", _CORE, "0.6.0", needs=(0, 4, 36)),
    *_hints("jax.core", "axis_frame AxisName call_p", "0.7.0", _INTERNAL),
    *_hints("jax.core", "raise_to_shaped full_lower", "0.6.0", _INTERNAL),
    *_hints(
        "jax.core",
        "NamedShape ConcreteArray unit get_aval extend_axis_env cur_sublevel thread_local_state "
        "subst_axis_names",
        "",
        _INTERNAL,
    ),
    Rename("jax.abstract_arrays.ShapedArray", "jax.core.ShapedArray", "0.4.17"),
    Rename(
        "jax.lib.xla_bridge.get_backend",
        "jax.extend.backend.get_backend",
        "0.8.0",
        needs=(0, 4, 32),
    ),
    *_family(
        "jax.lib.xla_bridge",
        "jax",
        "device_count local_device_count process_index process_count devices local_devices "
        "default_backend host_id:process_index host_count:process_count",
        "0.8.0",
    ),
    Rename("jax.lib.xla_client.Device", "jax.Device", "0.5.0", needs=(0, 4, 11)),
    Rename("jax.lib.xla_extension.Device", "jax.Device", "0.8.0", needs=(0, 4, 11)),
    Rename("jax.lib.xla_extension.ArrayImpl", "jax.Array", "0.6.0", safe="annotation"),
    *(
        Rename(
            f"jax.lib.{name}.XlaRuntimeError",
            "jax.errors.JaxRuntimeError",
            "0.6.0",
            needs=(0, 4, 34),
        )
        for name in ("xla_client", "xla_extension")
    ),
    *_hints(
        "jax.lib",
        "xla_bridge xla_client xla_extension",
        "0.8.0",
        "jax.extend.backend and jax have what is public",
    ),
    # jax.numpy.
    *_family("jax.numpy", "jax.numpy", "product:prod cumproduct:cumprod sometrue:any alltrue:all"),
    *_family("jax.numpy", "jax.numpy", "row_stack:vstack in1d:isin", "0.4.24"),
    Rename("jax.numpy.round_", "jax.numpy.round", "0.4.38"),
    Rename("jax.numpy.trapz", "jax.scipy.integrate.trapezoid", "0.4.24", needs=(0, 4, 16)),
    # Functions without a namesake.
    *_hints(
        "jax.ops",
        "index_update index_add index_mul index_min index_max index",
        "0.3.2",
        "use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)",
    ),
    Rename("jax.xla_computation", "", "0.4.34", "use jax.jit(f).lower(...).compiler_ir('hlo')"),
    Rename(
        "jax.clear_backends",
        "jax.extend.backend.clear_backends",
        "0.4.36",
        needs=(0, 4, 26),
    ),
    Rename("jax.experimental.enable_x64", "jax.enable_x64", needs=(0, 8, 0), safe="with"),
    Rename("jax.experimental.disable_x64", "", hint="use jax.enable_x64(False)"),
    Rename("jax.soft_pmap", "", "0.3.18", "use jax_dist.pmap(virtual=True)"),
    Rename("jax.lax.tie_in", "", "0.4.29", "use its second argument"),
    # Modules that are gone.
    Rename(
        "jax.experimental.host_callback",
        "",
        "0.8.0",
        "use jax.pure_callback, jax.experimental.io_callback or jax.debug.callback",
    ),
    Rename("jax.experimental.maps", "", "0.4.31", "use jax.shard_map in the place of xmap"),
    Rename("jax.experimental.global_device_array", "", hint="use jax.Array"),
    Rename("jax.interpreters.sharded_jit", "", hint="use jax.jit with in_shardings"),
    Rename("jax.abstract_arrays", "", "0.4.17", "use jax.core.ShapedArray"),
    Rename("jax.api", "jax", "0.2.21"),
    Rename("jax.util", "", "0.8.0", "it was internal"),
    *_hints(
        "jax.interpreters.pxla",
        "xla_pmap_p xla_pmap_impl MapTracer PmapExecutable parallel_callable shard_args",
        "0.10.0",
        "it was internal",
    ),
    Rename("jax.interpreters.pxla.device_put", "jax.device_put", "0.4.14"),
    Rename(
        "jax.interpreters.pxla.thread_resources",
        "",
        hint="use jax.sharding.get_abstract_mesh(), and jax.set_mesh(mesh) in the place of mesh",
        deprecated="0.8.2",
    ),
    *_hints(
        "jax.interpreters.xla",
        "xb xc xe xla_call xla_call_p backend_specific_translations translations "
        "pytype_aval_mappings abstractify register_translation",
        "",
        "it was internal; jax.interpreters.mlir registers lowerings",
    ),
)

SHARDINGS: tuple[Rename, ...] = (
    Rename("jax.sharding.MeshPspecSharding", "jax.sharding.NamedSharding"),
    Rename("jax.sharding.XLACompatibleSharding", "jax.sharding.Sharding", "0.4.34"),
    *_hints(
        "jax.sharding",
        "PmapSharding",
        "0.10.0",
        "pmap's results carry a jax.sharding.NamedSharding now",
    ),
    *_hints(
        "jax.sharding",
        "PositionalSharding",
        "0.7.1",
        "use jax.sharding.NamedSharding(mesh, spec), with a mesh of the devices",
    ),
    *_hints(
        "jax.sharding",
        "GSPMDSharding OpShardingSharding",
        "",
        "use jax.sharding.NamedSharding(mesh, spec)",
    ),
)

PLACEMENTS: tuple[Rename, ...] = (
    Rename("jax.device_put_replicated", "jax_dist.device_put_replicated", "0.10.0"),
    Rename("jax.device_put_sharded", "jax_dist.device_put_sharded", "0.10.0"),
)


_REPLICATED = Page(
    code="JXD101",
    name="removed-device-put-replicated",
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
_OF_CORE = tuple(entry.old.encode() for entry in NAMES if entry.old.startswith("jax.core."))
_NARROW = {
    b"*DeviceArray": re.compile(rb"(?:\.|Sharded)DeviceArray|(?<!\w)DeviceArray(?!\()"),  # no repr
    b"*KeyArray": re.compile(rb"(?<!\w)KeyArray|(?:[.,(]\s*|import[\s\\]+|\n[ \t]+)PRNGKeyArray"),
    b"interpreters import": re.compile(
        rb"interpreters import(?<!_src.interpreters import)"
        rb"\s*(?:\([^)]*?|(?:[^\n\\(]|\\\n)*?)\bp?xla\b"
    ),
}
_TRIGGERS = (*_WORDS.strip().split(b"\n"), b"\n    tree_map", *_OF_CORE)


@rule(_NAME, triggers=_TRIGGERS, narrow=_NARROW)
def _removed_name(module: Module) -> Iterator[Found]:
    for found in _renames.renamed(module, NAMES):
        yield _sketched(module, found)
    yield from _buffers(module)


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
    for node in semantic_model.of_kind(module, ast.Attribute, re.compile(rb"\.device_buffer")):
        if node.attr in _BUFFERS:
            text = _BUFFERS[node.attr].format(module.text(node.value))
            fix = Fix(f"use {text}", Safety.DISPLAY, (Edit(*module.span(node), text),))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}", fix)
