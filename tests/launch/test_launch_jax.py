"""JAX finds its place: under the launcher, and by the variables that clusters set."""

import signal
import sys

from launching import PATIENCE, launch, launched, lines, notices

from jax_dist.launch.ranks import rank_environment

_BARE = """\
import jax
jax.distributed.initialize()
import jax.numpy as jnp
n = jax.local_device_count()
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.ones(n))
"""
_WHO = "print(f'is {jax.process_index()} {jax.process_count()} {n} {total[0]}', flush=True)\n"


def _told(stdout: str) -> list[str]:
    return sorted(text[3:] for _, text in lines(stdout) if text.startswith("is "))


def _python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


_LISTENS = """
import contextlib, os, pathlib
own = set()
for link in pathlib.Path("/proc/self/fd").iterdir():
    with contextlib.suppress(FileNotFoundError):  # that of the folder itself
        own.add(os.readlink(link))
for table in ("tcp", "tcp6"):
    for row in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = row.split()[:10]
        address, port = local.split(":")
        is_ours = state == "0A" and f"socket:[{inode}]" in own  # listening
        if is_ours and int(port, 16) == int(os.environ["MASTER_PORT"]):
            print(f"listens at {address}", flush=True)
"""


_OTHER_JOB = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "JAX_LOCAL_DEVICE_IDS": "3",
    "JAX_COORDINATOR_ADDRESS": "node7:1",
    "JAX_COORDINATOR_PORT": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[7-9]",
    "SLURM_NTASKS": "64",
    "SLURM_PROCID": "63",
    "SLURM_LOCALID": "7",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "64",
    "OMPI_COMM_WORLD_RANK": "63",
    "OMPI_COMM_WORLD_LOCAL_RANK": "7",
    "RANK": "63",
    "WORLD_SIZE": "64",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "http_proxy": "http://127.0.0.1:9",  # nobody answers there
}


def test_it_works_inside_another_job_and_listens_on_the_loopback_interface_only():
    program = _python(_BARE + _WHO + _LISTENS)
    ended = launch("-n", "2", "--cpu-devices", "2", "--", *program, **_OTHER_JOB)

    assert _told(ended.stdout) == ["0 2 2 4.0", "1 2 2 4.0"], ended.stderr
    assert ended.returncode == 0
    listeners = [text for _, text in lines(ended.stdout) if text.startswith("listens at ")]
    assert len(listeners) == 1
    assert listeners[0].endswith("0100007F")  # 127.0.0.1, as IPv4 or inside IPv6


def test_the_variables_of_a_rank():
    inherited = {**_OTHER_JOB, "HOME": "/home/me", "SLURM_ARRAY_TASK_ID": "5", "no_proxy": "x"}
    found = rank_environment(
        inherited, rank=1, ranks=2, port=4000, launcher=99, token="t", cpu_devices=3
    )

    assert {name: found[name] for name in sorted(found)} == {
        "HOME": "/home/me",
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:4000",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:4000",
        "JAX_DIST_LAUNCHER": "99",
        "JAX_DIST_TOKEN": "t",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PLATFORMS": "cpu",
        "JAX_PROCESS_ID": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4000",
        "NO_PROXY": "x,127.0.0.1,localhost",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "RANK": "1",
        "SLURM_ARRAY_TASK_ID": "5",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "WORLD_SIZE": "2",
        "XLA_FLAGS": "",
        "http_proxy": "http://127.0.0.1:9",
        "no_proxy": "x,127.0.0.1,localhost",
    }


def test_without_cpu_devices_each_rank_has_gpus_of_its_own():
    inherited = {"XLA_FLAGS": "--a"}
    found = rank_environment(inherited, rank=1, ranks=2, port=1, launcher=1, token="", gpus=4)

    assert (found["XLA_FLAGS"], found["JAX_LOCAL_DEVICE_IDS"]) == ("--a", "4,5,6,7")
    assert not {"JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "no_proxy"} & set(found)


def test_a_rank_that_jax_keeps_alive_on_sigterm_is_killed(tmp_path):
    program = _BARE + (
        "import os, pathlib, time\n"
        f"there = pathlib.Path({str(tmp_path / 'there')!r})\n"
        "if jax.process_index() == 0: there.touch(); time.sleep(600)\n"
        "while not there.exists(): time.sleep(0.01)\n"
        "os._exit(3)\n"
    )
    ended = launch("-n", "2", "--cpu-devices", "1", "--grace", "0.5", "--", *_python(program))

    assert ended.returncode == 3
    assert notices(ended.stderr)[-1].endswith("(rank 1: exit code 3; rank 0: stopped by SIGKILL)")


_PREEMPTED = """
from jax.experimental import multihost_utils
print("ready", flush=True)
step = 0
while not multihost_utils.reached_preemption_sync_point(step):
    step += 1
print(f"is {jax.process_index()} {jax.process_count()} {n} {total[0]} at {step}", flush=True)
"""


def test_a_bare_initialize_works_and_sigterm_to_the_launcher_is_a_preemption_of_all_ranks():
    program = _python(_BARE + _PREEMPTED)
    with launched("-n", "2", "--cpu-devices", "2", "--", *program) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            ready += process.stdout.readline().endswith("ready\n")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)

    assert process.returncode == 0, err
    ranks, steps = zip(*[told.split(" at ") for told in _told(out)], strict=True)
    assert ranks == ("0 2 2 4.0", "1 2 2 4.0")
    assert len(set(steps)) == 1  # both at the same step


def test_the_rank_that_raised_is_named_though_it_leaves_last():
    program = (
        "from jax_dist import multihost\n"
        "multihost.initialize()\n"
        "import jax, jax.numpy as jnp\n"
        "total = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')\n"
        "total(jnp.ones(1)).block_until_ready()\n"
        "if jax.process_index() == 0: raise ValueError('a bug')\n"
        "total(jnp.ones(1)).block_until_ready()\n"
    )
    ended = launch("-n", "2", "--cpu-devices", "1", "--grace", "30", "--", *_python(program))

    assert ended.returncode == 1
    assert "jax-dist launch: rank 0 failed first: exit code 1" in ended.stderr
    assert "    ValueError: a bug" in ended.stderr.splitlines()
