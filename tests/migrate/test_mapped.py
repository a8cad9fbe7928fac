"""The vendored module keeps the contract of jax.pmap.

Each case runs with `jax.pmap` and with `mapped`: values, types, shapes and placement are the same.
"""

import gc
import os
import pathlib
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mapped_in_processes as in_processes
import numpy as np
import pytest
from mapped_cases import CASES, Model, as_plain, rows

from jax_dist.migrate import _mapped
from jax_dist.migrate._mapped import device_put_replicated, device_put_sharded, mapped
from jax_dist.testing import run_processes


@pytest.mark.filterwarnings("ignore:The function jit")  # of jax.pmap
@pytest.mark.parametrize("name", CASES)
def test_it_does_what_pmap_does(name: str):
    case = CASES[name]

    assert as_plain(case(mapped)) == as_plain(case(jax.pmap))


def _f(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


_SIZES = (
    "_f takes arrays with one slice for each of up to 8 devices along their mapped axes; it got"
)
_ERRORS: dict[str, tuple[Callable[[Callable], Any], str]] = {
    "an axis from the end": (
        lambda pmap: pmap(_f, in_axes=-1)(rows(3, 8)),
        "_f: axis -1 counts from the end",
    ),
    "no devices": (lambda pmap: pmap(_f, devices=[]), "devices is empty; use None for all devices"),
    "more slices than devices": (lambda pmap: pmap(_f)(rows(9)), f"{_SIZES} the sizes [(9,)]"),
    "sizes that differ": (
        lambda pmap: pmap(_f)(rows(8), {"a": rows(4)}),
        f"{_SIZES} the sizes [(4,), (8,)]",
    ),
    "a number": (lambda pmap: pmap(_f)(rows(8), 3.0), f"{_SIZES} the sizes [(), (8,)]"),
    "nothing mapped": (lambda pmap: pmap(_f, in_axes=None)(rows(8)), f"{_SIZES} the sizes []"),
    "another size": (
        lambda pmap: pmap(_f, axis_size=4)(rows(8)),
        "_f got 8 slices; axis_size=4",
    ),
}


@pytest.mark.parametrize("name", _ERRORS)
def test_it_raises_where_pmap_does(name: str):
    case, message = _ERRORS[name]

    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        case(mapped)
    with pytest.raises((ValueError, AssertionError)):
        case(jax.pmap)


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine"), ZeroDivisionError("mine")])
def test_errors_of_the_function_stay_what_they_are(error: Exception):
    def fails(x: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        mapped(fails)(rows(8))
    assert caught.value is error


class _Counted:
    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: Any) -> Any:
        self.traces += 1
        return x * 2

    def method(self, x: Any) -> Any:
        self.traces += 1
        return x * 3


@pytest.mark.parametrize("of", [lambda counted: counted, lambda counted: counted.method])
def test_a_function_that_is_mapped_again_is_not_compiled_again(of: Callable):
    counted = _Counted()
    for size in (8, 2, 8, 2):
        mapped(of(counted))(rows(size))
        mapped(of(counted), "i")(rows(size))

    assert counted.traces == 4


def test_what_cannot_be_held_weakly_or_hashed_is_mapped():
    class Closed:
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x + 1

    assert mapped(Closed())(np.zeros(8)).tolist() == [1.0] * 8
    assert mapped(lambda x, y: x, in_axes=({"a": 0}, [0]))({"a": np.zeros(8)}, [np.zeros(8)])


def test_a_function_lives_as_long_as_what_is_made_of_it_and_no_longer():
    model = Model(2.0)
    call = mapped(model.apply)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert call(np.ones(8)).tolist() == [2.0] * 8
    assert call.__name__ == "apply"

    del call
    gc.collect()
    assert alive() is None


def test_arguments_that_lay_elsewhere_once_may_lie_right_the_next_time():
    call = mapped(lambda x, y: x * y, in_axes=(0, None))
    elsewhere = jax.device_put(jnp.full(2, 3.0), jax.devices()[3])
    for shared in (elsewhere, 3.0, elsewhere, np.full(2, 3.0, np.float32)):
        assert call(np.ones((8, 2)), shared).tolist() == [[3.0, 3.0]] * 8


def test_lower():
    call = mapped(lambda x, n: x * n, "i", static_broadcasted_argnums=1)
    lowered = call.lower(jax.ShapeDtypeStruct((4, 2), np.float32), 3)

    assert lowered.compile()(np.ones((4, 2), np.float32)).tolist() == [[3.0, 3.0]] * 4


def test_several_processes():
    """Two, with 4 devices each."""
    outcomes = run_processes(in_processes.run, cpu_devices=4, timeout=300)

    assert [outcome.error for outcome in outcomes] == [None, None]
    for results in (outcome.value for outcome in outcomes):
        assert results["mapped"] == results["pmap"]
        assert results["fewer"] == {  # where jax.pmap fails on an assertion of its own
            4: ([412.0] * 4, [0, 1, 2, 3]),
            2: ([202.0] * 2, [0, 1]),
            1: ([100.0], [0]),
        }
        errors = results["errors"]
        for name in ("in jit", "in jit, of what it captures", "in grad"):
            assert errors[name].startswith("NotImplementedError: f is called inside jit, grad or")
        assert errors["too many slices"].startswith("ValueError: f takes arrays with one slice")
        assert errors["another size"] == "ValueError: f got 8 slices; axis_size=4"


def test_device_put_sharded_and_replicated():
    devices = jax.devices()[1:4]
    trees = [{"a": np.full(2, i), "b": (i,)} for i in range(3)]

    sharded = device_put_sharded(trees, devices)
    copies = device_put_replicated({"a": np.ones(2), "b": 3}, devices)

    assert sharded["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert sharded["b"][0].tolist() == [0, 1, 2]
    assert copies["a"].tolist() == [[1, 1]] * 3
    for leaf in jax.tree.leaves((sharded, copies)):
        assert [shard.device for shard in leaf.addressable_shards] == devices
    with pytest.raises(ValueError, match="^2 shards for 3 devices$"):
        device_put_sharded(trees[:2], devices)


def test_importing_it_asks_for_no_devices_and_for_nothing_of_jax_dist():
    folder = pathlib.Path(_mapped.__file__).parent
    script = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import _mapped\n"
        "f = _mapped.mapped(lambda x: x, 'i', donate_argnums=0)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), 'jax_dist' in sys.modules)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )

    assert run.stdout == "False False\n"
    assert "_src" not in pathlib.Path(_mapped.__file__).read_text()
