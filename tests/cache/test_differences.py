"""The cause is named, and never a wrong one: pairs of real programs that differ in one way."""

import contextlib
import dataclasses
import uuid
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.cache.explanation import explained
from jax_dist.cache.recorder import described
from jax_dist.cache.records import HIT, WRITTEN
from jax_dist.cache.verification import ProgramVerdict, judged

X = np.ones((8, 6), np.float32)


def _recorded(run, change, fate=WRITTEN):
    """What `run` compiles."""
    compiled = []

    @contextlib.contextmanager
    def watch(request):
        compiled.append(dataclasses.replace(described(request), fate=fate))
        yield

    with _compat.compiles_watched(watch):
        run(change)
    return compiled


def _judged(run, one=0, other=1):
    """The verdicts on what two runs compile."""
    return judged([_recorded(run, one), _recorded(run, other, HIT)])


def _found(run, one=0, other=1):
    """`{function: causes}` of the programs that differ."""
    return {
        each.function: [finding.cause.name for finding in each.findings]
        for each in _judged(run, one, other)
        if each.verdict is not ProgramVerdict.HIT
    }


def _causes(run, one=0, other=1):
    """Those of the function that is called `step`."""
    found = _found(run, one, other)
    assert set(found) <= {"jit_step"}, found
    return found.get("jit_step", [])


def jitted(step, *arguments, name="step", **options):
    step.__name__ = name
    jax.jit(step, **options)(*arguments or (X,))


def _mesh(names=("i", "j"), devices=None):
    devices = np.array(jax.devices() if devices is None else devices).reshape(4, 2)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * 2)


def captured(change):
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6) + change
    jitted(lambda x: x * table)


def splat(change):
    table = np.full((8, 6), 0.5 + change, np.float32)
    jitted(lambda x: x * table)


def scalar(change):
    jitted(lambda x: x * (0.5 + change))


def steps_of_a_loop(change):
    jitted(lambda x: jax.lax.fori_loop(0, 3 + change, lambda _, x: jnp.sin(x), x))


def static_argument(change):
    jitted(lambda x, n: x * n, X, 3 + change, static_argnums=1)


def captured_and_scalar(change):
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6) + change
    jitted(lambda x: x * table + (0.5 + change))


def shapes(change):
    jitted(lambda x: x.mean(0), np.ones((8 + change, 6), np.float32))


def dtype(change):
    jitted(lambda x: x.sum(), np.ones((8, 6), (np.float32, np.int32)[change]))


def swapped_values(change):
    first, second = ((2.0, 3.0), (3.0, 2.0))[change]
    jitted(lambda x: jnp.sin(x * first) * second)


def swapped_operations(change):
    first, second = ((jnp.sin, jnp.cos), (jnp.cos, jnp.sin))[change]
    jitted(lambda x: second(first(x)))


def swapped_operands(change):
    jitted(lambda x, y: (x - y, y - x)[change], X, X)


def swapped_functions(change):
    """Numbered as they are met: the one that is called twice has another name."""
    first, second = jax.jit(lambda x: jnp.sin(x) * 2), jax.jit(lambda x: jnp.cos(x) * 3)

    def step(x):
        for inner in ((first, first, second), (second, first, first))[change]:
            x = inner(x)
        return x

    jitted(step)


def swapped_calls(change):
    first, second = jax.jit(lambda x: jnp.sin(x) * 2), jax.jit(lambda x: jnp.cos(x) * 3)

    def step(x):
        for inner in ((first, first, second), (first, second, first))[change]:
            x = inner(x)
        return x

    jitted(step)


def other_call(change):
    """Not an order: the second function is called twice, not the first."""
    first, second = jax.jit(lambda x: jnp.sin(x) * 2), jax.jit(lambda x: jnp.cos(x) * 3)

    def step(x):
        for inner in ((first, first, second), (first, second, second))[change]:
            x = inner(x)
        return x

    jitted(step)


def other_operation(change):
    jitted(lambda x: (jnp.sin, jnp.cos)[change](x) * (0.5 + change))


def more_operations(change):
    jitted(lambda x: jnp.sin(x) + 1 if change else x + 1)


def other_operand(change):
    """Not an order: a value is read that was not."""

    def step(x):
        sine, cosine = jnp.sin(x), jnp.cos(x)
        return sine * cosine + (sine, cosine)[change]

    jitted(step)


def other_axis(change):
    jitted(lambda x: jnp.flip(x, change))


def precision(change):
    kind = ("highest", "default")[change]
    jitted(lambda x: jax.lax.dot(x, x.T, precision=kind))


def options(change):
    jitted(lambda x: x + 1, compiler_options={"xla_cpu_enable_fast_math": bool(change)})


def donated(change):
    jitted(lambda x: x + 1, jnp.asarray(X), donate_argnums=(0,) if change else ())


def axis_names(change):
    names = (("i", "j"), ("k", "l"))[change]
    mesh = _mesh(names)
    table = jax.device_put(X, NamedSharding(mesh, P(names[0])))
    jitted(
        jax.shard_map(
            lambda x: jax.lax.psum(x, names), mesh=mesh, in_specs=P(names), out_specs=P()
        ),
        table,
    )


def named_by_address(change):
    names = ((f"<axis 0x7f00{change}ab>"), "j")
    jitted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(_mesh(names), P(names[0]))))


def axis_names_and_captured(change):
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6) + change
    mesh = _mesh((("i", "j"), ("k", "l"))[change])
    spec = P(mesh.axis_names[0])
    jitted(lambda x: jax.lax.with_sharding_constraint(x * table, NamedSharding(mesh, spec)))


def order_of_axes(change):
    axes = (("i", "j"), ("j", "i"))[change]
    mesh = _mesh()
    jitted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(axes))))


def other_spec(change):
    spec = (P("i"), P(None, "j"))[change]
    mesh = _mesh()
    jitted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))


def other_dimension(change):
    """The same words, not in the same places: no order."""
    mesh = Mesh(_mesh().devices.T, ("j", "i"), axis_types=(AxisType.Auto,) * 2)
    spec = (P(None, "j"), P("j", None))[change]
    jitted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))


def axis_names_on_reversed_devices(change):
    mesh = _mesh((("i", "j"), ("k", "l"))[change], devices=jax.devices()[::-1])
    spec = P(mesh.axis_names[0])
    jitted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))


def device_order(change):
    devices = jax.devices()
    mesh = _mesh(devices=devices[::-1] if change else devices)
    jitted(lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("i"))))


def device_order_and_captured(change):
    table = np.arange(48.0, dtype=np.float32).reshape(8, 6) + change
    devices = jax.devices()
    mesh = _mesh(devices=devices[::-1] if change else devices)
    jitted(lambda x: jax.lax.with_sharding_constraint(x * table, NamedSharding(mesh, P("i"))))


def result_keys(change):
    jitted(lambda x: {f"key_{change}": x + 1})


def result_keys_and_scalar(change):
    jitted(lambda x: {f"key_{change}": x + (0.5 + change)})


def inner_name(change):
    def inner(x):
        return jnp.sin(x) * 2

    inner.__name__ = f"inner_{change}"
    jitted(lambda x: jax.jit(inner)(x) + jax.jit(inner)(x * 2))


CASES = {
    axis_names: ["axis-name"],
    axis_names_and_captured: ["axis-name", "captured-array"],
    axis_names_on_reversed_devices: ["axis-name"],
    captured: ["captured-array"],
    captured_and_scalar: ["captured-array", "traced-value"],
    device_order: ["device-order"],
    device_order_and_captured: ["device-order", "captured-array"],
    donated: ["unknown"],
    dtype: ["shapes"],
    inner_name: ["function-name"],
    more_operations: ["unknown"],
    named_by_address: ["unnamed-pmap"],
    options: ["compiler-options"],
    order_of_axes: ["order"],
    other_axis: ["unknown"],
    other_dimension: ["unknown"],
    other_call: ["unknown"],
    other_operand: ["unknown"],
    other_operation: ["unknown"],
    other_spec: ["unknown"],
    precision: ["unknown"],
    result_keys: ["result-name"],
    result_keys_and_scalar: ["result-name", "traced-value"],
    scalar: ["traced-value"],
    shapes: ["shapes"],
    splat: ["captured-array"],
    static_argument: ["traced-value"],
    steps_of_a_loop: ["traced-value"],
    swapped_calls: ["order"],
    swapped_functions: ["order"],
    swapped_operands: ["order"],
    swapped_operations: ["order"],
    swapped_values: ["order"],
}


@pytest.mark.parametrize(
    ("run", "causes"), CASES.items(), ids=lambda case: getattr(case, "__name__", "")
)
def test_the_cause_is_named(run, causes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of an argument that cannot be donated
        assert _causes(run) == causes


@pytest.mark.parametrize("run", CASES, ids=lambda case: case.__name__)
def test_the_same_program_has_no_cause(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert _causes(run, 0, 0) == []


def test_a_made_up_name_is_told_also_when_the_program_differs_too():
    def run(change):
        table = np.arange(48.0, dtype=np.float32).reshape(8, 6) + change
        jitted(lambda x: x + table, name=f"step_{uuid.uuid4().hex}")

    [(function, causes)] = _found(run).items()

    assert function.startswith("jit_step_")
    assert causes == ["function-name", "captured-array"]


def test_another_function_of_the_same_shape_is_not_taken_for_a_renamed_one():
    def run(change):
        jitted(lambda x: jnp.sin(x) * (2 + change), name=("walk", "swim")[change])

    assert _found(run) == {"jit_walk": ["not-in-every-run"], "jit_swim": ["not-in-every-run"]}


def test_a_renamed_function_that_is_the_same_otherwise_is_found():
    def run(change):
        jitted(lambda x: jnp.sin(x) * 3, name=("walk", "swim")[change])

    assert _found(run) == {"jit_walk": ["function-name"]}


def test_functions_are_matched_by_shape_before_order():
    def run(change):
        sizes = (2, 3)[:: -1 if change else 1]
        for size in sizes:
            jitted(lambda x: x + (0.5 + change), np.ones(size, np.float32))

    assert _found(run) == {"jit_step": ["traced-value"]}


def test_functions_whose_names_share_a_stem_keep_apart():
    def run(change):
        for layer in (1, 2)[:: -1 if change else 1]:
            jitted(lambda x, layer=layer: x * (0.5 + layer + 10 * change), name=f"layer_{layer}")

    assert _found(run) == {"jit_layer_1": ["traced-value"], "jit_layer_2": ["traced-value"]}


def test_it_prints_what_differs_and_what_to_do():
    [step] = _judged(scalar)

    why, line, help_ = str(step.findings[0]).splitlines()
    assert why == (
        "JXD403 traced-value: A number inside the program differs: it is computed again while "
        "tracing, from random numbers, the time, or a static argument."
    )
    assert line.startswith("  ")
    assert "test_differences.py:" in line
    assert line.endswith(": tensor<f32>: 5.000000e-01, then 1.500000e+00")
    assert help_ == "help: Pass it as an array argument."


def test_the_line_is_the_users():
    [[detail]] = [each.findings[0].details for each in _judged(captured)]
    file, line, _ = detail.split(":", 2)
    with open(file) as source:
        assert "lambda x: x * table" in source.read().splitlines()[int(line) - 1]


def test_the_order_of_many_devices_is_told():
    [step] = _recorded(scalar, 0)
    many = dataclasses.replace(step, devices=tuple(range(99)))
    moved = dataclasses.replace(many, devices=(*range(97), 98, 97), key="other")

    assert [found.cause.name for found in explained(many, moved)] == ["device-order"]
