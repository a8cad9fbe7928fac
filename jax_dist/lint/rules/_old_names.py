"""The names that left jax or moved, for JXD108; a migration's runs read them too.

The versions are those of jax's change log; what is called gone was looked up on jax 0.10.2, and
what is called new on jax 0.10.2 and 0.12.0.1.
"""

from collections.abc import Iterator

from jax_dist.lint.rules._renames import Rename

# A row: the old module, the new one, the jax that removed the old names ("-": not known), the first
# jax with the new ones (0: any that a project may require), and the names; `a:b` is now called `b`.
_MOVED = """
jax jax.tree 0.6.0 0.4.25 tree_map:map tree_leaves:leaves tree_flatten:flatten
jax jax.tree 0.6.0 0.4.25 tree_unflatten:unflatten tree_structure:structure tree_transpose:transpose
jax jax.tree - 0.4.25 tree_reduce:reduce tree_all:all
jax jax.tree 0.3.16 0.4.25 tree_multimap:map
jax.tree_util jax.tree 0.3.16 0.4.25 tree_multimap:map
jax.numpy jax 0.4.14 0 DeviceArray:Array
jax.interpreters.pxla jax 0.4.14 0 ShardedDeviceArray:Array
jax.random jax 0.4.24 0 KeyArray:Array PRNGKeyArray:Array
jax.experimental jax.sharding 0.4.11 0 PartitionSpec
jax.experimental.pjit jax.sharding 0.4.11 0 PartitionSpec NamedSharding
jax.interpreters.pxla jax.sharding 0.4.11 0 PartitionSpec Mesh
jax.experimental.maps jax.sharding 0.4.11 0 Mesh
jax.sharding jax.sharding 0.4.34 0 XLACompatibleSharding:Sharding
jax.config jax - 0 FLAGS:config
jax.config jax 0.4.25 0 config
jax jax.extend 0.4.24 0.4.16 linear_util
jax.experimental jax.example_libraries 0.3.16 0 optimizers stax
jax.core jax.extend.core 0.6.0 0.4.36 ClosedJaxpr Jaxpr JaxprEqn Literal Primitive Token Var
jax.core jax.extend.core 0.6.0 0.4.36 jaxpr_as_fun
jax.core jax.extend.core.primitives 0.7.0 0.4.36 call_p closed_call_p
jax.core jax.extend.core 0.10.0 0.10.0 TraceTag subjaxprs set_current_trace take_current_trace
jax.core jax.extend.core 0.10.0 0.10.0 mapped_aval unmapped_aval
jax.core jax.extend.core 0.11.0 0.10.0 DebugInfo DropVar Effects find_top_trace gensym no_effects
jax.core jax.extend.core 0.11.0 0.10.0 get_opaque_trace_state jaxprs_in_params new_jaxpr_eqn
jax.core jax.extend.core 0.11.0 0.10.0 unsafe_get_axis_names_DO_NOT_USE
jax.core jax.extend.core 0.11.0 0.10.0 unsafe_am_i_under_a_jit_DO_NOT_USE
jax.experimental.pjit jax.extend.core.primitives 0.7.0 0.7.0 pjit_p:jit_p
jax.abstract_arrays jax.core 0.4.17 0 ShapedArray
jax.lib.xla_bridge jax.extend.backend 0.8.0 0.4.32 get_backend
jax.lib.xla_bridge jax 0.8.0 0 device_count local_device_count devices local_devices process_index
jax.lib.xla_bridge jax 0.8.0 0 process_count default_backend
jax.lib.xla_bridge jax 0.8.0 0 host_id:process_index host_count:process_count
jax.lib.xla_client jax 0.5.0 0.4.11 Device
jax.lib.xla_extension jax 0.8.0 0.4.11 Device
jax.lib.xla_client jax.errors 0.6.0 0 XlaRuntimeError:JaxRuntimeError
jax.lib.xla_extension jax.errors 0.6.0 0 XlaRuntimeError:JaxRuntimeError
jax.numpy jax.numpy 0.4.24 0 row_stack:vstack in1d:isin
jax.numpy jax.numpy 0.4.38 0 round_:round
jax.numpy jax.scipy.integrate 0.4.24 0.4.16 trapz:trapezoid
jax.nn jax.nn 0.4.29 0.4.28 normalize:standardize
jax jax.extend.backend 0.4.36 0.4.26 clear_backends
jax.experimental jax - 0.8.0 enable_x64
"""

# A row: the old name, the jax that removed it, and what to do, since there is no new name.
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
jax.xla_computation 0.4.34 use jax.jit(f).lower(...).compiler_ir('hlo')
jax.experimental.export 0.4.36 use jax.export, whose calls differ
jax.experimental.maps 0.4.31 use jax.shard_map in the place of xmap
jax.abstract_arrays 0.4.17 use jax.core.ShapedArray
jax.util 0.8.0 it was internal
jax.interpreters.pxla.xla_pmap_p 0.10.0 pmap is jit(shard_map)
jax.extend.core.primitives.xla_pmap_p 0.10.0 pmap is jit(shard_map)
"""

_INDEX = ("", "_update", "_add", "_mul", "_min", "_max")  # jax.ops.index_update
_AT = "use x.at[index].set(y), .add(y), .multiply(y), .min(y) or .max(y)"
_CALLBACKS = "use jax.pure_callback, jax.experimental.io_callback or jax.debug.callback"
_MESH = "use jax.sharding.get_abstract_mesh(), and jax.set_mesh(mesh) in the place of mesh"


def _expand_row(row: str) -> Iterator[Rename]:
    """Yield the renames in a row of `_MOVED`: "jax.config jax - 0 FLAGS:config config" has two."""
    old_home, new_home, gone, needs, *names = row.split()
    version = tuple(map(int, needs.split(".")))
    for old, _, new in (name.partition(":") for name in names):
        new_name = f"{new_home}.{new or old}"
        yield Rename(f"{old_home}.{old}", new_name, gone.strip("-"), needs=version)


_WITHOUT_SUCCESSOR_ROWS = [row.split(maxsplit=2) for row in _WITHOUT_SUCCESSOR.strip().splitlines()]
NAMES: tuple[Rename, ...] = (
    *(rename for row in _MOVED.strip().splitlines() for rename in _expand_row(row)),
    Rename("jax.api", "jax", "0.2.21"),
    *(Rename(old, "", gone.strip("-"), hint) for old, gone, hint in _WITHOUT_SUCCESSOR_ROWS),
    *(Rename(f"jax.ops.index{end}", "", "0.3.2", _AT) for end in _INDEX),
    Rename("flax.optim", "", "flax 0.6.0", "use optax, which does not hold the parameters"),
    Rename("jax.host_id", "jax.process_index", deprecated="0.2.13"),
    Rename("jax.host_count", "jax.process_count", deprecated="0.2.13"),
    Rename("jax.experimental.host_callback", "", "0.8.0", _CALLBACKS),
    Rename("jax.interpreters.pxla.thread_resources", "", hint=_MESH, deprecated="0.8.2"),
)
