"""pmap in real processes: what jax.pmap gets wrong there, equal to one process with 8 devices.

The children run `rows`, which reports the slices that each process holds; the parent joins them in
the order of processes. Expected is what the same function gives in this process, on 8 simulated
devices; for some rows the numbers stand here as they are known.
"""

import functools
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist.testing import run_processes

pytestmark = pytest.mark.mapping


def _own(*shape: int) -> np.ndarray:
    """The slices of this process of `arange` over `[8, *shape]`."""
    whole = np.arange(8 * int(np.prod(shape)), dtype=np.float32).reshape(8, *shape)
    local = jax.local_device_count()
    start = jax.process_index() * local
    return whole[start : start + local]


def _slices(array: jax.Array) -> list:
    """What the devices of this process hold, in order, as nested lists."""
    whole = np.zeros(array.shape, array.dtype)
    held = np.zeros(len(whole), bool)
    for shard in array.addressable_shards:
        whole[shard.index] = shard.data
        held[shard.index[0]] = True
    return whole[held].tolist()


def _psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i")


def _step(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i") / 8 + x


def _nested(x: jax.Array) -> jax.Array:
    return jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")) + lax.axis_index("j"), "j")(x)


def rows(names: Collection[str] = ()) -> dict[str, list]:
    """Runs in every process: each row the slices that it holds of the result; these, or all."""
    total = jax_dist.pmap(_psum, "i")
    step = jax_dist.pmap(_step, "i")
    square = jax_dist.pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    weighted = jax_dist.pmap(lambda x: x * lax.psum(x, "i"), "i")
    warnings.filterwarnings("ignore", "JXD401")
    x, key = _own(), jax.random.key(3)
    weak = jnp.full((300,), 2.5)
    weak_there = jax.device_put(weak, jax.local_devices()[-1])
    calls: dict[str, Callable[[], jax.Array]] = {
        "alone": lambda: total(x),
        "jit": lambda: jax.jit(total)(x),
        "scan": lambda: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0],
        "jit(scan)": lambda: jax.jit(
            lambda x: lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]
        )(x),
        "fori_loop": lambda: lax.fori_loop(0, 3, lambda _, c: step(c), x),
        "while_loop": lambda: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x)
        )[1],
        "cond": lambda: jax.jit(lambda x: lax.cond(x[0] < 100, total, lambda x: x, x))(x),
        "grad": lambda: jax.grad(lambda x: square(x).sum())(x),
        "jit(grad)": lambda: jax.jit(jax.grad(lambda x: (weighted(x) ** 2).sum()))(x),
        "jvp": lambda: jax.jvp(weighted, (x,), (x + 1,))[1],
        "vmap": lambda: jax.vmap(total, in_axes=1, out_axes=1)(np.stack([x, 2 * x], 1)),
        "vmap(grad)": lambda: jax.vmap(jax.grad(lambda x: square(x).sum()), in_axes=1, out_axes=1)(
            np.stack([x, 2 * x], 1)
        ),
        "nested": lambda: jax_dist.pmap(_nested, "i")(_own().reshape(-1, 2)),
        "jit(nested)": lambda: jax.jit(jax_dist.pmap(_nested, "i"))(_own().reshape(-1, 2)),
        "another mesh set": lambda: _under_another_mesh(total, x),
        "misplaced": lambda: total(jax.device_put(x, jax.local_devices()[-1])),
        "index": lambda: jax_dist.pmap(lambda x: x * 0 + lax.axis_index("i"), "i")(x),
        "ppermute": lambda: jax_dist.pmap(
            lambda x: lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)]), "i"
        )(x),
        "all_gather": lambda: jax_dist.pmap(lambda x: lax.all_gather(x, "i"), "i")(x),
        "second axis": lambda: jax_dist.pmap(_step, "i", in_axes=1)(_own(3).T),
        "integers under jit": lambda: jax.jit(total)(x.astype(np.int32)),
        "keys": lambda: jax_dist.pmap(
            lambda key: jax.random.uniform(jax.random.fold_in(key, lax.axis_index("i"))), "i"
        )(jax.random.split(jax.random.key(0), len(x))),
        "a captured key": lambda: jax_dist.pmap(
            lambda x: x + jax.random.uniform(jax.random.fold_in(key, lax.axis_index("i"))), "i"
        )(x),
        "captured, of weak type": lambda: jax_dist.pmap(lambda x: x + weak.sum(), "i")(x),
        "the same, on a device": lambda: jax_dist.pmap(lambda x: x + weak_there.sum(), "i")(x),
        "virtual": lambda: jax_dist.pmap(
            lambda x: lax.psum(x, "i") + lax.axis_index("i"), "i", virtual=True
        )(_own(2).reshape(-1)),
    }
    return {name: _slices(calls[name]()) for name in names or calls}


# Where it matters how many processes there are, and not only that there are several.
_IN_FOUR = ("alone", "jit(scan)", "jit(grad)", "nested", "another mesh set", "ppermute", "virtual")


def rows_in_four() -> dict[str, list]:
    """Runs in every process: a few of the rows."""
    return rows(_IN_FOUR)


def _under_another_mesh(mapped: Callable, x: np.ndarray) -> jax.Array:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    with jax.set_mesh(mesh):
        return mapped(x)


_KNOWN = {  # jax.pmap inside jit, scan and cond sums over one process: 6 and 22 of these 28
    "alone": [28.0] * 8,
    "jit": [28.0] * 8,
    "cond": [28.0] * 8,
    "grad": [448.0] * 8,
    "jit(grad)": [7840.0 + 1568.0 * k for k in range(8)],
    "nested": [[28.0, 29.0]] * 4,
    "index": [float(k) for k in range(8)],
    "ppermute": [7.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "another mesh set": [28.0] * 8,
    "misplaced": [28.0] * 8,
    "integers under jit": [28] * 8,
    "virtual": [120.0 + k for k in range(16)],
}


def parts() -> dict[str, Any]:
    """Runs in each of two processes: the rows, and all that is below, in one job."""
    tasks = (rows, local_view, own_values, global_arrays, mistakes)
    return {task.__name__: task() for task in tasks}


@functools.cache
def _parts() -> list[dict[str, Any]]:
    return _values_of(parts, processes=2, cpu_devices=4)


def _of_each_process(part: Callable) -> list[Any]:
    return [values[part.__name__] for values in _parts()]


def _values_of(work: Callable, *, processes: int, cpu_devices: int) -> list[Any]:
    outcomes = run_processes(work, processes=processes, cpu_devices=cpu_devices, timeout=240)
    assert [outcome.error for outcome in outcomes] == [None] * processes
    return [outcome.value for outcome in outcomes]


def _joined(values: list[dict[str, list]]) -> dict[str, list]:
    """The rows of all processes."""
    return {name: [slice_ for value in values for slice_ in value[name]] for name in values[0]}


@functools.cache
def _in_one_process() -> dict[str, list]:
    return rows()


@pytest.mark.parametrize("row", sorted(_KNOWN))
def test_the_numbers_as_they_are_known(row):
    np.testing.assert_allclose(_joined(_of_each_process(rows))[row], _KNOWN[row], rtol=1e-6)


def test_all_rows_equal_one_process_with_eight_devices():
    several, one = _joined(_of_each_process(rows)), dict(_in_one_process())

    assert set(several) == set(one)
    # Each process splits the key for its own devices: the keys repeat, the indices do not.
    assert len(set(several.pop("keys"))) == len(set(one.pop("keys"))) == 8
    _assert_equal(several, one)


def test_rows_of_four_processes_equal_one_with_eight_devices():
    several = _joined(_values_of(rows_in_four, processes=4, cpu_devices=2))
    one = _in_one_process()

    assert set(several) == {*_IN_FOUR}
    _assert_equal(several, {row: one[row] for row in _IN_FOUR})


def _assert_equal(several: dict[str, list], one: dict[str, list]) -> None:
    for row, expected in one.items():
        np.testing.assert_allclose(several[row], expected, rtol=1e-5, err_msg=row)


def local_view() -> dict[str, Any]:
    """Runs in every process: results look as jax.pmap's do."""
    x = _own(3)
    mapped = jax_dist.pmap(lambda x: (x * 2, lax.psum(x, "i")), "i", out_axes=(0, None))
    theirs = jax.pmap(lambda x: (x * 2, lax.psum(x, "i")), "i", out_axes=(0, None))
    ours, total = mapped(x)
    again, _ = mapped(ours)
    old, old_total = theirs(x)
    devices = [shard.device for shard in ours.addressable_shards]
    given = []
    step = jax_dist.pmap(lambda s: s + 1, "i", donate_argnums=0)
    state = jnp.zeros(jax.local_device_count())
    for _ in range(3):
        given.append(state)
        state = step(state)
    own = jax_dist.pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.local_devices())(_own())
    with_default = jax_dist.pmap(lambda s, by=2.0: s * by, donate_argnums=(0, 1))
    weak = [_types(pmap) for pmap in (jax_dist.pmap, jax.pmap)]
    return {
        "same as jax.pmap": bool((ours == old).all()) and bool((total == old_total).all()),
        "fully addressable": ours.is_fully_addressable and total.is_fully_addressable,
        "on own devices": devices == jax.local_devices(),
        "fed back": bool((again == 4 * x).all()),
        "state": state.tolist(),
        "donated": [array.is_deleted() for array in given],
        "own devices only": own.tolist(),
        "donated, but left to its default": with_default(np.ones(4, np.float32)).tolist(),
        "weak types as with jax.pmap": weak[0] == weak[1],
    }


def _types(pmap: Callable) -> list[tuple]:
    """What the body and the caller see of weak types: `[L]`, captured `[300]` and shared `[]`."""
    weak, runs = jnp.full((jax.local_device_count(),), 2.5), []
    table = jax.device_put(jnp.full((300,), 1.5), jax.local_devices()[-1])

    def body(x: jax.Array, y: jax.Array) -> tuple:
        runs.append((jax.typeof(x).weak_type, jax.typeof(y).weak_type))
        return x * 2, table, x * jnp.bfloat16(1), jnp.full((3,), 2.0), y

    mapped = pmap(body, "i", in_axes=(0, None))
    results = mapped(weak, 2.0)
    results = [*results, *mapped(results[0], 2.0)]
    return [*runs[:1], *((each.dtype.name, each.weak_type) for each in results)]


def test_results_are_the_view_of_each_process():
    for rank, value in enumerate(_of_each_process(local_view)):
        assert value == {
            "same as jax.pmap": True,
            "fully addressable": True,
            "on own devices": True,
            "fed back": True,
            "state": [3.0] * 4,
            "donated": [True] * 3,
            "own devices only": [[6.0] * 4, [22.0] * 4][rank],
            "donated, but left to its default": [2.0] * 4,
            "weak types as with jax.pmap": True,
        }


def own_values() -> dict[str, Any]:
    """Runs in every process: each captures values of its own, as a constant of jax.pmap's."""
    warnings.filterwarnings("ignore", "JXD401")
    rank, x = jax.process_index(), _own()
    own = jax.device_put(jnp.full((300,), 1.0 + rank), jax.local_devices()[rank])
    summed = [
        pmap(lambda x: lax.psum(x + own.sum(), "i"), "i")(x).tolist()
        for pmap in (jax_dist.pmap, jax.pmap)
    ]
    # Nobody waits for a process that runs a program without collectives alone.
    alone = jax_dist.pmap(lambda x: x + own.sum(), "i")(x).tolist() if rank == 0 else None
    return {"summed": summed[0], "as with jax.pmap": summed[0] == summed[1], "alone": alone}


def test_captured_values_are_those_of_each_process():
    first, second = _of_each_process(own_values)

    summed = {"summed": [28.0 + 4 * 900] * 4, "as with jax.pmap": True}
    assert first == {**summed, "alone": [300.0 + k for k in range(4)]}
    assert second == {**summed, "alone": None}


def global_arrays() -> dict[str, Any]:
    """Runs in every process: arrays="global"."""
    step = jax_dist.pmap(lambda s, b: s + lax.psum(b, "i"), "i", arrays="global", donate_argnums=0)
    state: Any = np.zeros(jax.local_device_count(), np.float32)
    for _ in range(3):
        state = step(state, _own())  # the batch is NumPy and holds the slices of this process
    whole = jax_dist.pmap(_psum, "i", arrays="global")(np.arange(8, dtype=np.float32))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("z",))
    spec = jax.sharding.PartitionSpec("z")
    placed = jax_dist.shard(_own(), mesh, spec)
    turns = jax_dist.pmap(_psum, "i", arrays="global", virtual=True)
    return {
        "whole": (state.shape, state.is_fully_addressable),
        "state": _slices(state),
        "from an array of all slices": _slices(whole),
        "several slices a device": _slices(turns(np.arange(8, dtype=np.float32))),
        "from shard": _slices(jax_dist.pmap(_psum, "i", arrays="global")(placed)),
        "in jit": _slices(jax.jit(jax_dist.pmap(_psum, "i", arrays="global"))(placed)),
    }


def test_global_arrays_are_never_halved():
    # A NumPy array of one process taken as the global one gives 6 or 22, or 428 for 856.
    for value in _of_each_process(global_arrays):
        assert value == {
            "whole": ((8,), False),
            "state": [84.0] * 4,
            "from an array of all slices": [28.0] * 4,
            "several slices a device": [56.0] * 8,
            "from shard": [28.0] * 4,
            "in jit": [28.0] * 4,
        }


def mistakes() -> list[str]:
    """Runs in every process: the errors of calls that cannot be right."""
    x = _own()
    local = jax_dist.pmap(lambda x, y: x + y, "i")
    whole = jax_dist.pmap(lambda x, y: x + y, "i", arrays="global")
    mapped = jax_dist.pmap(_psum, "i")
    scattered = [d for pair in zip(jax.devices()[:4], jax.devices()[4:], strict=True) for d in pair]
    calls = [
        lambda: local(x, np.ones(5)),
        lambda: local(x, np.ones(8)),
        lambda: whole(x, np.ones(3)),
        lambda: mapped(np.ones(6)),
        lambda: mapped(np.ones(8)),
        lambda: jax.grad(lambda x: mapped(x).sum())(mapped(x)),
        lambda: jax.jit(jax_dist.pmap(_psum, "i", devices=scattered))(x),
        lambda: jax_dist.pmap(_psum, "i", axis_size=4)(x),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("no error")
    assert _slices(mapped(x)) == [28.0] * 4  # and all processes can go on
    return texts


def test_mistakes_are_the_same_error_in_every_process():
    first, second = _of_each_process(mistakes)

    assert first == second
    for text in first:
        _, *which, why, do = text.splitlines()
        assert which
        assert all(line.startswith("  * ") for line in which)
        assert why.startswith("Because ")
        assert (why[-1], do[-1]) == (".", ".")
    assert [text.splitlines()[0].partition(": pmap of ")[::2] for text in first] == [
        ("MappedAxisError", "'<lambda>' got arguments of different sizes along the mapped axis:"),
        ("PlacementError", "'<lambda>' cannot tell which slices this array holds:"),
        ("MappedAxisError", "'<lambda>' got arguments of different sizes along the mapped axis:"),
        ("DeviceCountError", "'_psum' needs 6 devices, but there are 4:"),
        ("DeviceCountError", "'_psum' needs 8 devices, but there are 4:"),
        ("PlacementError", "'_psum' got an array that only this process can see, while traced:"),
        ("DeviceCountError", "'_psum' cannot be traced over these devices:"),
        ("MappedAxisError", "'_psum' was promised axis_size=4, but received another:"),
    ]
