"""`initialize`: where a process learns who it is, and how the processes meet.

With plain JAX a taken port is SIGSEGV, a rank that is missing or there twice is SIGABRT, and
differing numbers of processes are accepted.
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import pytest
from jobs import free_port, run_job
from strangers import (
    AFTER_A_GREETING,
    WITHOUT_A_GREETING,
    connect,
    meet,
    plans,
    rank_0,
    ranks_meet_beside,
    speak,
)

from jax_dist import errors, multihost
from jax_dist.multihost import initialization, rendezvous
from jax_dist.multihost.channel import Channel
from jax_dist.multihost.initialization import Membership
from jax_dist.multihost.rendezvous import RendezvousPlan
from jax_dist.testing import run_processes

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
_JAX = {
    "JAX_COORDINATOR_ADDRESS": "here:1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
    "JAX_LOCAL_DEVICE_IDS": "2,3",
}


def test_all_meet_whoever_comes_first():
    assert meet(*plans(2, 0, 1, timeout=60)) == ["met [0]", "met [1, 2]", "met [0]"]


def test_a_missing_rank_is_named_by_all_that_came():
    first, second = meet(*plans(0, 2))

    assert first == second
    assert first.startswith("rank 1 has not joined within 2 s:\n  * ranks 0 and 2 wait at 127")


def test_without_rank_0_the_others_say_where_they_looked():
    (error,) = meet(*plans(1))

    assert error.startswith("rank 1 has not reached rank 0 within 2 s:\n  * 127.0.0.1:")
    assert "Connection refused" in error


def test_a_rank_that_comes_twice_is_named_by_all():
    errors = meet(*plans(0, 1, 1, timeout=60))

    assert len(set(errors)) == 1
    assert errors[0].startswith("two processes say that they are rank 1:")


def test_a_second_rank_0_is_no_taken_port():
    errors = meet(*plans(0, 0, timeout=60))

    assert len(set(errors)) == 1
    assert errors[0].startswith("two processes say that they are rank 0:")


def test_other_numbers_of_processes_are_told_to_all():
    (first,), (other,) = plans(0, processes=2, timeout=60), plans(1, processes=3, timeout=60)
    other = RendezvousPlan(first.address, first.bind, 3, 1, 60)
    errors = meet(first, other)

    assert len(set(errors)) == 1
    assert "\n  * rank 0 was told 2\n  * rank 1 was told 3\n" in errors[0]


# ---- who is let in


@pytest.mark.parametrize("token", [b"", b"a secret"], ids=["without token", "with token"])
@pytest.mark.parametrize("who", WITHOUT_A_GREETING)
def test_who_is_no_process_of_the_job_is_cut_off_and_the_others_meet(who, token):
    assert ranks_meet_beside([WITHOUT_A_GREETING[who]], token=token, greets=False)


@pytest.mark.parametrize("what", AFTER_A_GREETING)
def test_who_says_something_else_is_cut_off_and_the_others_meet(what, caplog):
    first, second = plans(0, 1, processes=2, timeout=60)
    with rank_0(first) as result:
        with connect(first) as connection:
            speak(connection, AFTER_A_GREETING[what], token=b"", greets=True)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # it is cut off
        assert meet(second) == ["met [0]"]

    assert result == ["met [1]"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("rank 0: a stranger from 127.0.0.1:")


def test_who_does_not_know_the_token_is_told_to_rank_0(caplog, monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    first, second = plans(0, 1, processes=2, timeout=3)
    first, second = replace(first, token=b"one"), replace(second, token=b"other")
    error, refused = meet(first, second)

    assert error.startswith("rank 1 has not joined within 3 s:\n  * rank 0 waits at 127.0.0.1:")
    assert "was cut off: it does not know the token of this job\n" in error
    assert refused.startswith("rank 1 meets a stranger at 127.0.0.1:")
    assert "does not know the token of this job" in caplog.records[0].getMessage()
    assert len(caplog.records) == 6  # five strangers, and that there are more


def test_a_greeting_that_was_overheard_opens_nothing():
    """What a guest has shown once is of no use another time."""
    first, second = (replace(plan, token=b"secret") for plan in plans(0, 1, processes=2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        guest = Channel(socket.create_connection(server.getsockname()), b"secret", is_host=False)
        connection, _ = server.accept()
        host = Channel(connection, b"secret", is_host=True)
        overheard = connection.recv(1 << 16, socket.MSG_PEEK)
        with contextlib.suppress(TimeoutError):
            guest.greet(0.2)
            host.greet(0.2)
        overheard = overheard + connection.recv(1 << 16, socket.MSG_PEEK)
        guest.close()
        host.close()
    with rank_0(replace(first, timeout=60)) as result, connect(first) as stranger:
        stranger.sendall(overheard)
        assert meet(replace(second, timeout=60)) == ["met [0]"]

    assert result == ["met [1]"]


def test_many_that_say_nothing_do_not_keep_the_others_out(monkeypatch):
    monkeypatch.setattr(rendezvous, "_SPARE_GUESTS", 4)
    first, second = plans(0, 1, processes=2, timeout=60)
    with rank_0(first) as result, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(first))
        assert meet(second) == ["met [0]"]

    assert result == ["met [1]"]


def test_who_says_nothing_for_long_is_cut_off(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_GREETING", 0.2)
    (first,) = plans(0, processes=2, timeout=60)
    with rank_0(first) as result:
        with connect(first) as silent:
            silent.recv(100)
            assert silent.recv(100) == b""
        assert meet(replace(first, rank=1)) == ["met [0]"]

    assert result == ["met [1]"]
    assert caplog.records[0].getMessage().endswith("it has not said who it is within 0.2 s")


_FEW_FILES = """
import resource, sys
import jax_dist.multihost.rendezvous as rendezvous
files = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 20, files + 20))
print(sorted(rendezvous.meet(rendezvous.RendezvousPlan(sys.argv[1], sys.argv[1], 2, 0, 60))))
"""


def test_more_connections_than_files_do_not_end_rank_0():
    (plan,) = plans(1, processes=2, timeout=60)
    with subprocess.Popen(
        [sys.executable, "-c", _FEW_FILES, plan.address],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(connect(plan))
            assert meet(plan) == ["met [0]"]
        printed, _ = process.communicate(timeout=60)

    assert printed == "[1]\n"


def test_a_rank_that_came_and_ended_is_named_at_once_by_all():
    first, *others = plans(0, 1, 2, processes=4, timeout=60)
    start = time.monotonic()
    with rank_0(first) as result:
        with connect(first) as connection:
            ended = rendezvous._say_hello(replace(first, rank=3), connection)
            ended.greet(10)
            time.sleep(0.2)  # so that it is known
        errors = meet(*others)

    assert errors == result * 2
    assert time.monotonic() - start < 15
    assert result[0].startswith(
        "rank 3 has ended before all were there:\n  * rank 3 was at 127.0.0.1:"
    )


def test_other_machines_are_let_in_by_a_token_only(monkeypatch):
    met = []
    monkeypatch.setattr(initialization.rendezvous, "meet", lambda plan: met.append(plan) or 1 / 0)
    monkeypatch.setattr(initialization._compat, "backend_started", lambda: False)
    address = f"192.0.2.1:{free_port()}"  # of no interface here: rank 0 listens at all of them
    with (
        pytest.warns(errors.OpenPortWarning, match="accepts anyone who can reach its port") as seen,
        pytest.raises(ZeroDivisionError),
    ):
        multihost.initialize(address, 2, 0)
    for given in ({"token": "of the arguments"}, {}):
        monkeypatch.setenv("JAX_DIST_TOKEN", "" if given else "of the environment")
        with pytest.raises(ZeroDivisionError):
            multihost.initialize(address, 2, 0, **given)
    monkeypatch.delenv("JAX_DIST_TOKEN")
    with pytest.raises(ZeroDivisionError):
        multihost.initialize(f"127.0.0.1:{free_port()}", 2, 0)

    assert [plan.token for plan in met] == [b"", b"of the arguments", b"of the environment", b""]
    assert seen[0].filename == __file__
    with pytest.raises(ValueError, match="token of the job can be guessed"):
        multihost.initialize(address, 2, 0, token="secret")


# ---- what is no coordinator


def test_a_stranger_at_the_port_is_known_as_one(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # the test is over
                with connection, contextlib.suppress(OSError):  # who asked may have gone
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (error,) = meet(RendezvousPlan(address, address, 2, 1, 30))
        server.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread
        thread.join()

    assert error.startswith(
        f"rank 1 meets a stranger at {address}:\n  * it is no process of jax_dist\n"
    )


def test_a_taken_port_is_an_error_of_python(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.5)  # else it waits for the port to become free
    monkeypatch.setattr(initialization._compat, "backend_started", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(errors.JoinError) as raised:
            multihost.initialize(address, 2, 0, initialization_timeout=20)

    assert str(raised.value).startswith("rank 0 cannot listen at 127.0.0.1:")
    assert "another program listens there already" in str(raised.value)


def test_after_the_backend_has_started_it_is_too_late():
    assert jax.devices()
    with pytest.raises(RuntimeError, match="comes too late"):
        multihost.initialize(f"127.0.0.1:{free_port()}", 2, 0)


def test_one_process_needs_nothing():
    multihost.initialize()
    multihost.initialize("127.0.0.1:1", 1, 0)


def attached() -> list:
    """Runs in every process, which jax.distributed has joined already."""
    from jax_dist.multihost import failures

    multihost.initialize()
    multihost.initialize()
    multihost.initialize(num_processes=2, process_id=jax.process_index())
    try:
        multihost.initialize(num_processes=3)
    except RuntimeError as error:
        return [failures.stalls is not None, str(error).splitlines()[1]]
    return ["no error"]


def test_what_jax_has_joined_is_taken_over():
    outcomes = run_processes(attached, processes=2, cpu_devices=1, timeout=120)

    assert [outcome.error for outcome in outcomes] == [None, None]
    expected = [True, "  * num_processes: now 3, before 2"]
    assert [outcome.value for outcome in outcomes] == [expected, expected]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


@pytest.mark.thorough
def test_by_the_variables_of_launch_and_on_loopback_only():
    ended = run_job("joining_program.py")

    assert [each.code for each in ended] == [0, 0]
    for rank, each in enumerate(ended):
        assert f"rank {rank} of 2" in each.output
        assert "listens on ['127.0.0.1']" in each.output


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (("a:1", 3, 2), {**_JAX, **_TORCHRUN}, Membership("a:1", 3, 2, (2, 3))),
        ((None, None, None), {**_JAX, **_TORCHRUN}, Membership("here:1", 2, 0, (2, 3))),
        ((None, None, 1), _JAX, Membership("here:1", 2, 1, (2, 3))),
        ((None, None, None), _TORCHRUN, Membership("node0:29500", 4, 1, None)),
        (
            (None, None, None),
            {**_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Membership("node0:29501", 4, 1, None),
        ),
        (
            (None, None, None),
            {**_TORCHRUN, "JAX_COORDINATOR_PORT": "80"},
            Membership("node0:80", 4, 1, None),
        ),
        ((None, None, None), {**_TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ((None, None, None), {}, None),
        (("a:1", 1, 0), {}, None),
    ],
    ids=[
        "arguments first",
        "then JAX's variables",
        "mixed",
        "torchrun",
        "torchrun's store takes the port",
        "another port",
        "torchrun with one process",
        "nothing known",
        "one process",
    ],
)
def test_where_a_process_learns_who_it_is(arguments, environment, expected):
    found = initialization.find(*arguments, None, timeout=1, environment=environment)

    assert found == expected


def test_slurm_is_asked_by_jax(monkeypatch):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)

    found = initialization.find(None, None, None, None, timeout=1, environment={})

    assert found is not None
    assert (found.processes, found.rank, found.devices) == (4, 3, (1,))
    assert found.address.startswith("node1:")


@pytest.mark.parametrize(
    ("arguments", "environment", "line"),
    [
        (("a:1", None, None), {}, "num_processes is not known"),
        ((None, 2, 0), {}, "coordinator_address is not known"),
        (("a:1", 2, 2), {}, "process_id is 2"),
        ((None, None, None), {**_JAX, "JAX_PROCESS_ID": "first"}, "it is 'first'"),
    ],
)
def test_half_a_membership_is_refused(arguments, environment, line):
    with pytest.raises(errors.JoinError) as caught:
        initialization.find(*arguments, None, timeout=1, environment=environment)

    assert f"  * {line}" in str(caught.value)


@pytest.mark.parametrize("address", ["nohost", "a:", ":80", "a:b", "a:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="must be 'host:port'"):
        initialization.find(address, 2, 0, None, timeout=1, environment={})


@pytest.mark.parametrize(
    ("address", "bind"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("localhost:80", "127.0.0.1:80"),
        ("[::1]:80", "[::1]:80"),
        ("192.0.2.1:80", "[::]:80"),  # of no interface here
    ],
)
def test_rank_0_listens_where_the_others_are_told(address, bind):
    assert initialization.bind_address(address, None) == bind


def test_a_name_for_the_own_machine_means_all_interfaces(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert initialization.bind_address("node1:80", None) == "[::]:80"


def test_where_to_listen_can_be_said():
    assert initialization.bind_address("127.0.0.1:80", "0.0.0.0:90") == "0.0.0.0:90"
