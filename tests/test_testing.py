"""`jax_dist.testing`: simulated devices, and what the comparison with `jax.pmap` lets pass."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.testing import assert_same_as_pmap, simulated_devices

# Simulated devices.


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh Python, where JAX does not run yet."""
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
    "environment",
    [
        {},
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
        {"JAX_NUM_CPU_DEVICES": "4"},
    ],
    ids=["bare", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"],
)
def test_simulated_devices_before_jax_runs(environment):
    done = _python(
        """
        from jax_dist.testing import simulated_devices
        simulated_devices(5)
        simulated_devices(6)
        import jax
        print(jax.devices()[0].platform, jax.device_count())
        simulated_devices(6)
        """,
        **environment,
    )

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
        "simulated_devices(3) comes too late:\n"
        "  * JAX runs with 8 cpu devices\n"
        "Because JAX chooses its devices once, when it is first used.\n"
        "Call it at the top of conftest.py, before anything computes, or set "
        "JAX_NUM_CPU_DEVICES=3 and JAX_PLATFORMS=cpu in the environment."
    )


# The comparison with jax.pmap.


def step(x):
    return {"a": x + 1, "b": (lax.psum(x, "i"), jnp.where(x > 5, jnp.nan, x))}


def changed_inside(change):
    """A `jax.pmap` that changes what the function returns, on each device."""
    return lambda fun, axis_name: jax.pmap(lambda x: change(fun(x)), axis_name)


def changed_after(change):
    """A `jax.pmap` that changes what the mapped function returns."""
    return lambda fun, axis_name: lambda x: change(jax.pmap(fun, axis_name)(x))


def placed(array, devices, spec):
    return jax.device_put(np.asarray(array), NamedSharding(Mesh(devices, "i"), spec))


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (step, {}),
        (lambda x: lax.psum(x, "i"), {"out_axes": None}),
        (lambda x: jnp.stack([x, x]), {"out_axes": 1}),
        (lambda x: 1.0, {}),
        (lambda x: jax.random.fold_in(jax.random.key(0), x.astype(int)), {}),
        (lambda x: jax.random.key(3), {"out_axes": None}),
        (lambda x: x.astype(jnp.bfloat16), {}),
        (lambda x: lax.complex(x, x), {}),
        (lambda x: None, {}),
        (lambda x: x, {"devices": "reversed"}),
    ],
    ids=["step", "None", "out 1", "weak", "keys", "key", "bf16", "complex", "empty", "devices"],
)
def test_jax_pmap_is_the_same_as_itself(fun, options):
    if options:
        options = {**options, **({"devices": jax.devices()[::-1]} if "devices" in options else {})}

    assert_same_as_pmap(fun, np.arange(8.0), axis_name="i", pmap=jax.pmap, **options)


def test_jax_dist_pmap_is_the_default():
    result = assert_same_as_pmap(step, np.arange(8.0), axis_name="i")

    assert result["b"][0].tolist() == [28.0] * 8


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
        pmap of 'step' is not the same as jax.pmap of it:
          * result['a']: dtype int32, with jax.pmap float32
          * result['b'][0]: 1 of 8 values differ, first at [3]: 5.0, with jax.pmap 28.0
          * result['b'][1]: 2 of 8 values differ, first at [6]: 0.0, with jax.pmap nan
        Because it stands in for jax.pmap, with the same values in the same places.
        Give rtol or atol if values may differ by rounding; the rest must be the same.""")


@pytest.mark.parametrize(
    ("pmap", "difference"),
    [
        (
            changed_after(lambda x: placed(x, jax.devices()[::-1], P("i"))),
            "slices on devices [7, 6, 5, 4, 3, 2, 1, 0], with jax.pmap [0, 1, 2, 3, 4, 5, 6, 7]",
        ),
        (
            changed_after(lambda x: placed(x, jax.devices()[:4], P("i"))),
            "slices on devices [0, 1, 2, 3], with jax.pmap [0, 1, 2, 3, 4, 5, 6, 7]",
        ),
        (
            changed_after(lambda x: placed(x, jax.devices(), P())),
            "device 0 holds [0:8], with jax.pmap [0:1]",
        ),
        (changed_after(np.asarray), "class ndarray, with jax.pmap ArrayImpl"),
        (changed_inside(lambda x: x[None]), "shape (8, 1), with jax.pmap (8,)"),
    ],
    ids=["reversed", "half of the devices", "replicated", "numpy", "shape"],
)
def test_a_difference_is_told(pmap, difference):
    def double(x):
        return 2 * x

    with pytest.raises(AssertionError) as caught:
        assert_same_as_pmap(double, np.arange(8.0), pmap=pmap)

    assert str(caught.value).splitlines()[1:-2] == [f"  * result: {difference}"]


def test_a_mapped_computation_on_one_device_is_caught():
    def vmap(fun, axis_name):
        return jax.jit(jax.vmap(fun, axis_name=axis_name))

    with pytest.raises(AssertionError, match=r"slices on devices \[0\], with jax.pmap \[0, 1, 2"):
        assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=vmap)


def test_another_weak_type_is_caught():
    with pytest.raises(AssertionError, match=r"  \* result: weak type False, with jax.pmap True\n"):
        assert_same_as_pmap(lambda x: 1.0, np.arange(8.0), pmap=changed_inside(jnp.float32))


def test_other_keys_are_caught():
    def later(fun, axis_name):
        return jax.pmap(lambda x: fun(x + 1), axis_name)

    with pytest.raises(AssertionError, match=r"8 of 16 values differ, first at \[0, 1\]: 1, with"):
        assert_same_as_pmap(jax.random.key, np.arange(8), pmap=later)


def test_another_structure_is_caught():
    with pytest.raises(AssertionError) as caught:
        assert_same_as_pmap(
            step, np.arange(8.0), axis_name="i", pmap=changed_inside(lambda result: result["b"])
        )

    assert (
        "\n  * result: structure PyTreeDef((*, *)), "
        "with jax.pmap PyTreeDef({'a': *, 'b': (*, *)})\n"
    ) in str(caught.value)


@pytest.mark.parametrize(
    "tolerance", [{"rtol": 1e-5}, {"atol": 1e-4}], ids=["relative", "absolute"]
)
def test_rounding_passes_where_it_is_allowed(tolerance):
    nearly = changed_inside(lambda result: jax.tree.map(lambda x: x * (1 + 1e-6), result))

    with pytest.raises(AssertionError, match="values differ"):
        assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=nearly)
    assert_same_as_pmap(step, np.arange(8.0), axis_name="i", pmap=nearly, **tolerance)


def refuse(x):
    raise ValueError("no\nand why")


def raising(error):
    """A pmap whose mapped functions raise."""

    def mapped(*args):
        raise error

    return lambda fun, axis_name: mapped


class NarrowError(ValueError):
    pass


@pytest.mark.parametrize("error", [NarrowError(), ValueError()], ids=["subclass", "same class"])
def test_the_same_mistake_may_raise_a_narrower_error(error):
    assert assert_same_as_pmap(refuse, np.arange(8.0), pmap=raising(error)) is None


@pytest.mark.parametrize(
    ("fun", "pmap", "difference"),
    [
        (jnp.sin, raising(KeyError("a")), "it raises KeyError(\"'a'\"), jax.pmap does not"),
        (refuse, raising(KeyError("a")), "it raises KeyError(\"'a'\"), jax.pmap ValueError('no')"),
        (refuse, lambda fun, axis_name: jnp.sin, "jax.pmap raises ValueError('no'), it does not"),
    ],
    ids=["only ours raises", "another class", "only jax.pmap raises"],
)
def test_another_error_is_caught(fun, pmap, difference):
    with pytest.raises(AssertionError) as caught:
        assert_same_as_pmap(fun, np.arange(8.0), pmap=pmap)

    assert str(caught.value).splitlines()[1:-2] == [f"  * {difference}"]
