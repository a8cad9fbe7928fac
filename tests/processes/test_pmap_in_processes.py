"""pmap in real processes: what jax.pmap gets wrong there, equal to one process with 8 devices.

Every process runs `everything`: `rows`, of which it reports the slices that it holds, and the
checks, of which it reports those that fail. The parent joins the rows in the order of processes.
Expected is what the same function gives in this process, on 8 simulated devices.
"""

import functools
import re
import traceback
import warnings
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from process_rows import assert_equal, held_slices, own_slices, values_of

import jax_dist
from jax_dist import errors


def _pmap(fun: Callable, **options: Any) -> Callable:
    return jax_dist.pmap(fun, "i", **options)


def _psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i")


def _step(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i") / 8 + x


def _nested(x: jax.Array) -> jax.Array:
    return jax_dist.pmap(lambda y: lax.psum(y, ("i", "j")) + lax.axis_index("j"), "j")(x)


def _scanned(x: jax.Array) -> jax.Array:
    step = _pmap(_step)
    return lax.scan(lambda c, _: (step(c), None), x, None, length=3)[0]


def _under_another_mesh(x: np.ndarray) -> jax.Array:
    with jax.set_mesh(Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))):
        return _pmap(_psum)(x)


@functools.cache
def rows(names: Collection[str] = ()) -> dict[str, list]:
    """Run in every process: each row the slices that it holds of the result; these, or all."""
    total, step = _pmap(_psum), _pmap(_step)
    square, weighted = _pmap(lambda x: _psum(x) ** 2), _pmap(lambda x: x * _psum(x))
    square_gradient = jax.grad(lambda x: square(x).sum())
    over_columns = functools.partial(jax.vmap, in_axes=1, out_axes=1)
    warnings.filterwarnings("ignore", "JXD401")
    x, pairs, key = own_slices(), own_slices().reshape(-1, 2), jax.random.key(3)
    two = np.stack([x, 2 * x], 1)
    noise = lambda key: jax.random.uniform(jax.random.fold_in(key, lax.axis_index("i")))
    weak = jnp.full((300,), 2.5)
    weak_there = jax.device_put(weak, jax.local_devices()[-1])
    ring = [(k, (k + 1) % 8) for k in range(8)]
    calls: dict[str, Callable[[], jax.Array]] = {
        "alone": lambda: total(x),
        "jit": lambda: jax.jit(total)(x),
        "scan": lambda: _scanned(x),
        "jit(scan)": lambda: jax.jit(_scanned)(x),
        "fori_loop": lambda: lax.fori_loop(0, 3, lambda _, c: step(c), x),
        "while_loop": lambda: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x)
        )[1],
        "cond": lambda: jax.jit(lambda x: lax.cond(x[0] < 100, total, lambda x: x, x))(x),
        "grad": lambda: square_gradient(x),
        "jit(grad)": lambda: jax.jit(jax.grad(lambda x: (weighted(x) ** 2).sum()))(x),
        "jvp": lambda: jax.jvp(weighted, (x,), (x + 1,))[1],
        "vmap": lambda: over_columns(total)(two),
        "vmap(grad)": lambda: over_columns(square_gradient)(two),
        "nested": lambda: _pmap(_nested)(pairs),
        "jit(nested)": lambda: jax.jit(_pmap(_nested))(pairs),
        "another mesh set": lambda: _under_another_mesh(x),
        "misplaced": lambda: total(jax.device_put(x, jax.local_devices()[-1])),
        "index": lambda: _pmap(lambda x: x * 0 + lax.axis_index("i"))(x),
        "ppermute": lambda: _pmap(lambda x: lax.ppermute(x, "i", ring))(x),
        "all_gather": lambda: _pmap(lambda x: lax.all_gather(x, "i"))(x),
        "second axis": lambda: _pmap(_step, in_axes=1)(own_slices(3).T),
        "integers under jit": lambda: jax.jit(total)(x.astype(np.int32)),
        "keys": lambda: _pmap(noise)(jax.random.split(jax.random.key(0), len(x))),
        "a captured key": lambda: _pmap(lambda x: x + noise(key))(x),
        "captured, of weak type": lambda: _pmap(lambda x: x + weak.sum())(x),
        "the same, on a device": lambda: _pmap(lambda x: x + weak_there.sum())(x),
    }
    return {name: held_slices(calls[name]()) for name in names or calls}


def results_are_the_view_of_each_process() -> None:
    """Check that results look as jax.pmap's do."""
    x, local = own_slices(3), jax.local_device_count()
    double_and_sum = lambda x: (x * 2, _psum(x))
    mapped = _pmap(double_and_sum, out_axes=(0, None))
    ours, total = mapped(x)
    again, _ = mapped(ours)
    theirs, their_total = jax.pmap(double_and_sum, "i", out_axes=(0, None))(x)
    inputs, state = [], jnp.zeros(local)
    step = _pmap(lambda s: s + 1, donate_argnums=0)
    for _ in range(3):
        inputs.append(state)
        state = step(state)
    on_own_devices = _pmap(_psum, devices=jax.local_devices())(own_slices())
    with_default = jax_dist.pmap(lambda s, by=2.0: s * by, donate_argnums=(0, 1))

    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(total, their_total)
    assert ours.is_fully_addressable
    assert total.is_fully_addressable
    assert [shard.device for shard in ours.addressable_shards] == jax.local_devices()
    np.testing.assert_array_equal(again, 4 * x)
    assert state.tolist() == [3.0] * local
    # Of the first, which is not on all devices, a copy is donated.
    assert [array.is_deleted() for array in inputs] == [False, True, True]
    assert on_own_devices.tolist() == [own_slices().sum()] * local
    assert with_default(np.ones(local, np.float32)).tolist() == [2.0] * local
    assert _weak_types(jax_dist.pmap) == _weak_types(jax.pmap)


def _weak_types(pmap: Callable) -> list[tuple]:
    """Return the weak types that body and caller see: `[L]`, captured `[300]`, replicated `[]`."""
    weak, runs = jnp.full((jax.local_device_count(),), 2.5), []
    table = jax.device_put(jnp.full((300,), 1.5), jax.local_devices()[-1])

    def body(x: jax.Array, y: jax.Array) -> tuple:
        runs.append((jax.typeof(x).weak_type, jax.typeof(y).weak_type))
        return x * 2, table, x * jnp.bfloat16(1), jnp.full((3,), 2.0), y

    mapped = pmap(body, "i", in_axes=(0, None))
    results = mapped(weak, 2.0)
    results = [*results, *mapped(results[0], 2.0)]
    return [*runs[:1], *((each.dtype.name, each.weak_type) for each in results)]


def captured_values_are_those_of_each_process() -> None:
    """Check that each captures values of its own, as a constant of jax.pmap's."""
    rank, x = jax.process_index(), own_slices()
    own = jax.device_put(jnp.full((300,), 1.0 + rank), jax.local_devices()[rank])
    for pmap in (jax_dist.pmap, jax.pmap):
        assert pmap(lambda x: _psum(x + own.sum()), "i")(x).tolist() == [28.0 + 4 * 900] * 4
    if rank == 0:  # nobody waits for a process that runs a program without collectives alone
        assert _pmap(lambda x: x + own.sum())(x).tolist() == [300.0 + k for k in range(4)]


def global_arrays_are_never_halved() -> None:
    """Check that no NumPy array of one process is taken as global, which gives 6 or 22 for 28."""
    step = _pmap(lambda s, b: s + _psum(b), donate_argnums=0, arrays="global")
    state: Any = np.zeros(jax.local_device_count(), np.float32)
    for _ in range(3):
        state = step(state, own_slices())  # the batch is NumPy and holds the slices of this process
    placed = jax_dist.shard(own_slices(), Mesh(np.array(jax.devices()), ("z",)), P("z"))
    sums = _whole_sum(placed), jax.jit(_whole_sum)(placed)

    assert (state.shape, state.is_fully_addressable) == ((8,), False)
    assert held_slices(state) == [84.0] * 4
    assert [held_slices(array) for array in sums] == [[28.0] * 4] * 2


_add = lambda x, y: x + y
_whole_sum = lambda x: _pmap(_psum, arrays="global")(x)
_in_turn = lambda: np.array(jax.devices()).reshape(2, 4).T.ravel()  # devices of each process
_MISFIT = "pass the 4 slices of this process, or global arrays of 8"
_MISTAKES = {  # by the class of the error: words of its text, and the call
    errors.MappedAxisError: {
        f"{_MISFIT} (x: 4, y: 5)": lambda: _pmap(_add)(own_slices(), np.ones(5)),
        f"{_MISFIT} (x: 4, y: 8)": lambda: _pmap(_add)(own_slices(), np.ones(8)),
        f"{_MISFIT} (x: 4, y: 3)": lambda: _pmap(_add, arrays="global")(own_slices(), np.ones(3)),
        "axis_size=4 does not match the mapped axis": lambda: _pmap(_psum, axis_size=4)(
            own_slices()
        ),
    },
    errors.DeviceCountError: {
        "needs 6 devices, but there are 4": lambda: _pmap(_psum)(np.ones(6)),
        "needs 8 devices, but there are 4": lambda: _pmap(_psum)(np.ones(8)),
        "8 devices, but there are 4": lambda: _whole_sum(np.ones(8)),
        "an axis of size 7 evenly over 2 processes": lambda: jax.jit(_whole_sum)(np.ones(7)),
        "be traced over these devices": lambda: jax.jit(_pmap(_psum, devices=_in_turn()))(
            own_slices()
        ),
    },
    errors.ArgumentError: {
        "got an array of this process only, while traced": lambda: jax.grad(
            lambda x: _pmap(_psum)(x).sum()
        )(_pmap(_psum)(own_slices())),
        "got devices of other processes. Pass jax.local_devices()": lambda: (
            jax_dist.device_put_replicated(own_slices(), jax.devices())
        ),
    },
}


def mistakes_are_the_same_error_in_every_process() -> None:
    """Check the errors, after which all processes can go on."""
    for kind, calls in _MISTAKES.items():
        for words, call in calls.items():
            with pytest.raises(kind, match=re.escape(words)):
                call()
    assert held_slices(_pmap(_psum)(own_slices())) == [28.0] * 4


_CHECKS = (
    results_are_the_view_of_each_process,
    captured_values_are_those_of_each_process,
    global_arrays_are_never_halved,
    mistakes_are_the_same_error_in_every_process,
)


def everything() -> tuple[dict[str, list], dict[str, str]]:
    """Run in each of two processes: return the rows, and the traces of checks that fail."""
    several, failures = rows(), {}
    for check in _CHECKS:
        try:
            check()
        except (AssertionError, pytest.fail.Exception):
            failures[check.__name__] = traceback.format_exc()
    return several, failures


_CALLS = 64  # without a wait in between: of 48 in flight on several CPUs, jax 0.10 hangs


def call_without_waiting() -> dict[str, list]:
    """Run in every process; by case, the last of many results of a collective."""
    zeros = np.zeros((jax.local_device_count(), 256), np.float32)
    same = _pmap(lambda x: lax.pmean(x, "i") + 1)
    donating = _pmap(lambda x: lax.pmean(x, "i") + 1, donate_argnums=0, arrays="global")
    several = [_pmap(lambda x, n=n: lax.pmean(x, "i") + n) for n in range(4)]

    def feed_back(mapped: Callable) -> Any:
        return functools.reduce(lambda x, _: mapped(x), range(_CALLS), zeros)

    results = {
        "same argument": [same(zeros) for _ in range(_CALLS)][-1],
        "fed back": feed_back(same),
        "donated": feed_back(donating),
        "functions in turn": [several[k % 4](zeros) for k in range(_CALLS)][-1],
    }
    return {case: [rows[0] for rows in held_slices(array)] for case, array in results.items()}


# Where it matters how many processes there are, and not only that there are several.
_IN_FOUR = ("alone", "jit(scan)", "jit(grad)", "nested", "another mesh set", "ppermute")


def test_rows_of_two_processes_equal_one_with_eight_devices():
    several, one = [value for value, _ in values_of(everything, processes=2)], rows()

    assert one["jit"] == [28.0] * 8  # jax.pmap inside jit sums over one process: 6 and 22
    # Each process splits the key for its own devices: the keys repeat, the indices do not.
    assert len({*several[0]["keys"], *several[1]["keys"]}) == len({*one["keys"]}) == 8
    assert_equal(several, {row: one[row] for row in one if row != "keys"})


def test_rows_of_four_processes_equal_one_with_eight_devices():
    several, one = values_of(rows, _IN_FOUR, processes=4), rows()

    assert_equal(several, {row: one[row] for row in _IN_FOUR})


@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: check.__name__)
def test_in_each_of_two_processes(check):
    failures = [failures for _, failures in values_of(everything, processes=2)]

    assert [failure.get(check.__name__) for failure in failures] == [None, None]


def test_many_calls_in_flight_do_not_hang():
    last = {"same argument": 1.0, "fed back": 64.0, "donated": 64.0, "functions in turn": 3.0}

    for values in values_of(call_without_waiting, processes=2):
        assert values == {case: [value] * 4 for case, value in last.items()}
