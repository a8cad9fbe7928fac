"""Calls without a wait in between: on older JAX, more than 32 in flight hang on several CPUs."""

import itertools
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist import _compat
from jax_dist._rewrite import programs
from jax_dist.testing import run_processes

pytestmark = pytest.mark.mapping

_CALLS = 64  # of 48 without a wait, jax 0.10 hangs


def call_without_waiting(kind: str) -> list[float]:
    """Runs in every process; the last of many results of a function with a collective."""
    mean = lambda x: lax.pmean(x, "i") + 1
    x = np.zeros((jax.local_device_count(), 256), np.float32)
    if kind == "pmap":
        mapped = jax_dist.pmap(mean, "i")
        return last([mapped(x) for _ in range(_CALLS)])
    if kind == "fed back":
        mapped = jax_dist.pmap(mean, "i")
        for _ in range(_CALLS):
            x = mapped(x)
        return last([x])
    if kind == "donated":
        mapped = jax_dist.pmap(mean, "i", donate_argnums=0, arrays="global")
        for _ in range(_CALLS):
            x = mapped(x)
        return last([x])
    several = [jax_dist.pmap(lambda x, n=n: lax.pmean(x, "i") + n, "i") for n in range(4)]
    calls = itertools.islice(itertools.cycle(several), _CALLS)
    return last([call(x) for call in calls])


def rewritten_without_waiting() -> list[float]:
    mapped = jax_dist.rewrite(jax.jit(jax.pmap(lambda x: lax.pmean(x, "i") + 1, "i")))
    x = np.zeros((jax.local_device_count(), 256), np.float32)
    return last([mapped(x) for _ in range(_CALLS)])


def last(results: list[jax.Array]) -> list[float]:
    return [float(shard.data.ravel()[0]) for shard in results[-1].addressable_shards]


def every_kind() -> list[list[float]]:
    return [call_without_waiting(kind) for kind in ("pmap", "fed back", "donated", "functions")]


def test_two_processes_do_not_hang():
    outcomes = run_processes(every_kind, processes=2, cpu_devices=2, timeout=120)

    assert [outcome.error for outcome in outcomes] == [None, None]
    expected = [[1.0, 1.0], [64.0, 64.0], [64.0, 64.0], [3.0, 3.0]]
    assert [outcome.value for outcome in outcomes] == [expected, expected]


@pytest.mark.thorough
def test_one_process_does_not_hang():
    program = (
        "import test_throttle as t\n"
        "print([each[0] for each in t.every_kind()])\n"
        "if t.jax_dist._compat.CAN_REWRITE: print(t.rewritten_without_waiting()[0])\n"
    )
    paths = [str(pathlib.Path(__file__).parents[2]), str(pathlib.Path(__file__).parent)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    ).stdout

    assert printed.splitlines()[0] == "[1.0, 64.0, 64.0, 3.0]"
    assert printed.splitlines()[1:] in ([], ["1.0"])


def test_every_sixteenth_call_waits_where_jax_hangs(monkeypatch):
    waited = []
    monkeypatch.setattr(programs, "turns", itertools.cycle([*[False] * 15, True]))
    monkeypatch.setattr(programs, "wait", waited.append)
    monkeypatch.setattr(programs, "can_be_full", lambda mesh: mesh.size > 1)
    mapped = jax_dist.pmap(lambda x: x + 1)
    mapped(np.zeros(8))  # which devices it runs on is known now

    results = [mapped(np.zeros(8)) for _ in range(49)]

    assert [id(result) for result in waited] == [id(results[n]) for n in (15, 31, 47)]


def test_one_call_in_sixteen_waits_and_no_other():
    """Were it each one, the numbers would be the same, and every loop as slow as its devices."""
    waits = [next(programs.turns) for _ in range(16 * 20)].count(True)

    assert waits == (20 if _compat.CPU_HANGS_WHEN_FULL else 0)


def test_a_single_device_waits_for_nobody(monkeypatch):
    waited = []
    monkeypatch.setattr(programs, "turns", itertools.repeat(object=True))
    monkeypatch.setattr(programs, "wait", waited.append)
    mapped = jax_dist.pmap(lambda x: x + 1)

    for _ in range(3):
        mapped(np.zeros(1))
    assert waited == []


def test_nobody_waits_for_tracers_or_for_nothing():
    jax.make_jaxpr(lambda x: programs.wait({"x": x}))(1.0)
    programs.wait(None)
    programs.wait([jax.numpy.zeros(3)])
