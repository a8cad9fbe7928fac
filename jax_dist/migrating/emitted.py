"""The functions that a migrated file gets below its imports, where it needs them."""

PER_DEVICE = '''\
def per_device(fun):
    """Runs `fun` on the one slice that each device holds: without the mapped axis."""

    @functools.wraps(fun)
    def body(*args):
        args = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), fun(*args))

    return body
'''

PER_DEVICE_AXES = '''\
def per_device_axes(fun, in_axes=0, out_axes=0):
    """Runs `fun` on the one slice that each device holds: without the mapped axes.

    `in_axes` and `out_axes` are those of jax.pmap; None for what all devices share.
    """

    def change(how, axes, tree):
        def one(axis, part):
            return part if axis is None else jax.tree.map(lambda x: how(x, axis), part)

        return jax.tree.map(one, axes, tree, is_leaf=lambda axis: axis is None)

    @functools.wraps(fun)
    def body(*args):
        args = change(jnp.squeeze, in_axes, args)
        return change(jnp.expand_dims, out_axes, fun(*args))

    return body
'''

WITH_STATIC = '''\
def shard_map_with_static(fun, static_argnums, wrap, map_function=jax.shard_map, **specs):
    """Like map_function(wrap(fun), **specs); some arguments are Python values."""

    @functools.wraps(fun)
    def mapped(*args):
        def fun_of_arrays(*arrays):
            rest = iter(arrays)
            return fun(*(x if i in static_argnums else next(rest) for i, x in enumerate(args)))

        arrays = (x for i, x in enumerate(args) if i not in static_argnums)
        return map_function(wrap(fun_of_arrays), **specs)(*arrays)

    return mapped
'''

WITH_KEYWORDS = '''\
def shard_map_with_keywords(fun, wrap, **specs):
    """Like jax.shard_map(wrap(fun), **specs); takes arguments by name too.

    `in_specs` are of the pair (positional arguments, named arguments).
    """
    mapped = jax.shard_map(wrap(lambda args, kwargs: fun(*args, **kwargs)), **specs)
    return functools.wraps(fun)(lambda *args, **kwargs: mapped(args, kwargs))
'''

OVER_DEVICES = '''\
def over_devices(fun, axis_name, in_specs, out_specs):
    """Like jax.shard_map over the first devices, one for each slice of the arguments."""

    @functools.wraps(fun)
    def mapped(*args):
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        sizes = (
            x.shape[list(spec).index(axis_name)]
            for x, spec in zip(jax.tree.leaves(args), specs, strict=True)
            if axis_name in list(spec)
        )
        mesh = jax.sharding.Mesh(jax.devices()[: next(sizes, None)], (axis_name,))
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(fun, mesh=mesh, **specs, check_vma=False)(*args)

    return mapped
'''

JIT_OVER_DEVICES = '''\
@functools.lru_cache(maxsize=128)
def jit_over_devices(fun, axis_name):
    """jax.jit of `fun` over devices, made once for each function, as jax.pmap does."""
    specs = jax.sharding.PartitionSpec(axis_name)
    return jax.jit(over_devices(per_device(fun), axis_name, in_specs=specs, out_specs=specs))
'''

PUT_REPLICATED = '''\
def put_replicated(tree, devices=None):
    """A copy for each device: leaves `[...]` become `[devices, ...]`, one slice on each."""
    devices = list(jax.local_devices() if devices is None else devices)
    mesh = jax.sharding.Mesh(devices, ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))

    def put(x):
        x = jnp.expand_dims(x, 0)
        slices = [jax.device_put(x, device) for device in devices]
        shape = (len(devices), *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, slices)

    return jax.tree.map(put, tree)
'''

PUT_SHARDED = '''\
def put_sharded(shards, devices):
    """Stacks the trees of `shards`, one on each device: leaves get a leading axis."""
    mesh = jax.sharding.Mesh(list(devices), ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))

    def put(*leaves):
        slices = [
            jax.device_put(jnp.expand_dims(x, 0), device)
            for x, device in zip(leaves, devices, strict=True)
        ]
        shape = (len(slices), *slices[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, slices)

    return jax.tree.map(put, *shards)
'''

FIRST_SLICE = '''\
def first_slice(tree):
    """`x[0]` of each leaf, read on the device that holds it."""

    def first(x):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.ndim:
            shard = x.addressable_shards[0]
            if shard.data.shape == (1, *x.shape[1:]):
                return jnp.squeeze(shard.data, 0)
        return x[0]

    return jax.tree.map(first, tree)
'''

REPLICATED = '''\
def replicated(tree, devices=None):
    """A whole copy of each leaf on every device, without an axis over them."""
    devices = jax.devices() if devices is None else list(devices)
    mesh = jax.sharding.Mesh(devices, ("devices",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def put(x):
        if isinstance(x, jax.Array) and x.is_fully_replicated:
            x = x.addressable_data(0)  # the first copy counts, should they differ
        x = jnp.array(x, jnp.result_type(x))  # a copy: donating it must not hurt `tree`
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree)
'''

WITH_DEVICE_AXIS = '''\
def with_device_axis(tree):
    """The copy of each device as a slice: leaves `[...]` become `[devices, ...]`."""

    def put(x):
        shards = x.addressable_shards
        mesh = jax.sharding.Mesh([shard.device for shard in shards], ("devices",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("devices"))
        slices = [jnp.expand_dims(shard.data, 0) for shard in shards]
        shape = (len(slices), *x.shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, slices)

    return jax.tree.map(put, tree)
'''

_NEEDS = {
    PER_DEVICE: ("import functools", "import jax", "import jax.numpy as jnp"),
    PER_DEVICE_AXES: ("import functools", "import jax", "import jax.numpy as jnp"),
    WITH_STATIC: ("import functools", "import jax"),
    WITH_KEYWORDS: ("import functools", "import jax"),
    OVER_DEVICES: ("import functools", "import jax"),
    JIT_OVER_DEVICES: ("import functools", "import jax"),
    PUT_REPLICATED: ("import jax", "import jax.numpy as jnp"),
    PUT_SHARDED: ("import jax", "import jax.numpy as jnp"),
    REPLICATED: ("import jax", "import jax.numpy as jnp"),
    WITH_DEVICE_AXIS: ("import jax", "import jax.numpy as jnp"),
    FIRST_SLICE: ("import jax", "import jax.numpy as jnp"),
}


def imports_of(definition: str) -> tuple[str, ...]:
    """The imports that one of these functions needs."""
    return _NEEDS[definition]


def name_of(definition: str) -> str:
    """The name of one of these functions.

    >>> name_of(PER_DEVICE)
    'per_device'
    """
    return definition.partition("def ")[2].partition("(")[0]
