"""`run_processes`: what comes back from real processes, and how they end."""

import os
import pathlib
import subprocess
import sys

import pytest
import rank_functions

from jax_dist.testing import Outcome, run_processes

_SECONDS = 90  # far more than any test here should need


@pytest.fixture(scope="module")
def joined() -> list[Outcome]:
    """How two processes ended that did all that succeeds."""
    return run_processes(rank_functions.succeed, {"x": 2}, 3, processes=2, timeout=_SECONDS)


def test_processes_are_joined_and_report(joined):
    assert [outcome.error for outcome in joined] == [None, None]
    assert [outcome.value["summed"] for outcome in joined] == [[0, 6.0], [1, 6.0]]
    assert [outcome.value["added"] for outcome in joined] == [5, 5]
    assert [(outcome.rank, outcome.exit_code) for outcome in joined] == [(0, 0), (1, 0)]


def test_processes_agree(joined):
    settings = (
        "agree('settings') differs between processes:\n  ['seed']: rank 0: int 0; rank 1: int 1"
    )
    order = "Processes made different calls: rank 0: agree('order 0'); rank 1: agree('order 1')."
    first, other = (outcome.value["agreed"] for outcome in joined)

    assert first[:2] == other
    assert first[0] == settings
    assert first[1].startswith(order)
    assert first[2].startswith("agree('alone') timed out after 0.5 s; missing rank 1.")


def test_processes_are_preempted_at_the_same_step(joined):
    first, other = (outcome.value["preempted"] for outcome in joined)

    assert first == other
    assert first[1] == first[0] + 1 > 3  # and from then on


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_listens_on_all_interfaces(joined):
    first, other = (outcome.value["listeners"] for outcome in joined)

    assert first  # rank 0 does listen
    addresses = [listener.split(":")[0] for listener in [*first, *other]]
    assert [address for address in addresses if set(address) == {"0"}] == []


def test_what_the_environment_says_of_devices_is_not_inherited(monkeypatch):
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("JAX_PARTITION_INDEX", "5")

    (outcome,) = run_processes(
        rank_functions.settings, processes=1, cpu_devices=3, timeout=_SECONDS
    )

    assert outcome.value == ["--xla_cpu_enable_fast_math=false", "not set", "3", "gloo"]


_FAILURES: dict[str, tuple[type[Exception], str, int]] = {  # the error of rank 1, and its code
    "raise": (KeyError, "'batch'", 1),
    "leave": (RuntimeError, "rank 1 raised SystemExit: 3", 1),
    "odd": (RuntimeError, "rank 1 raised OddError: ab", 1),
    "unpicklable": (TypeError, "cannot pickle 'generator' object", 1),
    "killed": (RuntimeError, "rank 1 died with signal SIGKILL; its output ends:\n    ", -9),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", _FAILURES)
def test_a_failure_comes_back_and_the_others_are_ended(way):
    kind, text, code = _FAILURES[way]
    at_zero, at_one = run_processes(rank_functions.fail_on_rank_1, way, timeout=_SECONDS)

    assert type(at_one.error) is kind
    assert str(at_one.error).startswith(text)
    assert at_one.exit_code == code
    if way == "killed":
        assert at_one.output.endswith("about to go\n")
    else:
        (note,) = at_one.error.__notes__
        assert note.startswith("Raised in rank 1:\nTraceback (most recent call last):\n")
        assert "in fail_on_rank_1" in note or way == "unpicklable"
    assert at_zero.error is not None  # its collective has failed, or it was ended before
    assert at_zero.exit_code != 0


def test_a_rank_that_hangs_is_ended_and_says_where_it_was():
    at_zero, at_one = run_processes(rank_functions.fail_on_rank_1, "hang", timeout=12)

    assert (at_zero.value, at_zero.error) == ("done", None)
    assert type(at_one.error) is TimeoutError
    assert str(at_one.error).startswith("rank 1 was ended after 12 s; its output ends:\n")
    assert " in fail_on_rank_1\n" in str(at_one.error)


_SCRIPT = """\
import dataclasses
from jax_dist.testing import run_processes

@dataclasses.dataclass(frozen=True)
class Pair:
    x: int
    y: int

def count(start: Pair) -> Pair:
    return Pair(start.x + 1, start.y)

"""
_GUARDED = """\
if __name__ == "__main__":
    outcomes = run_processes(count, Pair(1, 2), processes=1, timeout=60)
    assert [o.value for o in outcomes] == [Pair(2, 2)], outcomes
    print("passed")
"""
_UNGUARDED = """\
(outcome,) = run_processes(count, Pair(1, 2), processes=1, timeout=60)
print(outcome.error)
"""


@pytest.mark.parametrize(
    ("end", "printed"),
    [
        (_GUARDED, "passed\n"),
        (_UNGUARDED, 'Call run_processes below `if __name__ == "__main__":` in a script.\n'),
    ],
    ids=["guarded", "not guarded"],
)
def test_functions_and_classes_of_a_script(tmp_path, end, printed):
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + end)
    paths = [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.stdout, done.stderr) == (printed, "")


@pytest.mark.parametrize(
    ("fun", "arguments", "name"),
    [(lambda: 1, [], "<lambda>"), (len, [(x for x in ())], "len")],
    ids=["a function", "an argument"],
)
def test_what_does_not_pickle_is_an_error(fun, arguments, name):
    with pytest.raises(TypeError, match=f"run_processes cannot pickle '{name}' and its arguments"):
        run_processes(fun, *arguments)
