"""`initialize`: where a process finds its place, what it passes to JAX, and in one process."""

import os
import signal
import threading
from typing import Any

import jax
import pytest

from jax_dist import _compat, multihost
from jax_dist._multihost import agreement, initialization, preemption
from jax_dist._multihost.initialization import JobPlace, find_job_place

_JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
_TORCHRUN = {"MASTER_ADDR": "b", "MASTER_PORT": "9", "WORLD_SIZE": "3", "RANK": "1"}
_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
_ADDRESS = {"JAX_COORDINATOR_ADDRESS": "a:1"}
_PLACES: dict[str, tuple[dict[str, str], JobPlace]] = {
    "nothing": ({}, JobPlace(None, None, None)),
    "JAX": (_JAX, JobPlace("a:1", 4, 2)),
    "JAX before torchrun": ({**_TORCHRUN, **_JAX}, JobPlace("a:1", 4, 2)),
    "address only": (_ADDRESS, JobPlace("a:1", None, None)),
    "torchrun": (_TORCHRUN, JobPlace("b:9", 3, 1)),
    "torchrun whose store has the port": ({**_TORCHRUN, **_STORE}, JobPlace("b:10", 3, 1)),
    "the last port": ({**_TORCHRUN, **_STORE, "MASTER_PORT": "65535"}, JobPlace("b:65534", 3, 1)),
    "half of torchrun": ({"RANK": "1", "WORLD_SIZE": "3"}, JobPlace(None, 3, 1)),
    "address and torchrun": ({**_TORCHRUN, **_ADDRESS}, JobPlace("a:1", 3, 1)),
    "Open MPI with an address": (
        {**_ADDRESS, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        JobPlace("a:1", 2, 0),
    ),
    "Open MPI, left to JAX": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        JobPlace(None, None, None),
    ),
    "MPICH": ({**_ADDRESS, "PMI_SIZE": "2", "PMI_RANK": "1"}, JobPlace("a:1", 2, 1)),
}


@pytest.mark.parametrize("case", _PLACES)
def test_the_place_from_variables(case):
    environment, place = _PLACES[case]

    assert find_job_place(environment) == place


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="JAX_PROCESS_ID must be a number, not 'x'"):
        find_job_place({**_JAX, "JAX_PROCESS_ID": "x"})


@pytest.fixture
def calls(monkeypatch) -> list[tuple[tuple, dict[str, Any]]]:
    """Record the arguments of `jax.distributed.initialize`, in an environment without a job."""
    for name in [*_JAX, *_TORCHRUN, "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS"]:
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple[tuple, dict[str, Any]]] = []
    record = lambda *args, **options: calls.append((args, options))
    monkeypatch.setattr(jax.distributed, "initialize", record)
    monkeypatch.setattr(_compat, "detect_cluster", lambda *known: known[:4])
    monkeypatch.setattr(agreement, "program_timeout", 300.0)
    return calls


def test_arguments_go_to_jax_with_short_time_outs(calls):
    multihost.initialize("host:7", 2, 1, 3, program_timeout=7.0)

    ((args, options),) = calls
    assert args == ("host:7", 2, 1, [3])
    assert options == {
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": None,
        "initialization_timeout": 300,
        "heartbeat_timeout_seconds": 10,
        "shutdown_timeout_seconds": 20,
    }
    assert agreement.program_timeout == 7.0


@pytest.mark.parametrize(
    ("address", "variable", "bind"),
    [
        ("127.0.0.1:7", None, "127.0.0.1:7"),
        ("localhost:7", None, "localhost:7"),
        ("10.0.0.1:7", None, None),
        ("127.0.0.1:7", "0.0.0.0:7", "0.0.0.0:7"),
    ],
)
def test_a_loopback_address_is_served_on_that_interface_alone(
    calls, monkeypatch, address, variable, bind
):
    if variable:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", variable)
    multihost.initialize(address, 2, 0)

    assert calls[0][1]["coordinator_bind_address"] == bind


def test_what_arguments_leave_open_comes_from_variables(calls, monkeypatch):
    for name, value in {**_JAX, "JAX_LOCAL_DEVICE_IDS": "4,5"}.items():
        monkeypatch.setenv(name, value)
    multihost.initialize(process_id=3)

    assert calls[0][0] == ("a:1", 4, 3, [4, 5])


def test_without_a_job_nothing_is_joined(calls, monkeypatch):
    multihost.initialize()
    multihost.initialize(num_processes=1)
    monkeypatch.setattr(_compat, "detect_cluster", lambda *_: ("a:1", 1, 0, None))
    multihost.initialize()

    assert calls == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("a:1", None, 0), "cannot tell num_processes of this process. Pass all of"),
        ((None, 2, 1), "cannot tell coordinator_address of this process"),
        (("10.0.0.1", 2, 1), "coordinator_address='10.0.0.1' has no port"),
    ],
)
def test_a_place_known_in_part_is_an_error(calls, arguments, text):
    with pytest.raises(ValueError, match=text):
        multihost.initialize(*arguments)


def test_a_second_call_may_repeat_the_first_one(calls, monkeypatch):
    joined = _compat.JoinedProcess(1, 4, "a:1", None)
    monkeypatch.setattr(_compat, "find_joined_process", lambda: joined)
    monkeypatch.setattr(initialization, "_install_hooks", lambda *_: None)
    multihost.initialize()
    multihost.initialize("a:1", 4, 1)

    with pytest.raises(ValueError, match="num_processes=2.: this process has joined a job with 4"):
        multihost.initialize(num_processes=2)
    assert calls == []


# --- preempted, in one process


@pytest.fixture
def fresh_notice(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(preemption, "_notice", preemption._Notice())
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("fresh_notice")
def test_a_signal_is_seen_at_the_next_step_and_stays():
    received = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    assert not multihost.preempted(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not multihost.preempted(1)  # the answer for a step does not change
    assert [multihost.preempted(step) for step in (2, 2, 3)] == [True] * 3
    assert received == [signal.SIGTERM]  # the handler that was there


@pytest.mark.usefixtures("fresh_notice")
def test_the_first_call_in_another_thread_is_an_error():
    errors = []

    def ask() -> None:
        try:
            multihost.preempted(1)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "which only the main thread may: call preempted(0) there" in errors[0]
