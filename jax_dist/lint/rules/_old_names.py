"""The names that left jax or moved: a table for each of JXD101 to JXD103 and JXD105 to JXD108.

The versions are those of jax's change log; what is called gone was looked up on jax 0.10.2, and
what is called new on jax 0.10.2 and 0.12.0.1.
"""

from collections.abc import Iterator
from typing import Any

from jax_dist.lint.rules._renames import Rename


def _family(old: str, new: str, names: str, gone: str = "", **common: Any) -> Iterator[Rename]:
    """Yield `old.name`, which is `new.name` now, for each of the names; `a:b` is `b` now."""
    for name in names.split():
        before, _, after = name.partition(":")
        yield Rename(f"{old}.{before}", f"{new}.{after or before}", gone, **common)


def _hints(old: str, names: str, gone: str, hint: str) -> Iterator[Rename]:
    """Yield `old.name` for each of the names, which has no successor."""
    yield from (Rename(f"{old}.{name}", "", gone, hint) for name in names.split())


def _trees() -> Iterator[Rename]:
    new: dict[str, Any] = {"needs": (0, 4, 25)}
    removed = ("map", "leaves", "flatten", "unflatten", "structure", "transpose")
    for name in (*removed, "reduce", "all"):
        gone = "0.6.0" if name in removed else ""
        home = f"jax.tree_util.tree_{name}"
        yield Rename(f"jax.tree_{name}", f"jax.tree.{name}", gone, imported=home, **new)
    new["imported"] = "jax.tree_util.tree_map"
    yield from _family("jax", "jax.tree", "tree_multimap:map", "0.3.16", **new)
    yield from _family("jax.tree_util", "jax.tree", "tree_multimap:map", "0.3.16", **new)


_ARRAY: dict[str, Any] = {"new": "jax.Array", "is_type": True}
_SPEC = "PartitionSpec"
_INTERNAL = "it was internal; jax.extend.core and jax.typeof have what is public"
_BACKEND = "jax.extend.backend and jax have what is public"
_AT = "use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)"
_CALLBACKS = "use jax.pure_callback, jax.experimental.io_callback or jax.debug.callback"
_EXTEND: dict[str, Any] = {"needs": (0, 4, 36)}

NAMES: tuple[Rename, ...] = (
    *_trees(),
    Rename("jax.host_id", "jax.process_index", deprecated="0.2.13"),
    Rename("jax.host_count", "jax.process_count", deprecated="0.2.13"),
    # Types of arrays and keys.
    Rename("jax.numpy.DeviceArray", gone="0.4.14", **_ARRAY),
    Rename("jax.interpreters.pxla.ShardedDeviceArray", gone="0.4.14", **_ARRAY),
    Rename("jax.random.KeyArray", gone="0.4.24", **_ARRAY),
    Rename("jax.random.PRNGKeyArray", gone="0.4.24", **_ARRAY),
    # Meshes and specs at their old places.
    *_family("jax.experimental", "jax.sharding", _SPEC, "0.4.11"),
    *_family("jax.experimental.pjit", "jax.sharding", f"{_SPEC} NamedSharding", "0.4.11"),
    *_family("jax.interpreters.pxla", "jax.sharding", f"{_SPEC} Mesh", "0.4.11"),
    *_family("jax.experimental.maps", "jax.sharding", "Mesh", "0.4.11"),
    Rename("jax.sharding.use_mesh", "", "0.7.1", "use with jax.set_mesh(mesh)"),
    # Modules that moved whole.
    Rename("jax.api", "jax", "0.2.21"),
    Rename("jax.config.config", "jax.config", "0.4.25"),
    Rename("jax.config.FLAGS", "jax.config"),
    Rename("jax.linear_util", "jax.extend.linear_util", "0.4.24", needs=(0, 4, 16)),
    *_family("jax.experimental", "jax.example_libraries", "optimizers stax", "0.3.16"),
    # jax.core and jax.lib.
    *_family(
        "jax.core", "jax.extend.core", "ClosedJaxpr Jaxpr JaxprEqn Literal", "0.6.0", **_EXTEND
    ),
    *_family("jax.core", "jax.extend.core", "Primitive Token Var jaxpr_as_fun", "0.6.0", **_EXTEND),
    *_hints("jax.core", "axis_frame", "0.7.0", _INTERNAL),
    *_hints("jax.core", "get_aval", "", _INTERNAL),
    Rename("jax.abstract_arrays.ShapedArray", "jax.core.ShapedArray", "0.4.17"),
    *_family("jax.lib.xla_bridge", "jax.extend.backend", "get_backend", "0.8.0", needs=(0, 4, 32)),
    *_family(
        "jax.lib.xla_bridge",
        "jax",
        "device_count local_device_count process_index process_count devices local_devices "
        "default_backend host_id:process_index host_count:process_count",
        "0.8.0",
    ),
    Rename("jax.lib.xla_client.Device", "jax.Device", "0.5.0", needs=(0, 4, 11)),
    Rename("jax.lib.xla_extension.Device", "jax.Device", "0.8.0", needs=(0, 4, 11)),
    *(
        Rename(f"jax.lib.{module}.XlaRuntimeError", "jax.errors.JaxRuntimeError", "0.6.0")
        for module in ("xla_client", "xla_extension")
    ),
    *_hints("jax.lib", "xla_bridge xla_client xla_extension", "0.8.0", _BACKEND),
    # Functions.
    *_family("jax.numpy", "jax.numpy", "row_stack:vstack in1d:isin", "0.4.24"),
    *_family("jax.numpy", "jax.numpy", "round_:round", "0.4.38"),
    Rename("jax.numpy.trapz", "jax.scipy.integrate.trapezoid", "0.4.24", needs=(0, 4, 16)),
    Rename("jax.nn.normalize", "jax.nn.standardize", "0.4.29", needs=(0, 4, 28)),
    Rename("jax.random.shuffle", "", hint="use jax.random.permutation(key, x, independent=True)"),
    *_hints("jax.ops", "index_update index_add index_mul", "0.3.2", _AT),
    *_hints("jax.ops", "index_min index_max index", "0.3.2", _AT),
    Rename("jax.xla_computation", "", "0.4.34", "use jax.jit(f).lower(...).compiler_ir('hlo')"),
    *_family("jax", "jax.extend.backend", "clear_backends", "0.4.36", needs=(0, 4, 26)),
    Rename("jax.experimental.enable_x64", "jax.enable_x64", needs=(0, 8, 0)),
    # Modules that are gone, and what was internal.
    Rename("flax.optim", "", "flax 0.6.0", "use optax, which does not hold the parameters"),
    Rename("jax.experimental.export", "", "0.4.36", "use jax.export, whose calls differ"),
    Rename("jax.experimental.host_callback", "", "0.8.0", _CALLBACKS),
    Rename("jax.experimental.maps", "", "0.4.31", "use jax.shard_map in the place of xmap"),
    Rename("jax.abstract_arrays", "", "0.4.17", "use jax.core.ShapedArray"),
    Rename("jax.util", "", "0.8.0", "it was internal"),
    Rename("jax.interpreters.pxla.xla_pmap_p", "", "0.10.0", "pmap is jit(shard_map)"),
    Rename("jax.extend.core.primitives.xla_pmap_p", "", "0.10.0", "pmap is jit(shard_map)"),
    Rename(
        "jax.interpreters.pxla.thread_resources",
        "",
        hint="use jax.sharding.get_abstract_mesh(), and jax.set_mesh(mesh) in the place of mesh",
        deprecated="0.8.2",
    ),
)

_NAMED = "use jax.sharding.NamedSharding(mesh, spec)"
SHARDINGS: tuple[Rename, ...] = (
    Rename("jax.sharding.XLACompatibleSharding", "jax.sharding.Sharding", "0.4.34"),
    *_hints("jax.sharding", "PmapSharding", "0.10.0", "pmap's results have a NamedSharding now"),
    *_hints("jax.sharding", "PositionalSharding", "0.7.1", _NAMED),
)

_PLACE = "use jax.device_put with a NamedSharding, or jax-dist migrate"
PLACEMENTS: tuple[Rename, ...] = (
    Rename("jax.device_put_replicated", "", "0.10.0", _PLACE),
    Rename("jax.device_put_sharded", "", "0.10.0", _PLACE),
)

OLD_SHARD_MAP: tuple[Rename, ...] = (
    Rename("jax.experimental.shard_map.shard_map", "jax.shard_map", deprecated="0.8.0"),
)
_PCAST = "use jax.lax.pcast(x, axis, to='varying')"
PVARY: tuple[Rename, ...] = (
    Rename("jax.lax.pvary", "jax.lax.pcast", "0.10.0", _PCAST, needs=(0, 8, 2)),
)

_CONSTRAINT = "with_sharding_constraint"
OF_PJIT: tuple[Rename, ...] = (
    Rename("jax.experimental.pjit.pjit", "jax.jit", deprecated="0.8.0", needs=(0, 4, 14)),
    *_family("jax.experimental.pjit", "jax.lax", _CONSTRAINT, needs=(0, 4, 7)),
)
