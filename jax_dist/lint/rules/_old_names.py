"""The names that left jax or moved, for JXD108; a migration's runs read them too.

The versions are those of jax's change log; what is called gone was looked up on jax 0.10.2, and
what is called new on jax 0.10.2 and 0.12.0.1.
"""

from jax_dist.lint.rules._renames import Rename

# The old name, the new one, the jax that removed the old one ("-": not known), and the first jax
# with the new one, where that may be newer than what a project requires. A module stands for all
# in it that has no row of its own.
_RENAMED = """
jax.tree_map jax.tree.map 0.6.0 0.4.25
jax.tree_leaves jax.tree.leaves 0.6.0 0.4.25
jax.tree_flatten jax.tree.flatten 0.6.0 0.4.25
jax.tree_unflatten jax.tree.unflatten 0.6.0 0.4.25
jax.tree_structure jax.tree.structure 0.6.0 0.4.25
jax.tree_transpose jax.tree.transpose 0.6.0 0.4.25
jax.tree_reduce jax.tree.reduce - 0.4.25
jax.tree_all jax.tree.all - 0.4.25
jax.tree_multimap jax.tree.map 0.3.16 0.4.25
jax.tree_util.tree_multimap jax.tree.map 0.3.16 0.4.25
jax.numpy.DeviceArray jax.Array 0.4.14
jax.interpreters.pxla.ShardedDeviceArray jax.Array 0.4.14
jax.random.KeyArray jax.Array 0.4.24
jax.random.PRNGKeyArray jax.Array 0.4.24
jax.experimental.PartitionSpec jax.sharding.PartitionSpec 0.4.11
jax.experimental.pjit.PartitionSpec jax.sharding.PartitionSpec 0.4.11
jax.experimental.pjit.NamedSharding jax.sharding.NamedSharding 0.4.11
jax.interpreters.pxla.PartitionSpec jax.sharding.PartitionSpec 0.4.11
jax.interpreters.pxla.Mesh jax.sharding.Mesh 0.4.11
jax.experimental.maps.Mesh jax.sharding.Mesh 0.4.11
jax.sharding.XLACompatibleSharding jax.sharding.Sharding 0.4.34
jax.api jax 0.2.21
jax.config.config jax.config 0.4.25
jax.config.FLAGS jax.config -
jax.linear_util jax.extend.linear_util 0.4.24 0.4.16
jax.experimental.optimizers jax.example_libraries.optimizers 0.3.16
jax.experimental.stax jax.example_libraries.stax 0.3.16
jax.core.ClosedJaxpr jax.extend.core.ClosedJaxpr 0.6.0 0.4.36
jax.core.Jaxpr jax.extend.core.Jaxpr 0.6.0 0.4.36
jax.core.JaxprEqn jax.extend.core.JaxprEqn 0.6.0 0.4.36
jax.core.Literal jax.extend.core.Literal 0.6.0 0.4.36
jax.core.Primitive jax.extend.core.Primitive 0.6.0 0.4.36
jax.core.Token jax.extend.core.Token 0.6.0 0.4.36
jax.core.Var jax.extend.core.Var 0.6.0 0.4.36
jax.core.jaxpr_as_fun jax.extend.core.jaxpr_as_fun 0.6.0 0.4.36
jax.abstract_arrays.ShapedArray jax.core.ShapedArray 0.4.17
jax.lib.xla_bridge.get_backend jax.extend.backend.get_backend 0.8.0 0.4.32
jax.lib.xla_bridge.device_count jax.device_count 0.8.0
jax.lib.xla_bridge.local_device_count jax.local_device_count 0.8.0
jax.lib.xla_bridge.process_index jax.process_index 0.8.0
jax.lib.xla_bridge.process_count jax.process_count 0.8.0
jax.lib.xla_bridge.devices jax.devices 0.8.0
jax.lib.xla_bridge.local_devices jax.local_devices 0.8.0
jax.lib.xla_bridge.default_backend jax.default_backend 0.8.0
jax.lib.xla_bridge.host_id jax.process_index 0.8.0
jax.lib.xla_bridge.host_count jax.process_count 0.8.0
jax.lib.xla_client.Device jax.Device 0.5.0 0.4.11
jax.lib.xla_extension.Device jax.Device 0.8.0 0.4.11
jax.lib.xla_client.XlaRuntimeError jax.errors.JaxRuntimeError 0.6.0
jax.lib.xla_extension.XlaRuntimeError jax.errors.JaxRuntimeError 0.6.0
jax.numpy.row_stack jax.numpy.vstack 0.4.24
jax.numpy.in1d jax.numpy.isin 0.4.24
jax.numpy.round_ jax.numpy.round 0.4.38
jax.numpy.trapz jax.scipy.integrate.trapezoid 0.4.24 0.4.16
jax.nn.normalize jax.nn.standardize 0.4.29 0.4.28
jax.clear_backends jax.extend.backend.clear_backends 0.4.36 0.4.26
jax.experimental.enable_x64 jax.enable_x64 - 0.8.0
"""

# The old name, what removed it, and what to do in the place of a new name.
_WITHOUT_SUCCESSOR = """
jax.sharding.use_mesh 0.7.1 use with jax.set_mesh(mesh)
jax.sharding.PmapSharding 0.10.0 pmap's results have a NamedSharding now
jax.sharding.PositionalSharding 0.7.1 use jax.sharding.NamedSharding(mesh, spec)
jax.lax.pvary 0.10.0 use jax.lax.pcast(x, axis, to='varying')
jax.core.axis_frame 0.7.0 it was internal; jax.extend.core and jax.typeof have what is public
jax.core.get_aval - it was internal; jax.extend.core and jax.typeof have what is public
jax.lib.xla_bridge 0.8.0 jax.extend.backend and jax have what is public
jax.lib.xla_client 0.8.0 jax.extend.backend and jax have what is public
jax.lib.xla_extension 0.8.0 jax.extend.backend and jax have what is public
jax.random.shuffle - use jax.random.permutation(key, x, independent=True)
jax.ops.index_update 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.ops.index_add 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.ops.index_mul 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.ops.index_min 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.ops.index_max 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.ops.index 0.3.2 use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)
jax.xla_computation 0.4.34 use jax.jit(f).lower(...).compiler_ir('hlo')
jax.experimental.export 0.4.36 use jax.export, whose calls differ
jax.experimental.maps 0.4.31 use jax.shard_map in the place of xmap
jax.abstract_arrays 0.4.17 use jax.core.ShapedArray
jax.util 0.8.0 it was internal
jax.interpreters.pxla.xla_pmap_p 0.10.0 pmap is jit(shard_map)
jax.extend.core.primitives.xla_pmap_p 0.10.0 pmap is jit(shard_map)
"""

_CALLBACKS = "use jax.pure_callback, jax.experimental.io_callback or jax.debug.callback"
_MESH = "use jax.sharding.get_abstract_mesh(), and jax.set_mesh(mesh) in the place of mesh"


def _renamed(row: str) -> Rename:
    old, new, gone, needs = (*row.split(), "0")[:4]
    return Rename(old, new, gone.strip("-"), needs=tuple(map(int, needs.split("."))))


def _without_successor(row: str) -> Rename:
    old, gone, hint = row.split(maxsplit=2)
    return Rename(old, "", gone.strip("-"), hint)


NAMES: tuple[Rename, ...] = (
    *map(_renamed, _RENAMED.strip().splitlines()),
    *map(_without_successor, _WITHOUT_SUCCESSOR.strip().splitlines()),
    Rename("flax.optim", "", "flax 0.6.0", "use optax, which does not hold the parameters"),
    Rename("jax.host_id", "jax.process_index", deprecated="0.2.13"),
    Rename("jax.host_count", "jax.process_count", deprecated="0.2.13"),
    Rename("jax.experimental.host_callback", "", "0.8.0", _CALLBACKS),
    Rename("jax.interpreters.pxla.thread_resources", "", hint=_MESH, deprecated="0.8.2"),
)
