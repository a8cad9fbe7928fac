"""The names that left jax or moved: a table for each of JXD101 to JXD103 and JXD108.

The versions are those of jax's change log; what is called gone was looked up on jax 0.10.2, and
what is called new on jax 0.7.2, 0.10.2 and 0.12.0.1.
"""

from collections.abc import Iterator
from typing import Any

from jax_dist.lint.rules._renames import Rename


def _family(old: str, new: str, names: str, gone: str = "", **common: Any) -> Iterator[Rename]:
    for name in names.split():
        before, _, after = name.partition(":")
        yield Rename(f"{old}.{before}", f"{new}.{after or before}", gone, **common)


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
    Rename("jax.nn.normalize", "jax.nn.standardize", "0.4.29", needs=(0, 4, 28)),
    Rename("jax.config.FLAGS", "jax.config"),
    # Functions without a namesake.
    Rename(
        "jax.random.shuffle", "", hint="use jax.random.permutation(key, x, axis, independent=True)"
    ),
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
    Rename("jax.soft_pmap", "", "0.3.18", "use jax.vmap(f, axis_name=...)"),
    Rename("jax.lax.tie_in", "", "0.4.29", "use its second argument"),
    # Modules that are gone.
    Rename("flax.optim", "", "flax 0.6.0", "use optax, which does not hold the parameters"),
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
    *_hints("jax.extend.core.primitives", "xla_pmap_p", "0.10.0", "pmap is jit(shard_map)"),
    *_hints("jax.experimental.shard_map", "pmap", "", "use jax.pmap, or jax.shard_map"),
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

_PLACE = "use jax.device_put with a NamedSharding, or jax-dist migrate"
PLACEMENTS: tuple[Rename, ...] = (
    Rename("jax.device_put_replicated", "", "0.10.0", _PLACE),
    Rename("jax.device_put_sharded", "", "0.10.0", _PLACE),
)
