"""`initialize`: where a process learns who it is, and how the processes meet.

With plain JAX a taken port is SIGSEGV, a rank that is missing or there twice is SIGABRT, and
differing numbers of processes are accepted.
"""

import contextlib
import json
import os
import pathlib
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import jax
import pytest
from jobs import free_port, run_job

from jax_dist import multihost
from jax_dist.multihost import clusters, initializing, rendezvous
from jax_dist.multihost.channel import Channel
from jax_dist.multihost.clusters import Membership
from jax_dist.multihost.rendezvous import Plan
from jax_dist.testing import run_processes

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
_JAX = {
    "JAX_COORDINATOR_ADDRESS": "here:1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
    "JAX_LOCAL_DEVICE_IDS": "2,3",
}


def _meet(*plans: Plan) -> list[str]:
    """What each gets: the ranks that it has channels to, or the error."""
    results = [""] * len(plans)

    def go(number: int, plan: Plan) -> None:
        try:
            peers = rendezvous.meet(plan)
        except multihost.JoinError as error:
            results[number] = str(error)
        else:
            results[number] = f"met {sorted(peers)}"
            for peer in peers.values():
                peer.channel.close()

    threads = [threading.Thread(target=go, args=each) for each in enumerate(plans)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _plans(*ranks: int, processes: int = 3, timeout: float = 2.0) -> list[Plan]:
    address = f"127.0.0.1:{free_port()}"
    return [Plan(address, address, processes, rank, timeout) for rank in ranks]


def test_all_meet_whoever_comes_first():
    assert _meet(*_plans(2, 0, 1, timeout=60)) == ["met [0]", "met [1, 2]", "met [0]"]


def test_a_missing_rank_is_named_by_all_that_came():
    first, second = _meet(*_plans(0, 2))

    assert first == second
    assert first.startswith("rank 1 has not joined within 2 s:\n  * ranks 0 and 2 wait at 127")


def test_without_rank_0_the_others_say_where_they_looked():
    (error,) = _meet(*_plans(1))

    assert error.startswith("rank 1 has not reached rank 0 within 2 s:\n  * 127.0.0.1:")
    assert "Connection refused" in error


def test_a_rank_that_comes_twice_is_named_by_all():
    errors = _meet(*_plans(0, 1, 1, timeout=60))

    assert len(set(errors)) == 1
    assert errors[0].startswith("two processes say that they are rank 1:")


def test_a_second_rank_0_is_no_taken_port():
    errors = _meet(*_plans(0, 0, timeout=60))

    assert len(set(errors)) == 1
    assert errors[0].startswith("two processes say that they are rank 0:")


def test_other_numbers_of_processes_are_told_to_all():
    (first,), (other,) = _plans(0, processes=2, timeout=60), _plans(1, processes=3, timeout=60)
    other = Plan(first.address, first.bind, 3, 1, 60)
    errors = _meet(first, other)

    assert len(set(errors)) == 1
    assert "\n  * rank 0 was told 2\n  * rank 1 was told 3\n" in errors[0]


# ---- who is let in


@contextlib.contextmanager
def _rank_0(plan: Plan) -> Iterator[list[str]]:
    """Rank 0 waits while the block runs; afterwards, the list holds what it got."""
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.extend(_meet(plan)))
    thread.start()
    try:
        yield result
    finally:
        thread.join()


def _connect(plan: Plan) -> socket.socket:
    for _ in range(1000):
        with contextlib.suppress(OSError):
            return socket.create_connection(rendezvous.split(plan.address), timeout=10)
        time.sleep(0.01)
    raise AssertionError("rank 0 does not listen")


def _frame(message: object) -> bytes:
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(text)) + text


def _hello(**changes: object) -> object:
    hello = {"rank": 1, "processes": 2, "machine": "m", "pid": 1} | changes
    return ["Hello", {name: value for name, value in hello.items() if value != "left out"}]


_OLD_GREETING = b"jax_dist"
_STRANGERS = {
    "nothing": b"",
    "random bytes": random.Random(0).randbytes(100_000),
    "a browser": b"GET / HTTP/1.1\r\n\r\n",
    "an older version": _OLD_GREETING + _frame({"is": "hello", "rank": 1, "processes": 2}),
    "half a greeting": b"jax_dist 2\n" + bytes(7),
    "no proof": b"jax_dist 2\n" + bytes(16) + bytes(32) + _frame(_hello()),
}


@pytest.mark.parametrize("token", [b"", b"a secret"], ids=["without token", "with token"])
@pytest.mark.parametrize("who", _STRANGERS)
def test_who_is_no_process_of_the_job_is_cut_off_and_the_others_meet(who, token):
    first, second = (replace(plan, token=token) for plan in _plans(0, 1, processes=2, timeout=60))
    with _rank_0(first) as result, _connect(first) as stranger:
        with contextlib.suppress(OSError):  # it is cut off in the middle
            stranger.sendall(_STRANGERS[who])
        assert _meet(second) == ["met [0]"]

    assert result == ["met [1]"]


_GREETED = {  # by somebody who knows the protocol, and the token, which is none
    "nonsense": _frame(b"{nonsense"),
    "not text": _frame(b"\xff\xfe{}"),
    "deep": _frame(4000 * b"["),
    "a list": _frame([1]),
    "another message": _frame(["Leave", {}]),
    "no rank": _frame(_hello(rank="left out")),
    "a word": _frame(_hello(rank="1")),
    "true": _frame(_hello(rank=True)),
    "none": _frame(_hello(rank=None)),
    "rank 99": _frame(_hello(rank=99)),
    "rank -5": _frame(_hello(rank=-5)),
    "a huge rank": _frame(_hello(rank=10**30)),
    "no processes": _frame(_hello(processes=0)),
    "a long hello": _frame(_hello(machine=100_000 * "m")),
    "a gigabyte is announced": struct.pack("!I", 1 << 30),
}


@pytest.mark.parametrize("what", _GREETED)
def test_who_says_something_else_is_cut_off_and_the_others_meet(what, caplog):
    first, second = _plans(0, 1, processes=2, timeout=60)
    with _rank_0(first) as result:
        with _connect(first) as connection:
            stranger = Channel(connection, b"", is_host=False)
            stranger.greet(10)
            connection.sendall(_GREETED[what])
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""  # it is cut off
        assert _meet(second) == ["met [0]"]

    assert result == ["met [1]"]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("rank 0: a stranger from 127.0.0.1:")


def test_who_does_not_know_the_token_is_told_to_rank_0(caplog, monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.2)
    first, second = _plans(0, 1, processes=2, timeout=3)
    first, second = replace(first, token=b"one"), replace(second, token=b"other")
    error, refused = _meet(first, second)

    assert error.startswith("rank 1 has not joined within 3 s:\n  * rank 0 waits at 127.0.0.1:")
    assert "was cut off: it does not know the token of this job\n" in error
    assert refused.startswith("rank 1 meets a stranger at 127.0.0.1:")
    assert "does not know the token of this job" in caplog.records[0].getMessage()
    assert len(caplog.records) == 6  # five strangers, and that there are more


def test_a_greeting_that_was_overheard_opens_nothing():
    """What a guest has shown once is of no use another time."""
    first, second = (replace(plan, token=b"secret") for plan in _plans(0, 1, processes=2))
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
    with _rank_0(replace(first, timeout=60)) as result, _connect(first) as stranger:
        stranger.sendall(overheard)
        assert _meet(replace(second, timeout=60)) == ["met [0]"]

    assert result == ["met [1]"]


def test_many_that_say_nothing_do_not_keep_the_others_out(monkeypatch):
    monkeypatch.setattr(rendezvous, "_SPARE_GUESTS", 4)
    first, second = _plans(0, 1, processes=2, timeout=60)
    with _rank_0(first) as result, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(_connect(first))
        assert _meet(second) == ["met [0]"]

    assert result == ["met [1]"]


def test_who_says_nothing_for_long_is_cut_off(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "_GREETING", 0.2)
    (first,) = _plans(0, processes=2, timeout=60)
    with _rank_0(first) as result:
        with _connect(first) as silent:
            silent.recv(100)
            assert silent.recv(100) == b""
        assert _meet(replace(first, rank=1)) == ["met [0]"]

    assert result == ["met [1]"]
    assert caplog.records[0].getMessage().endswith("it has not said who it is within 0.2 s")


_FEW_FILES = """
import resource, sys
import jax_dist.multihost.rendezvous as rendezvous
files = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 20, files + 20))
print(sorted(rendezvous.meet(rendezvous.Plan(sys.argv[1], sys.argv[1], 2, 0, 60))))
"""


def test_more_connections_than_files_do_not_end_rank_0():
    (plan,) = _plans(1, processes=2, timeout=60)
    with subprocess.Popen(
        [sys.executable, "-c", _FEW_FILES, plan.address],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(_connect(plan))
            assert _meet(plan) == ["met [0]"]
        printed, _ = process.communicate(timeout=60)

    assert printed == "[1]\n"


def test_a_rank_that_came_and_ended_is_named_at_once_by_all():
    plans = _plans(0, 1, 2, processes=4, timeout=60)
    start = time.monotonic()
    with _rank_0(plans[0]) as result:
        with _connect(plans[0]) as connection:
            ended = rendezvous._say_hello(replace(plans[0], rank=3), connection)
            ended.greet(10)
            time.sleep(0.2)  # so that it is known
        others = _meet(*plans[1:])

    assert others == result * 2
    assert time.monotonic() - start < 15
    assert result[0].startswith(
        "rank 3 has ended before all were there:\n  * rank 3 was at 127.0.0.1:"
    )


def test_other_machines_are_let_in_by_a_token_only(monkeypatch):
    met = []
    monkeypatch.setattr(initializing.rendezvous, "meet", lambda plan: met.append(plan) or 1 / 0)
    monkeypatch.setattr(initializing._compat, "backend_started", lambda: False)
    address = f"192.0.2.1:{free_port()}"  # of no interface here: rank 0 listens at all of them
    with (
        pytest.warns(multihost.OpenPortWarning, match="lets in whoever can reach its port") as seen,
        pytest.raises(ZeroDivisionError),
    ):
        multihost.initialize(address, 2, 0)
    for given in ({"token": "secret"}, {}):
        monkeypatch.setenv("JAX_DIST_TOKEN", "" if given else "of the environment")
        with pytest.raises(ZeroDivisionError):
            multihost.initialize(address, 2, 0, **given)
    monkeypatch.delenv("JAX_DIST_TOKEN")
    with pytest.raises(ZeroDivisionError):
        multihost.initialize(f"127.0.0.1:{free_port()}", 2, 0)

    assert [plan.token for plan in met] == [b"", b"secret", b"of the environment", b""]
    assert seen[0].filename == __file__


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
        (error,) = _meet(Plan(address, address, 2, 1, 30))
        server.shutdown(socket.SHUT_RDWR)  # close alone would not wake the thread
        thread.join()

    assert error.startswith(
        f"rank 1 meets a stranger at {address}:\n  * it is no process of jax_dist\n"
    )


def test_a_taken_port_is_an_error_of_python():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = subprocess.run(
            [sys.executable, "-c", _INITIALIZE_AND_CATCH, str(server.getsockname()[1])],
            env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    assert (ran.returncode, ran.stderr) == (7, "")
    assert ran.stdout.startswith("JoinError rank 0 cannot listen at 127.0.0.1:")
    assert "another program listens there already" in ran.stdout


_INITIALIZE_AND_CATCH = """
import sys
from jax_dist import multihost
try:
    multihost.initialize(f"localhost:{sys.argv[1]}", 2, 0, initialization_timeout=20)
except multihost.JoinError as error:
    print(type(error).__name__, error)
    sys.exit(7)
"""


def test_after_the_backend_has_started_it_is_too_late():
    assert jax.devices()
    with pytest.raises(RuntimeError, match="comes too late"):
        multihost.initialize(f"127.0.0.1:{free_port()}", 2, 0)


def test_one_process_needs_nothing():
    multihost.initialize()
    multihost.initialize("127.0.0.1:1", 1, 0)


def attached() -> list:
    """Runs in every process, which jax.distributed has joined already."""
    from jax_dist.multihost.initializing import current_stalls

    multihost.initialize()
    multihost.initialize()
    multihost.initialize(num_processes=2, process_id=jax.process_index())
    try:
        multihost.initialize(num_processes=3)
    except RuntimeError as error:
        return [current_stalls() is not None, str(error).splitlines()[1]]
    return ["no error"]


def test_what_jax_has_joined_is_taken_over():
    outcomes = run_processes(attached, processes=2, cpu_devices=1, timeout=120)

    assert [outcome.error for outcome in outcomes] == [None, None]
    expected = [True, "  * num_processes: now 3, before 2"]
    assert [outcome.value for outcome in outcomes] == [expected, expected]
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]


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
    found = clusters.find(*arguments, None, timeout=1, environment=environment)

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

    found = clusters.find(None, None, None, None, timeout=1, environment={})

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
    with pytest.raises(multihost.JoinError) as caught:
        clusters.find(*arguments, None, timeout=1, environment=environment)

    assert f"  * {line}" in str(caught.value)


@pytest.mark.parametrize("address", ["nohost", "a:", ":80", "a:b", "a:70000"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ValueError, match="must be 'host:port'"):
        clusters.find(address, 2, 0, None, timeout=1, environment={})


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
    assert clusters.bind_address(address, None) == bind


def test_a_name_for_the_own_machine_means_all_interfaces(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert clusters.bind_address("node1:80", None) == "[::]:80"


def test_where_to_listen_can_be_said():
    assert clusters.bind_address("127.0.0.1:80", "0.0.0.0:90") == "0.0.0.0:90"
