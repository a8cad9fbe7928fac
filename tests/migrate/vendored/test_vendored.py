"""The helper module as the product that it is: it keeps the contract of jax.pmap.

Each case runs with `jax.pmap` and with `mapped`: values, types, shapes and placement are the same.
"""

import concurrent.futures
import gc
import os
import pathlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import mapped_in_processes as in_processes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from mapped_cases import CASES, Model, as_plain, rows

from jax_dist.migrate.vendored import mapped as module
from jax_dist.migrate.vendored.beside import (
    device_put_replicated,
    device_put_sharded,
    per_device,
    replicated,
    with_device_axis,
)
from jax_dist.migrate.vendored.mapped import mapped
from jax_dist.testing import run_processes

pytestmark = pytest.mark.rewriting

_FOLDER = pathlib.Path(module.__file__).parent
_IS_OLD = jax.__version_info__ < (0, 8)  # not promised there: see docs/migrating.md
_IS_EARLY = not _IS_OLD and jax.__version_info__ < (0, 10)
_REFUSED_EARLY = {  # jax.pmap moves no arrays in 0.8 and 0.9
    "what lies on one device",
    "what lies on other devices",
    "what lies in another order",
}
_DEVICES = 8


# --- the same as jax.pmap


@pytest.mark.filterwarnings("ignore:The function jit")  # of the old pmap
@pytest.mark.parametrize("name", CASES)
def test_it_does_what_pmap_does(name: str):
    case = CASES[name]
    found = as_plain(case(mapped))

    if _IS_EARLY and name in _REFUSED_EARLY:
        with pytest.raises(ValueError, match="incompatible devices"):
            case(jax.pmap)
    else:
        assert found == as_plain(case(jax.pmap))


def _leaves(draw: Any, size: int, axis: int | None) -> np.ndarray | float:
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2))
    if axis is not None:
        shape = [*shape, 1][: max(len(shape), axis)]
        shape += [1] * (axis - len(shape))
        shape.insert(axis, size)
    kind = draw(st.sampled_from([np.float32, np.int32, np.bool_]))
    return rows(*shape, dtype=kind)


@st.composite
def _calls(draw: Any) -> tuple[dict[str, Any], list[Any]]:
    size = draw(st.integers(1, _DEVICES))
    axes = draw(st.lists(st.sampled_from([0, 1, 2, None]), min_size=0, max_size=3))
    axes.append(draw(st.sampled_from([0, 1])))
    args = [_leaves(draw, size, axis) for axis in axes]
    trees = [draw(st.sampled_from([lambda x: x, lambda x: {"a": x, "b": [x]}])) for _ in args]
    options = {
        "in_axes": tuple(axes),
        "out_axes": draw(st.sampled_from([0, 0, 1])),
        "axis_name": draw(st.sampled_from([None, "i"])),
    }
    return options, [tree(x) for tree, x in zip(trees, args, strict=True)]


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_it_does_what_pmap_does_with_any_arguments(examples: int):
    check = hypothesis.given(_calls())(_compare)
    hypothesis.settings(max_examples=examples, deadline=None)(check)()


def _compare(call: tuple[dict[str, Any], list[Any]]) -> None:
    options, args = call

    def fun(*args: Any) -> Any:
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(args))
        return {"all": jnp.stack([total, total]), "args": jnp.ones((2, 2)) * total}

    assert as_plain(mapped(fun, **options)(*args)) == as_plain(jax.pmap(fun, **options)(*args))


# --- what it refuses


_NO_DIMENSION = (
    "f maps over as many devices as its arguments have slices, all the same; None in in_axes marks "
    "those that all devices share. Found {}."
)


def _f(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


_f.__name__ = "f"
_REFUSED: dict[str, tuple[Callable[[Callable], Any], type[Exception], str]] = {
    "no function": (lambda pmap: pmap(3), TypeError, "mapped takes a function, not 3"),
    "axes of another kind": (
        lambda pmap: pmap(_f, in_axes="0"),
        ValueError,
        "'0' among the axes is no int",
    ),
    "a dimension from behind": (
        lambda pmap: pmap(_f, in_axes=-1)(rows(3, 8)),
        ValueError,
        "f: -1 in in_axes; axes count from the front",
    ),
    "no devices": (
        lambda pmap: pmap(_f, devices=[]),
        ValueError,
        "devices is empty; None stands for all of them",
    ),
    "more slices than devices": (
        lambda pmap: pmap(_f)(rows(9)),
        ValueError,
        "f got 9 slices, one for each of 8 devices",
    ),
    "more slices than devices given": (
        lambda pmap: pmap(_f, devices=jax.devices()[:2])(rows(3)),
        ValueError,
        "f got 3 slices, one for each of 2 devices",
    ),
    "sizes that differ": (
        lambda pmap: pmap(_f)(rows(8), {"a": rows(4)}),
        ValueError,
        _NO_DIMENSION.format("8 slices in args[0], 4 slices in args[1]['a']"),
    ),
    "a number": (
        lambda pmap: pmap(_f)(rows(8), 3.0),
        ValueError,
        _NO_DIMENSION.format("8 slices in args[0], no slices in args[1]"),
    ),
    "a number by keyword": (
        lambda pmap: pmap(_f)(rows(8), y=3.0),
        ValueError,
        _NO_DIMENSION.format("8 slices in args[0], no slices in kwargs['y']"),
    ),
    "nothing that is mapped": (
        lambda pmap: pmap(_f, in_axes=None)(rows(8)),
        ValueError,
        _NO_DIMENSION.format("no argument that is mapped"),
    ),
    "no arguments": (
        lambda pmap: pmap(_f)(),
        ValueError,
        _NO_DIMENSION.format("no argument that is mapped"),
    ),
    "another size": (
        lambda pmap: pmap(_f, axis_size=4)(rows(8)),
        ValueError,
        "f got 8 slices; axis_size=4",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_it_refuses_what_pmap_refuses(name: str):
    case, kind, message = _REFUSED[name]

    with pytest.raises(kind) as caught:
        case(mapped)
    assert str(caught.value) == message
    if not ((_IS_OLD or _IS_EARLY) and name == "no devices"):
        with pytest.raises((ValueError, TypeError, AssertionError)):
            case(jax.pmap)


def test_results_of_a_dimension_from_behind():
    """jax.pmap gives another shape than the one that it was asked for."""
    with pytest.raises(ValueError, match="^f: -1 in out_axes; axes count from the front"):
        mapped(_f, out_axes=-1)(rows(8, 3))


def test_axes_of_nothing_may_be_any():
    """equinox.filter_pmap has one tree for each axis there may be, and most are empty."""
    out_axes = [-1, 0, None]
    result = mapped(lambda x: [None, x * 2, ()], out_axes=out_axes)(rows(8))

    assert result[1].tolist() == (rows(8) * 2).tolist()


@jax.tree_util.register_pytree_node_class
class _Count:
    """Makes arrays of numbers, as brax.training.types.UInt64 does."""

    def __init__(self, number: Any) -> None:
        self.number = jnp.uint32(number) if isinstance(number, (int, jax.Array)) else number

    def tree_flatten(self) -> tuple[Any, None]:
        return (self.number,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "_Count":
        return cls(*children)


def test_a_node_that_makes_arrays_of_numbers():
    counts = jnp.arange(8, dtype=jnp.uint32)
    result = mapped(lambda c, x: (_Count(c.number + 1), x))(_Count(counts), rows(8))

    assert result[0].number.tolist() == list(range(1, 9))


def test_axes_that_do_not_fit_are_explained():
    with pytest.raises(ValueError, match="f: in_axes does not fit. Its first part is for the arg"):
        mapped(_f, in_axes=(0, 0))(rows(8))
    with pytest.raises(ValueError, match="f: out_axes does not fit"):
        mapped(_f, out_axes=(0, 0, 0))(rows(8))


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine"), ZeroDivisionError("mine")])
def test_errors_of_the_function_stay_what_they_are(error: Exception):
    def fails(x: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        mapped(fails)(rows(8))
    assert caught.value is error


# --- how often it compiles


class _Counted:
    def __init__(self) -> None:
        self.traces = 0

    def __call__(self, x: Any) -> Any:
        self.traces += 1
        return x * 2

    def method(self, x: Any) -> Any:
        self.traces += 1
        return x * 3


def test_a_function_that_is_mapped_again_is_not_compiled_again():
    counted = _Counted()
    for _ in range(3):
        mapped(counted)(rows(8))
        mapped(counted, "i")(rows(8))

    assert counted.traces == 2


def test_a_method_that_is_mapped_again_is_not_compiled_again():
    counted = _Counted()
    for _ in range(3):
        mapped(counted.method)(rows(8))

    assert counted.traces == 1


def test_each_size_is_compiled_once():
    counted = _Counted()
    call = mapped(counted)
    for size in (8, 2, 8, 2):
        call(rows(size))

    assert counted.traces == 2


def test_objects_that_are_equal_are_not_taken_for_one():
    class Equal(Model):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

        def __call__(self, x: Any) -> Any:
            return x * self.scale

    one, two = Equal(1.0), Equal(2.0)

    assert mapped(one)(np.ones(8)).tolist() == [1.0] * 8
    assert mapped(two)(np.ones(8)).tolist() == [2.0] * 8
    assert mapped(two.apply)(np.ones(8)).tolist() == [2.0] * 8


def test_what_cannot_be_held_weakly_or_hashed_is_mapped():
    class Closed:
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x + 1

    assert mapped(Closed())(np.zeros(8)).tolist() == [1.0] * 8
    assert mapped(lambda x, y: x, in_axes=({"a": 0}, [0]))({"a": np.zeros(8)}, [np.zeros(8)])


def test_memory_goes_with_the_function():
    model = Model(2.0)
    call = mapped(model.apply)
    call(np.ones(8))
    alive = weakref.ref(model)
    known = len(module._programs.known)
    del model, call
    gc.collect()

    assert alive() is None
    assert len(module._programs.known) < known


def test_a_function_lives_as_long_as_what_is_made_of_it():
    call = mapped(lambda x: x + 1)
    gc.collect()

    assert call(np.zeros(8)).tolist() == [1.0] * 8
    assert call.__name__ == "<lambda>"


def test_many_threads_get_one_program():
    counted = _Counted()
    call = mapped(counted)
    if _IS_OLD:
        pytest.skip("threads that index one result end jax 0.7.2")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: call(np.full(8, i))[0].item(), range(64)))

    assert found == [i * 2 for i in range(64)]


def test_donation_takes_positions_not_names():
    def step(state: Any, batch: Any) -> Any:
        return state + batch

    state, batch = (mapped(lambda x: x)(rows(8, 2)) for _ in range(2))
    mapped(step, donate_argnums=(0,))(state=state, batch=batch)

    assert not state.is_deleted()


def test_what_lay_elsewhere_once_may_lie_right_the_next_time():
    call = mapped(lambda x, y: x * y, in_axes=(0, None))
    elsewhere = jax.device_put(jnp.full(2, 3.0), jax.devices()[3])
    for shared in (elsewhere, 3.0, elsewhere, np.full(2, 3.0, np.float32)):
        assert call(np.ones((8, 2)), shared).tolist() == [[3.0, 3.0]] * 8


def test_lower():
    call = mapped(lambda x, n: x * n, "i", static_broadcasted_argnums=1)
    lowered = call.lower(jax.ShapeDtypeStruct((4, 2), np.float32), 3)

    assert lowered.compile()(np.ones((4, 2), np.float32)).tolist() == [[3.0, 3.0]] * 4


# --- several processes


def test_several_processes():
    """Two, with 4 devices each."""
    outcomes = run_processes(in_processes.run, cpu_devices=4, timeout=300)

    assert [outcome.error for outcome in outcomes] == [None, None]
    for found in (outcome.value for outcome in outcomes):
        assert found["mapped"] == found["pmap"]
        assert found["fewer"] == {  # where jax.pmap fails on an assertion of its own
            4: ([412.0] * 4, [0, 1, 2, 3]),
            2: ([202.0] * 2, [0, 1]),
            1: ([100.0], [0]),
        }
        message = (
            "f, mapped over 2 processes, is called inside jit, grad or vmap, where a process has "
            "only its own slices: put these inside the function"
        )
        assert found["refused"] == {
            "in jit": message,
            "in jit, of what it captures": message,
            "in grad": message,
            "too many slices": "f got 5 slices, one for each of 4 devices",
            "another size": "f got 8 slices; axis_size=4",
        }


# --- the other functions


def test_device_put_sharded_and_replicated():
    devices = jax.devices()[1:4]
    trees = [{"a": np.full(2, i), "b": (i,)} for i in range(3)]
    x = {"a": np.ones(2), "b": 3}

    sharded = device_put_sharded(trees, devices)
    copies = device_put_replicated(x, devices)

    assert sharded["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert sharded["b"][0].tolist() == [0, 1, 2]
    assert copies["a"].tolist() == [[1, 1]] * 3
    for leaf in jax.tree.leaves((sharded, copies)):
        assert [shard.device for shard in leaf.addressable_shards] == devices
        assert all(shard.data.shape[0] == 1 for shard in leaf.addressable_shards)
    with pytest.raises(ValueError, match="^2 shards for 3 devices$"):
        device_put_sharded(trees[:2], devices)


def test_whole_copies_and_copies_with_an_axis():
    x = {"a": jnp.arange(3.0), "b": 2}
    whole = replicated(x)
    stacked = with_device_axis(whole)

    assert whole["a"].tolist() == [0, 1, 2]
    assert whole["a"].sharding.device_set == set(jax.devices())
    assert stacked["a"].tolist() == [[0, 1, 2]] * 8
    assert mapped(lambda x: x)(stacked["b"]).tolist() == [2] * 8
    assert replicated(stacked, jax.devices()[:2])["a"].shape == (8, 3)


def test_a_copy_is_not_donated_with_what_it_was_made_of():
    x = jnp.arange(3.0)
    copy = replicated(x)
    jax.jit(lambda x: x + 1, donate_argnums=0)(copy)

    assert x.tolist() == [0, 1, 2]


def test_blocks_of_shard_map_lose_their_axis():
    mesh = jax.sharding.Mesh(jax.devices(), ("i",))
    spec = jax.sharding.PartitionSpec
    fun = per_device(lambda x, w: (x * w["s"], lax.psum(x, "i")), (1, None), (0, None))
    call = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(spec(None, "i"), spec()),
        out_specs=(spec("i"), spec()),
        check_vma=False,
    )
    x = rows(2, 8)

    scaled, total = jax.jit(call)(x, {"s": 2.0})

    assert scaled.tolist() == (x.T * 2).tolist()
    assert total.tolist() == x.sum(1).tolist()


def test_importing_it_asks_for_no_devices():
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(_FOLDER)!r})\n"
        "import mapped\n"
        "f = mapped.mapped(lambda x: x, 'i', donate_argnums=0)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )

    assert run.stdout == "False\n"


def test_it_uses_public_names_only():
    text = pathlib.Path(module.__file__).read_text()

    assert "_src" not in text
    assert "jax_dist" not in text.replace("jax-dist", "")
    assert "numpy as" not in text
