"""Calls without a wait in between: more than 32 in flight hang jax 0.10 on several CPUs."""

import itertools

import jax
import numpy as np
from jax import lax

import jax_dist
from jax_dist.testing import run_processes

_CALLS = 64  # of 48 without a wait, jax 0.10 hangs


def call_without_waiting() -> dict[str, list[float]]:
    """Run in every process; by case, the last of many results of a collective."""
    mean = lambda x: lax.pmean(x, "i") + 1
    zeros = np.zeros((jax.local_device_count(), 256), np.float32)
    same = jax_dist.pmap(mean, "i")
    donating = jax_dist.pmap(mean, "i", donate_argnums=0, arrays="global")
    several = [jax_dist.pmap(lambda x, n=n: lax.pmean(x, "i") + n, "i") for n in range(4)]
    calls = itertools.islice(itertools.cycle(several), _CALLS)
    results = {
        "same argument": [same(zeros) for _ in range(_CALLS)][-1],
        "fed back": zeros,
        "donated": zeros,
        "functions in turn": [call(zeros) for call in calls][-1],
    }
    for _ in range(_CALLS):
        results["fed back"] = same(results["fed back"])
    for _ in range(_CALLS):
        results["donated"] = donating(results["donated"])
    first = lambda array: [float(shard.data.ravel()[0]) for shard in array.addressable_shards]
    return {case: first(array) for case, array in results.items()}


def test_two_processes_do_not_hang():
    outcomes = run_processes(call_without_waiting, processes=2, cpu_devices=2, timeout=120)

    assert [outcome.error for outcome in outcomes] == [None, None]
    expected = {"same argument": 1.0, "fed back": 64.0, "donated": 64.0, "functions in turn": 3.0}
    for outcome in outcomes:
        assert outcome.value == {case: [value] * 2 for case, value in expected.items()}
