"""`agree`: its logic over an in-process service, with threads as ranks."""

import concurrent.futures
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dist._multihost.agreement import Comparison, Fingerprint, format_ranks
from jax_dist.errors import DisagreementError
from jax_dist.multihost import agree

_SOON = 0.2  # seconds for those that wait in vain


class _Tags(frozenset):
    """A set in an order of its own, as in processes with other hash seeds."""

    def __new__(cls, tags: str) -> "_Tags":
        new = super().__new__(cls, tags)
        new.order = tags
        return new

    def __iter__(self):
        return iter(self.order)


class FakeService:
    """The part of JAX's coordination service that is used: a store, and barriers."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._arrived: dict[str, int] = {}
        self._failed: set[str] = set()
        self._condition = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_delete(self, prefix: str) -> None:
        for key, _ in self.key_value_dir_get(prefix):
            del self.values[key]

    def wait_at_barrier(self, key: str, timeout_in_ms: int, process_ids: Sequence[int]) -> None:
        with self._condition:
            self._arrived[key] = self._arrived.get(key, 0) + 1
            self._condition.notify_all()
            is_full = lambda: self._arrived[key] == len(process_ids)
            if key in self._failed or not self._condition.wait_for(is_full, timeout_in_ms / 1000):
                self._failed.add(key)
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")


class Job:
    """Ranks that compare something, in threads of this process."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.service = FakeService()
        self._count = 0

    def compare(
        self, calls: dict[int, tuple[str, Any]], *, values: bool = False, timeout: float = 10.0
    ) -> dict[int, str]:
        """Return the error of each rank, or ''."""
        self._count += 1

        def compare_one(rank: int) -> str:
            name, tree = calls[rank]
            comparison = Comparison(self.service, rank, self.ranks, "job", self._count)
            try:
                comparison.compare(name, Fingerprint.take(tree, values=values), timeout)
            except DisagreementError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            return dict(zip(calls, pool.map(compare_one, calls), strict=True))


_WEAK = jnp.full((3,), 2.0)
_DIFFERENT: dict[str, tuple[Any, Any, bool, str]] = {
    "shape": (np.zeros(2), np.zeros(3), False, "the value: rank 0: float64[2]; rank 1: float64[3]"),
    "dtype": ({"x": np.int8(1)}, {"x": np.int16(1)}, False, "['x']: rank 0: int8[]; rank 1: int16"),
    "weak type": (_WEAK, _WEAK.astype(np.float32), False, "float32[3] weak; rank 1: float32[3]"),
    "number": ({"seed": 1}, {"seed": 2}, False, "['seed']: rank 0: int 1; rank 1: int 2"),
    "number and its type": (1, 1.0, False, "rank 0: int 1; rank 1: float 1.0"),
    "string": (["a"], ["b"], False, "[0]: rank 0: str 'a'; rank 1: str 'b'"),
    "long string": ("a" * 99, "a" * 98 + "b", False, "... sha256 "),
    "missing leaf": ({"x": 1}, {"x": 1, "y": 2}, False, "['y']: rank 0: nothing; rank 1: int 2"),
    "None": ({"x": None}, {"x": 1}, False, "['x']: rank 0: None; rank 1: int 1"),
    "containers": ((1, 2), [1, 2], False, "containers: rank 0: tuple(*,*); rank 1: list(*,*)"),
    "value": (np.arange(2), np.arange(2) + 1, True, "= [0, 1] (sha256 "),
    "value of many": (np.zeros(9), np.ones(9), True, "rank 0: float64[9] (sha256 "),
    "sign of zero": (np.float32(0.0), np.float32(-0.0), True, "= 0.0 (sha256 "),
    "keys": (jax.random.key(0), jax.random.key(1), True, "key<fry>[] = [0, 0] (sha256 "),
}


@pytest.mark.parametrize("case", _DIFFERENT)
def test_a_difference_is_named_in_every_rank(case):
    first, second, values, text = _DIFFERENT[case]

    errors = Job([0, 1]).compare({0: ("at", first), 1: ("at", second)}, values=values)

    assert errors[0] == errors[1]
    assert errors[0].startswith("DisagreementError: at differs between processes:\n  ")
    assert text in errors[0]


_EQUAL: dict[str, tuple[Any, Any, bool]] = {
    "values without values": (np.zeros(2), np.ones(2), False),
    "NaN": (np.float32("nan"), np.float32("nan"), True),
    "NumPy and jax arrays": (np.ones(2, np.float32), jnp.ones(2), False),
    "functions at other addresses": (lambda: 1, lambda: 1, False),
    "sets": (_Tags("ab"), _Tags("ba"), False),
    "nothing": (None, None, False),
}


@pytest.mark.parametrize("case", _EQUAL)
def test_equal_trees_agree(case):
    first, second, values = _EQUAL[case]

    errors = Job([3, 5]).compare({3: ("at", first), 5: ("at", second)}, values=values)
    assert errors == {3: "", 5: ""}


def test_other_calls_are_named():
    calls = {0: ("agree('a')", 1), 1: ("agree('b')", 1), 2: ("agree('a')", 2)}

    assert set(Job([0, 1, 2]).compare(calls).values()) == {
        "DisagreementError: Processes made different calls: ranks 0, 2: agree('a'); "
        "rank 1: agree('b'). All processes must make the same calls in the same order."
    }


def test_missing_ranks_are_named_and_the_job_goes_on():
    job = Job(range(4))
    calls = {rank: ("at", 1) for rank in range(4)}

    errors = job.compare({0: calls[0], 3: calls[3]}, timeout=_SOON)

    text = "MissingProcessesError: at timed out after 0.2 s; missing ranks 1-2. "
    assert all(error.startswith(text) for error in errors.values())
    late = Comparison(job.service, 1, job.ranks, "job", 1)
    with pytest.raises(TimeoutError, match="missing rank 2"):
        late.compare("at", Fingerprint.take(1), _SOON)
    assert set(job.compare(calls).values()) == {""}


def test_many_differences_are_cut():
    trees = [{f"leaf {n}": n + rank for n in range(30)} for rank in range(2)]

    errors = Job([0, 1]).compare({rank: ("at", tree) for rank, tree in enumerate(trees)})

    assert errors[0].count("\n") == 21
    assert errors[0].endswith("\n  and 10 more")


def test_the_store_does_not_grow():
    job = Job([0, 1])
    for _ in range(5):
        job.compare({0: ("at", 1), 1: ("at", 1)})
        assert len(job.service.values) == 2


def test_one_process_agrees_with_itself():
    agree("here", {"x": np.zeros(3)}, values=True, timeout=0.1)
    agree("here", jax.eval_shape(lambda: jnp.ones(3)), values=True)


def test_ranks_in_words():
    ranks = [[4], [0, 1], [5, 0, 1, 2], [1, 3]]
    assert list(map(format_ranks, ranks)) == ["rank 4", "ranks 0-1", "ranks 0-2, 5", "ranks 1, 3"]
