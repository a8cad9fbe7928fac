"""A new program is agreed upon: processes that differ get an error, and not wrong numbers.

With jax.pmap, psum(x) in one process and psum(2 * x) in the other give 6 in both, where 4 and 8 are
right; unequal shapes give wrong numbers or hang.
"""

import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors
from jax_dist._multihost import agreement
from jax_dist.testing import run_processes


def one(x: jax.Array) -> jax.Array:
    return lax.psum(x.sum(), "i")


def two(x: jax.Array) -> jax.Array:
    return lax.psum(2 * x.sum(), "i")


def late(x: jax.Array) -> jax.Array:
    return lax.psum(4 * x.sum(), "i")


def scaled(offset: float, x: jax.Array, factor: float, again: float) -> jax.Array:
    return lax.psum(x.sum() * factor * again + offset, "i")


def everything(folder: str) -> dict[str, dict[str, object]]:
    """Run in both processes: all rows, in one job; by test."""
    by_test = {arrays: pmap_rows(arrays, pathlib.Path(folder)) for arrays in ("local", "global")}
    return by_test | {"rewritten": rewrite_rows()}


def pmap_rows(arrays: str, folder: pathlib.Path) -> dict[str, object]:
    rank, local = jax.process_index(), jax.local_device_count()
    x = np.ones((local, 3), np.float32)

    def mapped(fun: Callable, **options: object) -> Callable:
        return jax_dist.pmap(fun, "i", arrays=arrays, **options)

    first, second, slow = mapped(one), mapped(two), mapped(late)
    shaped = mapped(lambda x: lax.psum(x.sum(), "i"))
    branched = mapped(lambda x: (lax.pmax if rank else lax.psum)(x.sum(), "i"))
    lowered = mapped(lambda x: lax.psum(3 * x.sum(), "i"))
    static = mapped(scaled, static_broadcasted_argnums=(0, 2, 3))
    found: dict[str, object] = {
        "another order": _outcome(second if rank else first, x),
        "then in order": [_outcome(first, x), _outcome(first, x), _outcome(second, x)],
        "shapes": _outcome(shaped, np.ones((local, 3 + rank), np.float32)),
        "a branch": _outcome(branched, x),
        "static": _outcome(static, 0.0, x, 2.0 + rank, 1.0),
        "the last static": _outcome(static, 0.0, x, 5.0, 7.0 + rank),
        "same static": _outcome(static, 0.0, x, 2.0, 1.0),
        "static, after all agreed": _outcome(static, 0.0, x, 2.0, 3.0 + rank),
    }
    if rank == 0:
        only = jax_dist.pmap(one, "i", devices=jax.local_devices())
        found["own devices"] = _outcome(only, x)
        found["no collective"] = _outcome(mapped(lambda x: x.sum()), x)
        lowered.lower(x)  # JAX remembers this trace, and will not trace for the call
    found["lowered by one"] = [_outcome(lowered, x), _outcome(lowered, x)]
    found["late"] = _late(slow, x, folder / f"nobody waits any more, {arrays}")
    found["after all"] = _outcome(first, x)
    return found


def _late(fun: Callable, x: np.ndarray, given_up: pathlib.Path) -> str | list[float]:
    """Rank 1 comes when rank 0 has given up."""
    agreement.program_timeout, usual = 1.0, agreement.program_timeout
    while jax.process_index() == 1 and not given_up.exists():
        time.sleep(0.02)
    found = _outcome(fun, x)
    given_up.touch()
    agreement.program_timeout = usual
    return found


def rewrite_rows() -> dict[str, object]:
    rank, local = jax.process_index(), jax.local_device_count()
    mesh = Mesh(np.array(jax.devices()), ("i",))
    ones = np.ones((local, 3), np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), ones)

    def rewritten(fun: Callable) -> Callable:
        return jax_dist.rewrite(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P()))

    first, second = rewritten(one), rewritten(two)
    lowered = rewritten(lambda x: lax.psum(3 * x.sum(), "i"))
    found: dict[str, object] = {
        "another order": _outcome(second if rank else first, x),
        "then in order": [_outcome(first, x), _outcome(first, x), _outcome(second, x)],
    }
    if rank == 0:
        lowered.lower(x)
        jax.eval_shape(lowered, x)
        found["own devices"] = float(jax_dist.rewrite(lambda x: x.sum())(ones))
    found["lowered by one"] = [_outcome(lowered, x), _outcome(lowered, x)]
    return found


def _outcome(fun: Callable, *args) -> str | list[float]:
    try:
        return [shard.data.item() for shard in fun(*args).addressable_shards]
    except errors.DisagreementError as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, dict]]:
    """Return the outcome of each rank, by test."""
    folder = str(tmp_path_factory.mktemp("job"))
    outcomes = run_processes(everything, folder, processes=2, cpu_devices=2, timeout=180)
    assert [outcome.error for outcome in outcomes] == [None, None]
    return [outcome.value for outcome in outcomes]


_REDUCTIONS = "rank 0: psum over i: float32[]; rank 1: pmax over i: float32[]"
_DIFFERENCES = {  # lines of the error, by row
    "another order": "; rank 1: pmap of 'two' (test_agreed_programs.py:",
    "a branch": f"\n  collective 1: {_REDUCTIONS}",
    "static": "\n  static argument 2: rank 0: float 2.0; rank 1: float 3.0",
    "the last static": "\n  static argument 3: rank 0: float 7.0; rank 1: float 8.0",
    "static, after all agreed": "\n  static argument 3: rank 0: float 3.0; rank 1: float 4.0",
}
_VALUES = {
    "then in order": [[12.0, 12.0], [12.0, 12.0], [24.0, 24.0]],
    "lowered by one": [[36.0, 36.0], [36.0, 36.0]],
}


@pytest.mark.parametrize(("arrays", "size"), [("local", 2), ("global", 4)])
def test_pmaps_are_agreed_upon(found, arrays, size):
    first, other = (dict(outcomes[arrays]) for outcomes in found)

    assert first.pop("own devices") == [6.0, 6.0]
    assert first.pop("no collective") == [3.0, 3.0]
    late = [outcomes.pop("late") for outcomes in (first, other)]
    assert all(text.startswith("MissingProcessesError: pmap of 'late' (test") for text in late)
    assert "timed out after 1 s; missing rank 1." in late[0]
    assert "timed out after 1 s; the last process came late." in late[1]
    assert first == other
    assert "different calls: rank 0: pmap of 'one' (test_agreed_" in first["another order"]
    assert f"\n  x: rank 0: float32[{size},3]; rank 1: float32[{size},4]" in first["shapes"]
    for row, line in _DIFFERENCES.items():
        assert line in first[row]
    values = _VALUES | {"same static": [24.0, 24.0], "after all": [12.0, 12.0]}
    assert {row: first[row] for row in values} == values


def test_rewritten_functions_are_agreed_upon(found):
    first, other = (dict(outcomes["rewritten"]) for outcomes in found)

    assert first.pop("own devices") == 6.0
    assert first == other
    assert "rank 0: 'one' (test_agreed_programs.py:" in first["another order"]
    assert "rank 1: 'two' (test_agreed_programs.py:" in first["another order"]
    assert {row: first[row] for row in _VALUES} == _VALUES
