"""Many small programs, each with one property that keeps its key or does not.

python stability_rows.py [NAME ...]: runs those; without a name, all of them. What a row is called
is the name of its function, so that a verdict on `jit_NAME` is a verdict on the row.
"""

import collections
import functools
import os
import random
import sys
import time
import uuid
import warnings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

X = np.ones((8, 6), np.float32)
DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES.reshape(4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
NAMES = ("anchor", "bias", "cell", "depth", "edge", "fold", "gate", "head")
RANDOM = np.random.default_rng()  # seeded by the system: other values in each process
ROWS = {}


def row(fun):
    ROWS[fun.__name__] = fun
    return fun


def jitted(fun, **options):
    """Calls it once, under its own name."""
    jax.jit(fun, **options)(X)


# --- stable


@row
def plain():
    def plain(x):
        return jnp.sin(x) + 1

    jitted(plain)


@row
def fixed_capture():
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6)

    def fixed_capture(x):
        return x * table

    jitted(fixed_capture)


@row
def donated():
    def donated(x):
        return x * 2

    jax.jit(donated, donate_argnums=0)(jnp.asarray(X))


@row
def remat():
    def remat(x):
        return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())(x)

    jitted(remat)


@row
def custom_vjp():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

    def custom_vjp(x):
        return jax.grad(lambda x: (clipped(x) ** 2).sum())(x)

    jitted(custom_vjp)


@row
def partial():
    def partial(scale, x):
        return scale * x

    jitted(functools.partial(partial, 3.0))


@row
def static_address():
    class Options:  # its repr holds an address
        pass

    def static_address(x, options):
        del options
        return x + 1

    jax.jit(static_address, static_argnums=1)(X, Options())


@row
def named_scope():
    def named_scope(x):
        with jax.named_scope(f"scope_{uuid.uuid4().hex}"):
            return x + 1

    jitted(named_scope)


@row
def dict_argument():
    def dict_argument(tree):
        return sum(tree.values())

    jax.jit(dict_argument)({name: X for name in set(NAMES)})


@row
def input_keys():
    def input_keys(tree):
        return sum(jax.tree.leaves(tree))

    jax.jit(input_keys)({f"{number}_{uuid.uuid4().hex}": X for number in range(3)})


@row
def axis_names_set():
    def axis_names_set(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, ("i", "j")),
            mesh=MESH,
            in_specs=P(("i", "j")),
            out_specs=P(),
            axis_names={"i", "j"},
            check_vma=False,
        )(x)

    jitted(axis_names_set)


@row
def pmapped():
    def pmapped(x):
        return jax.lax.psum(x, "i")

    jax.pmap(pmapped, axis_name="i")(X)


@row
def pmap_without_name():
    def pmap_without_name(x):
        return x + 1

    jax.pmap(pmap_without_name)(X)


@row
def jit_of_pmap():
    def jit_of_pmap(x):
        return jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(x)

    jitted(jit_of_pmap)


# --- values


@row
def random_jnp_capture():
    table = jax.random.normal(jax.random.key(int(RANDOM.integers(1 << 30))), (8, 6))

    def random_jnp_capture(x):
        return x * table

    jitted(random_jnp_capture)


@row
def random_np_capture():
    table = RANDOM.normal(size=(8, 6)).astype(np.float32)

    def random_np_capture(x):
        return x * table

    jitted(random_np_capture)


@row
def random_bf16_capture():
    table = jnp.asarray(RANDOM.normal(size=(8, 6)), jnp.bfloat16)

    def random_bf16_capture(x):
        return x * table

    jitted(random_bf16_capture)


@row
def random_bool_capture():
    mask = RANDOM.random(size=(8, 6)) < 0.5

    def random_bool_capture(x):
        return jnp.where(mask, x, 0)

    jitted(random_bool_capture)


@row
def random_large_capture():
    table = RANDOM.normal(size=(512, 512)).astype(np.float32)  # 1 MB

    def random_large_capture(x):
        return x[:, :1] * table[:8]

    jitted(random_large_capture)


@row
def capture_in_scan():
    table = RANDOM.normal(size=(6, 6)).astype(np.float32)

    def capture_in_scan(x):
        return jax.lax.scan(lambda x, _: (x @ table, None), x, None, length=3)[0]

    jitted(capture_in_scan)


@row
def random_python_scalar():
    def random_python_scalar(x):
        return x * random.random()

    jitted(random_python_scalar)


@row
def random_jnp_scalar():
    scale = jnp.float32(RANDOM.random())

    def random_jnp_scalar(x):
        return x * scale

    jitted(random_jnp_scalar)


@row
def time_seeded_key():
    key = jax.random.PRNGKey(time.time_ns() % (1 << 30))

    def time_seeded_key(x):
        return x + jax.random.normal(key, x.shape)

    jitted(time_seeded_key)


# --- host callbacks


@row
def pure_callback():
    def pure_callback(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    jitted(pure_callback)


@row
def ordered_io_callback():
    def ordered_io_callback(x):
        return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)

    jitted(ordered_io_callback)


@row
def unordered_io_callback():
    def unordered_io_callback(x):
        return io_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    jitted(unordered_io_callback)


@row
def debug_print():
    def debug_print(x):
        jax.debug.print("{}", x.sum())
        return x

    jitted(debug_print)


@row
def debug_callback():
    def debug_callback(x):
        jax.debug.callback(lambda x: None, x)
        return x

    jitted(debug_callback)


@row
def print_in_shard_map():
    def print_in_shard_map(x):
        def body(x):
            jax.debug.print("{}", x.sum())
            return x

        return jax.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"))(x)

    jitted(print_in_shard_map)


# --- orders


@row
def set_of_values():
    """The same operations, with the constants in another order."""
    scales = {name: float(number) for number, name in enumerate(NAMES, start=2)}

    def set_of_values(x):
        for name in set(NAMES):
            x = jnp.sin(x * scales[name])
        return x

    jitted(set_of_values)


@row
def set_of_operations():
    """Other operations one after another."""
    steps = dict(zip(NAMES, (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, abs, jnp.floor), strict=False))

    def set_of_operations(x):
        for name in set(steps):
            x = steps[name](x)
        return x

    jitted(set_of_operations)


@row
def set_of_leaves():
    """The same operations, on other operands."""

    def set_of_leaves(tree):
        total = tree["anchor"] * 0
        for name in set(NAMES):
            total = total * 2 + tree[name]
        return total

    jax.jit(set_of_leaves)(dict.fromkeys(NAMES, X))


@row
def set_of_inner_functions():
    """Inner functions, which are numbered as they are met."""
    inner = {
        name: jax.jit(lambda x, power=power: x**power) for power, name in enumerate(NAMES, start=2)
    }

    def set_of_inner_functions(x):
        for name in set(NAMES):
            x = inner[name](x)
        return x

    jitted(set_of_inner_functions)


@row
def dict_in_varying_order():
    names = list(NAMES)
    random.shuffle(names)
    scales = {name: float(NAMES.index(name) + 2) for name in names}

    def dict_in_varying_order(x):
        for scale in scales.values():
            x = jnp.sin(x * scale)
        return x

    jitted(dict_in_varying_order)


@row
def ordered_results():
    names = list(NAMES)
    random.shuffle(names)

    def ordered_results(x):
        return collections.OrderedDict((name, x + 1) for name in names)

    jitted(ordered_results)


@row
def set_of_axes():
    axes = ("a", "b", "c")
    mesh = Mesh(DEVICES.reshape(2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)

    def set_of_axes(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, tuple(set(axes))),
            mesh=mesh,
            in_specs=P(axes),
            out_specs=P(),
            check_vma=False,
        )(x)

    jitted(set_of_axes)


@row
def set_and_capture():
    """Two causes at once: neither may be told as the other."""
    scales = {name: float(number) for number, name in enumerate(NAMES, start=2)}
    table = RANDOM.normal(size=(8, 6)).astype(np.float32)

    def set_and_capture(x):
        for name in set(NAMES):
            x = jnp.sin(x * scales[name])
        return x * table

    jitted(set_and_capture)


# --- what nothing but the user can know


@row
def random_operation():
    step = (jnp.sin, jnp.cos)[int(os.environ.get("PYTHONHASHSEED", "0")) % 2]

    def random_operation(x):
        return step(x)

    jitted(random_operation)


@row
def random_slice():
    count = random.randrange(1, 1_000_000)

    def random_slice(x):
        return jnp.tile(x[0], 1_000_000)[:count]

    jitted(random_slice)


# --- in the second run


@row
def in_the_second_run_only():
    def in_the_second_run_only(x):
        return x + 1

    if os.environ["PYTHONHASHSEED"] == "2":
        jitted(in_the_second_run_only)


# --- names


@row
def result_keys():
    def result_keys(x):
        return {f"{name}_{uuid.uuid4().hex}": x + 1 for name in ("a", "b")}

    jitted(result_keys)


@row
def function_name():
    def function(x):
        return jnp.cos(jnp.cos(x))

    function.__name__ = f"made_up_{uuid.uuid4().hex}"
    jitted(function)


@row
def inner_function_name():
    def inner(x):
        return jnp.cos(x) + 1

    inner.__name__ = f"inner_{uuid.uuid4().hex}"

    def inner_function_name(x):
        return jax.jit(inner)(x) * jax.jit(inner)(x + 1)

    jitted(inner_function_name)


@row
def axis_name():
    name = f"axis_{uuid.uuid4().hex}"
    mesh = Mesh(DEVICES, (name,), axis_types=(AxisType.Auto,))

    def axis_name(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, name), mesh=mesh, in_specs=P(name), out_specs=P()
        )(x)

    jitted(axis_name)


@row
def device_order():
    order = list(DEVICES)
    random.shuffle(order)
    mesh = Mesh(np.array(order), ("i",), axis_types=(AxisType.Auto,))

    def device_order(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
        )(x)

    jitted(device_order)


# --- custom_partitioning


@custom_partitioning
def softened(x):
    return x / (1 + jnp.abs(x).sum(-1, keepdims=True))


def _by_row(mesh, arg_shapes, result_shape):
    del result_shape
    rows = NamedSharding(mesh, P(arg_shapes[0].sharding.spec[0], None))
    return mesh, softened.fun, rows, (rows,)


softened.def_partition(_by_row, sharding_rule="n h -> n h")


def _cut():
    return jax.device_put(X, NamedSharding(MESH, P("i")))


@row
def partitioned():
    def partitioned(x):
        return softened(x) + 1

    jax.jit(partitioned)(_cut())


@row
def partitioned_on_one_device():
    def partitioned_on_one_device(x):
        return softened(x) + 1

    jitted(partitioned_on_one_device)


@row
def partitioned_in_shard_map():
    def partitioned_in_shard_map(x):
        return jax.shard_map(
            lambda x: softened(x) + 1,
            mesh=MESH,
            in_specs=P(("i", "j")),
            out_specs=P(("i", "j")),
            check_vma=False,
        )(x)

    jax.jit(partitioned_in_shard_map)(_cut())


@row
def partitioned_without_pointer():
    def partitioned_without_pointer(x):
        return softened(x) + 1

    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", val=True)
    jax.jit(partitioned_without_pointer)(_cut())
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", val=False)


# --- before and after jax_dist.rewrite


@row
def partitioned_rewritten():
    import jax_dist

    def partitioned_rewritten(x):
        return softened(x) + 1

    jax_dist.rewrite(partitioned_rewritten)(_cut())


@row
def capture_rewritten():
    import jax_dist

    warnings.simplefilter("ignore", jax_dist.CapturedArrayWarning)
    table = RANDOM.normal(size=(6, 64)).astype(np.float32)  # smaller ones stay

    def capture_rewritten(x):
        return x @ table

    jax_dist.rewrite(capture_rewritten)(X)


def main(names):
    for name in names or ROWS:
        ROWS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
