"""`jax_dist.testing`: simulated devices, comparisons with `jax.pmap` and between device counts."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist.errors import ArgumentError
from jax_dist.testing import assert_same_as_pmap, compare_device_counts, simulated_devices

# Simulated devices.


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh Python, where JAX does not run yet."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNRELATED", ""),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8"),
        ("JAX_NUM_CPU_DEVICES", "4"),
    ],
)
def test_simulated_devices_before_jax_runs(name, value):
    code = """
        from jax_dist.testing import simulated_devices
        simulated_devices(5)
        simulated_devices(6)
        import jax
        print(jax.devices()[0].platform, jax.device_count())
        simulated_devices(6)
        """
    done = _python(code, **{name: value})

    assert (done.stdout, done.stderr) == ("cpu 6\n", "")


def test_simulated_devices_that_are_there_already():
    done = _python(
        "import jax; jax.devices(); import jax_dist.testing as t; t.simulated_devices(8)",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        JAX_PLATFORMS="cpu",
    )

    assert done.stderr == ""


def test_simulated_devices_too_late():
    jax.devices()

    with pytest.raises(RuntimeError) as caught:
        simulated_devices(3)

    assert str(caught.value) == (
        "simulated_devices(3) was called after JAX had started with 8 cpu devices. Call it at the "
        "top of conftest.py, or set JAX_NUM_CPU_DEVICES=3 and JAX_PLATFORMS=cpu."
    )


# The comparison with jax.pmap.


def step(x):
    return {"a": x + 1, "b": (lax.psum(x, "i"), jnp.where(x > 5, jnp.nan, x))}


def changed_inside(change):
    """Return a `jax.pmap` that changes what the function returns, on each device."""
    return lambda fun, axis_name: jax.pmap(lambda x: change(fun(x)), axis_name)


def changed_after(change):
    """Return a `jax.pmap` that changes what the mapped function returns."""
    return lambda fun, axis_name: lambda x: change(jax.pmap(fun, axis_name)(x))


def placed(array, devices, spec):
    return jax.device_put(np.asarray(array), NamedSharding(Mesh(devices, "i"), spec))


REVERSED = {"devices": jax.devices()[::-1]}
SAME_AS_ITSELF = {
    "step": (step, {}),
    "None": (lambda x: lax.psum(x, "i"), {"out_axes": None}),
    "out 1": (lambda x: jnp.stack([x, x]), {"out_axes": 1}),
    "weak": (lambda x: 1.0, {}),
    "keys": (lambda x: jax.random.fold_in(jax.random.key(0), x.astype(int)), {}),
    "key": (lambda x: jax.random.key(3), {"out_axes": None}),
    "bf16": (lambda x: x.astype(jnp.bfloat16), {}),
    "complex": (lambda x: lax.complex(x, x), {}),
    "empty": (lambda x: None, {}),
    "devices": (lambda x: x, REVERSED),
}


@pytest.mark.parametrize("case", SAME_AS_ITSELF)
def test_jax_pmap_is_the_same_as_itself(case):
    fun, options = SAME_AS_ITSELF[case]
    assert_same_as_pmap(fun, np.arange(8.0), axis_name="i", pmap=jax.pmap, **options)


def test_donated_arguments_stay_usable():
    mapped = jax.pmap(lambda x: x)(np.arange(8.0))

    for _ in range(2):
        assert_same_as_pmap(lambda x: x + 1, mapped, pmap=jax.pmap, donate_argnums=0)

    assert mapped.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_all_differences_are_told_at_once():
    def change(result):
        total, masked = result["b"]
        total = jnp.where(lax.axis_index("i") == 3, 5, total)
        masked = jnp.where(jnp.isnan(masked), 0, masked)
        return {"a": result["a"].astype(jnp.int32), "b": (total, masked)}

    with pytest.raises(AssertionError) as caught:
        assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=changed_inside(change))

    assert str(caught.value) == textwrap.dedent("""\
        pmap of 'step' differs from jax.pmap:
          result['a']: dtype int32, with jax.pmap float32
          result['b'][0]: 1 of 8 values differ, first at [3]: 5.0, with jax.pmap 28.0
          result['b'][1]: 2 of 8 values differ, first at [6]: 0.0, with jax.pmap nan""")


def refuse(x):
    raise ValueError("no\nand why")


def raising(error):
    """Return a pmap whose mapped functions raise."""

    def mapped(*args):
        raise error

    return lambda fun, axis_name: mapped


def rows_of(devices, rows=1):
    """Return how equal slices of eight rows on these devices are shown."""
    slices = (f"{device} [{n * rows}:{(n + 1) * rows}]" for n, device in enumerate(devices))
    return ", ".join(slices)


IN_ORDER = f"with jax.pmap {rows_of(range(8))}"
EVERYWHERE = ", ".join(f"{device} [0:8]" for device in range(8))
DIFFERENT_FROM_PMAP = {
    "reversed": (
        jnp.sin, changed_after(lambda x: placed(x, jax.devices()[::-1], P("i"))),
        f"result: slices by device {rows_of(range(8)[::-1])}, {IN_ORDER}"),
    "half of the devices": (
        jnp.sin, changed_after(lambda x: placed(x, jax.devices()[:4], P("i"))),
        f"result: slices by device {rows_of(range(4), 2)}, {IN_ORDER}"),
    "replicated": (
        jnp.sin, changed_after(lambda x: placed(x, jax.devices(), P())),
        f"result: slices by device {EVERYWHERE}, {IN_ORDER}"),
    "numpy": (
        jnp.sin, changed_after(np.asarray), "result: class ndarray, with jax.pmap ArrayImpl"),
    "shape": (
        jnp.sin, changed_inside(lambda x: x[None]), "result: shape (8, 1), with jax.pmap (8,)"),
    "weak type": (
        lambda x: 1.0, changed_inside(jnp.float32), "result: weak type False, with jax.pmap True"),
    "keys": (
        jax.random.key, lambda fun, axis_name: jax.pmap(lambda x: fun(x + 1), axis_name),
        "result: 8 of 16 values differ, first at [0, 1]: 1, with jax.pmap 0"),
    "structure": (
        step, changed_inside(lambda result: result["b"]),
        "result: structure PyTreeDef((*, *)), with jax.pmap PyTreeDef({'a': *, 'b': (*, *)})"),
    "only ours raises": (
        jnp.sin, raising(KeyError("a")), "it raises KeyError(\"'a'\"), jax.pmap returns"),
    "another class": (
        refuse, raising(KeyError("a")),
        "it raises KeyError(\"'a'\"), jax.pmap raises ValueError('no')"),
    "only jax.pmap raises": (
        refuse, lambda fun, axis_name: jnp.sin, "it returns, jax.pmap raises ValueError('no')"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT_FROM_PMAP)
def test_a_difference_is_told(case):
    fun, pmap, difference = DIFFERENT_FROM_PMAP[case]
    x = np.arange(8) if case == "keys" else np.arange(8.0)

    with pytest.raises(AssertionError) as caught:
        assert_same_as_pmap(fun, x, axis_name="i", pmap=pmap)

    assert str(caught.value).splitlines()[1:] == [f"  {difference}"]


@pytest.mark.parametrize(
    "tolerance", [{"rtol": 1e-5}, {"atol": 1e-4}], ids=["relative", "absolute"]
)
def test_rounding_passes_where_it_is_allowed(tolerance):
    nearly = changed_inside(lambda result: jax.tree.map(lambda x: x * (1 + 1e-6), result))

    with pytest.raises(AssertionError, match="values differ"):
        assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=nearly)
    assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=nearly, **tolerance)


class NarrowError(ValueError):
    pass


@pytest.mark.parametrize("error", [NarrowError(), ValueError()], ids=["subclass", "same class"])
def test_the_same_mistake_may_raise_a_narrower_error(error):
    assert assert_same_as_pmap(refuse, np.arange(8.0), pmap=raising(error)) is None


# The comparison between device counts.

DRAWN = np.random.default_rng(7)
ROWS = DRAWN.normal(size=(16, 3)).astype(np.float32)
TARGETS = DRAWN.normal(size=16).astype(np.float32)
WEIGHTS = np.array([0.5, -1.0, 2.0], np.float32)
KEY = random.key(3)
STEP = (None, 0, 0)  # in_axes of weights, rows and targets


def loss(w, x, y):
    return jnp.mean(jnp.square(x @ w - y))


def mesh_of(*sizes):
    names = ("data", "model")[: len(sizes)]
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)


def training_step(collective, scale=lambda: 1.0):
    def step(w, x, y):
        value, gradient = jax.value_and_grad(loss)(w, x, y)
        return w - 0.1 * scale() * collective(gradient, "i"), lax.pmean(value, "i")

    return step


def normalize(x, mean):
    return (x - mean) / jnp.sqrt(jnp.var(x, axis=0) + 1e-5)


def hidden_rows(keys_of):
    return lambda key, x: x + 0.1 * random.normal(keys_of(key), x.shape)


def half_precision(w, x, y):
    def small(w):
        hidden = jnp.tanh(x.astype(jnp.bfloat16) * w.astype(jnp.bfloat16))
        return jnp.mean((hidden.sum(-1).astype(jnp.float32) - y) ** 2)

    return w - 0.1 * lax.pmean(jax.grad(small)(w), "i")


def shared_population(key, theta, x):
    population = random.normal(key, (16, 3))
    start = lax.axis_index("i") * x.shape[0]
    own = lax.dynamic_slice_in_dim(population, start, x.shape[0])
    scores = lax.all_gather(((theta + own) * x).sum(1), "i", tiled=True)
    return theta + 0.1 * (scores - scores.mean()) @ population


SAME = {
    "a training step": (training_step(lax.pmean), (WEIGHTS, ROWS, TARGETS), STEP),
    "bfloat16 inside": (half_precision, (WEIGHTS, ROWS, TARGETS), STEP),
    "bfloat16 rows": (
        lambda x: lax.pmean(jnp.tanh(x).mean(0), "i"), (jnp.asarray(ROWS, jnp.bfloat16),), 0),
    "all to all": (
        lambda x: lax.all_to_all(x, "i", 1, 0, tiled=True).T, (ROWS[:8] @ ROWS[:8].T,), 0),
    "histogram": (
        lambda x: lax.psum(jnp.sum(x[:, None] == jnp.arange(5), 0), "i"), (np.arange(16) % 5,), 0),
    "a key for each row": (
        lambda keys, x: jax.vmap(lambda key, x: x + random.normal(key))(keys, x),
        (random.split(KEY, 16), TARGETS), (0, 0)),
    "a shared population": (shared_population, (KEY, WEIGHTS, ROWS), (None, None, 0)),
    "own keys as a result": (
        lambda key, x: (random.fold_in(key, lax.axis_index("i")), lax.psum(x.sum(), "i")),
        (KEY, ROWS), (None, 0)),
    "amplified rounding": (lambda x: (lax.psum(x.sum(), "i") + 1e3) - 1e3, (TARGETS,), 0),
    "columns": (lambda x: x * 2, (ROWS.T,), 1),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_what_is_the_same_on_any_device_count(case):
    fun, args, in_axes = SAME[case]

    report = compare_device_counts(fun, *args, axis_name="i", in_axes=in_axes, devices=(1, 2, 8))

    assert report.ok, report
    assert {result.devices for result in report.results} == {2, 8}


OTHER = "other values"
DIFFERENT = {
    # a wrong factor
    "gradients of means, summed": (
        training_step(lax.psum), (WEIGHTS, ROWS, TARGETS), STEP, "4 times the change of args[0]"),
    "a rate by device, divided": (
        training_step(lax.pmean, lambda: 1 / lax.axis_size("i")),
        (WEIGHTS, ROWS, TARGETS), STEP, "1/4 of the change of args[0]"),
    "a sum of means": (lambda x: lax.psum(x.mean(), "i"), (ROWS,), 0, "4 times the value"),
    "a sum under pmean": (  # as netket#2228
        lambda x: lax.pmean(lax.psum(x.sum(), "i") / len(x), "i"), (ROWS,), 0, "4 times the value"),
    "a mean of sums": (lambda x: lax.pmean(x.sum(0), "i"), (ROWS,), 0, "1/4 of the value"),
    "a gradient of a local mean, by row": (
        jax.grad(lambda x: jnp.mean(jnp.sin(x))), (ROWS,), 0, "4 times the value"),
    # no collective
    "gradients of one device": (
        training_step(lambda x, _: x), (WEIGHTS, ROWS, TARGETS), STEP,
        "the devices differ; their mean is the value"),
    "a local sum": (lambda x: x.sum(0), (ROWS,), 0, "the devices differ; their sum is the value"),
    "a local maximum": (
        lambda x: jnp.abs(x).max(), (ROWS,), 0, "the devices differ; their maximum is the value"),
    "a local norm": (lambda x: jnp.sqrt((x * x).sum()), (ROWS,), 0, "the devices differ"),
    # orderings of what a device has
    "argmax": (jnp.argmax, (TARGETS,), 0, "the devices differ"),
    "sort": (jnp.sort, (TARGETS,), 0, OTHER),
    # statistics, shapes, random numbers
    "batch norm": (lambda x: normalize(x, jnp.mean(x, 0)), (ROWS,), 0, OTHER),
    "gathered along features": (
        lambda x: jnp.abs(lax.all_gather(x, "i", axis=1, tiled=True)).max(0), (ROWS,), 0,
        "shape (12,) on each device, not (3,)"),
    "noise with one key": (hidden_rows(lambda key: key), (KEY, ROWS), (None, 0), OTHER),
    "noise with a key for each device": (
        hidden_rows(lambda key: random.fold_in(key, lax.axis_index("i"))), (KEY, ROWS), (None, 0),
        OTHER),
    "a factor near 1": (
        lambda x: lax.psum(x.sum(), "i") * (1 + 1e-4 * (lax.axis_size("i") - 1)), (ROWS,), 0,
        OTHER),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_depends_on_the_device_count(case):
    fun, args, in_axes, difference = DIFFERENT[case]

    report = compare_device_counts(fun, *args, axis_name="i", in_axes=in_axes, devices=(1, 4))

    assert not report.ok
    assert report.results[0].difference == difference
    assert ("uses random numbers" in str(report)) == case.startswith("noise"), report


def test_what_rounding_could_hide_is_undecided():
    def chaotic(x):
        mean = jnp.abs(lax.pmean(jnp.mean(x), "i"))
        return lax.fori_loop(0, 60, lambda _, at: 3.99 * at * (1 - at), mean)

    report = compare_device_counts(chaotic, TARGETS, axis_name="i", devices=(2,))

    assert (report.ok, [result.same for result in report.results]) == (False, [None])
    assert "undecided: rounding alone changes it" in str(report)


def test_the_text_names_what_differs_and_on_how_many_devices():
    report = compare_device_counts(
        training_step(lax.psum), WEIGHTS, ROWS, TARGETS, axis_name="i", in_axes=STEP
    )

    headline, header, *rows = str(report).splitlines()
    assert headline == "step: 1 of 2 results not the same on 1, 2, 4, 8 devices"
    assert header.split()[1:5] == ["devices", "compared", "with", "1"]
    assert [row.split()[:8] for row in rows] == [
        f"result[0] {n} {n} times the change of args[0]".split() for n in (2, 4, 8)
    ]
    same = compare_device_counts(lambda x: x, ROWS, axis_name="i", devices=(2,))
    assert str(same) == "<lambda>: 1 result the same on 1, 2 devices"


SLICES, OWN_TARGETS = ROWS.reshape(8, 2, 3), TARGETS.reshape(8, 2)
COPIES = np.stack([WEIGHTS] * 8)


@pytest.mark.parametrize("pmap", [jax.pmap, jax_dist.pmap], ids=["jax", "jax_dist"])
def test_mapped_functions(pmap):
    right, wrong = (pmap(training_step(c), "i") for c in (lax.pmean, lax.psum))
    shared = pmap(training_step(lax.psum), "i", in_axes=STEP)

    assert compare_device_counts(right, COPIES, SLICES, OWN_TARGETS).ok
    by_copies = compare_device_counts(wrong, COPIES, SLICES, OWN_TARGETS)
    whole = compare_device_counts(shared, WEIGHTS, SLICES, OWN_TARGETS)
    for report in (by_copies, whole):
        assert [
            (result.devices, result.difference) for result in report.results if not result.same
        ] == [(n, f"{n} times the change of args[0]") for n in (2, 4, 8)]


@pytest.mark.parametrize("keys", [random.split(KEY, 8), random.split(random.PRNGKey(3), 8)])
def test_keys_of_devices_are_not_divided(keys):
    noisy = jax.pmap(lambda key, x: lax.pmean(x.mean(0) + random.normal(key, (3,)), "i"), "i")

    report = compare_device_counts(noisy, keys, SLICES, devices=(4,))

    assert (report.results[0].difference, report.is_random) == (OTHER, True)


@pytest.mark.parametrize("pmap", [jax.pmap, jax_dist.pmap])
def test_numbers_are_shared(pmap):
    mapped = pmap(lambda scale, x: lax.pmean(scale * x.mean(0), "i"), "i", in_axes=(None, 0))

    assert compare_device_counts(mapped, 2.0, SLICES, devices=(2,)).ok


def test_static_arguments_stay_what_they_are():
    scaled = jax.pmap(
        lambda word, x: lax.pmean(x.mean(0), "i") * len(word), "i", static_broadcasted_argnums=0
    )
    assert compare_device_counts(scaled, "abc", SLICES, devices=(2,)).ok


def on_mesh(body, *specs, out=None, **options):
    def fun(*args, mesh=None):
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out or P(), **options)(
            *args
        )

    return fun


WHOLE = {
    "a mean": (on_mesh(lambda x: lax.pmean(x.mean(0), "data"), P("data")), (ROWS,), ""),
    "the gradient through the mesh": (
        jax.grad(on_mesh(lambda w, x: lax.psum(jnp.tanh(x @ w).sum(), "data"), P(), P("data"))),
        (WEIGHTS, ROWS), ""),
    "gradients that JAX sums": (  # of replicated values, where check_vma is on
        on_mesh(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)), P(), P("data")),
        (WEIGHTS, ROWS), "4 times the value"),
    "the sum of the first device": (
        on_mesh(lambda x: x.sum(0), P("data"), check_vma=False), (ROWS,), OTHER),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("sizes", [(8,), (4, 2)])
def test_functions_of_whole_arrays(case, sizes):
    fun, args, difference = WHOLE[case]
    mesh = mesh_of(*sizes)
    args = (*args[:-1], jax.device_put(args[-1], NamedSharding(mesh, P("data"))))

    report = compare_device_counts(fun, *args, mesh=mesh, devices=(1, 4))

    assert [(result.devices, result.difference) for result in report.results] == [(4, difference)]


FIXED = on_mesh(lambda x: x, P("data"), out=P("data"))


@pytest.mark.parametrize(
    ("fun", "options", "line"),
    [
        (lambda x: x, {"axis_name": "i", "in_axes": None}, "in_axes=None divides no argument"),
        (
            lambda x: x,
            {"axis_name": "i", "in_axes": 2},
            "args[0] has shape (16, 3), and 0 rows along axis 2",
        ),
        (
            lambda x: x,
            {"axis_name": "i", "devices": (3,)},
            "args[0] has shape (16, 3), and 16 rows",
        ),
        (lambda x: x, {"axis_name": "i", "devices": (1,)}, "devices=(1,)"),
        (lambda x: x, {"axis_name": "i", "devices": (0, 2)}, "devices=(0, 2)"),
        (lambda x: x, {"mesh": mesh_of(4), "devices": (8,)}, "cannot be made smaller to 8"),
        (jax.pmap(lambda x: x), {"devices": (32,)}, "args[0] has shape (48,), and 48 rows"),
        (lambda x: list(x), {"axis_name": "i", "devices": (2,)}, "on 2 devices, and"),
    ],
)
def test_what_cannot_be_compared(fun, options, line):
    with pytest.raises(ArgumentError) as caught:
        compare_device_counts(fun, ROWS, **options)
    assert line in str(caught.value)


def test_a_function_that_maps_nothing_is_an_error():
    with pytest.raises(NotImplementedError, match="'<lambda>' maps nothing"):
        compare_device_counts(lambda x: x.sum(0), ROWS)


def test_a_fixed_mesh_is_an_error_that_says_where_it_must_come_from():
    with pytest.raises(ValueError, match="mesh") as caught:
        compare_device_counts(
            lambda x: FIXED(x, mesh=mesh_of(4)), ROWS, mesh=mesh_of(4), devices=(2,)
        )
    assert any("parameter named mesh" in note for note in caught.value.__notes__)
