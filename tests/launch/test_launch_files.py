"""The files for clusters that the documentation offers to copy.

They were run by the real srun of SLURM 22.05, and mpirun of Open MPI 4.1 and 5.0 and of MPICH 5.0.
Here, small programs of these names stand in, and set what the real ones were seen to set.
"""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest
from launching import PATIENCE, environment

from jax_dist.multihost import initialization
from jax_dist.multihost.initialization import Membership

_FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "launch"

_STAND_IN = """\
#!{python}
import json, os, subprocess, sys
start = next(i for i, word in enumerate(sys.argv) if i and word in ("bash", "python"))
ranks = [
    subprocess.Popen(sys.argv[start:], env={{**os.environ, **variables}})
    for variables in json.loads(os.environ["STAND_IN"])
]
sys.exit(max(rank.wait() for rank in ranks))
"""

_TELLS_ITS_VARIABLES = """\
import json, os
print(json.dumps(dict(os.environ)) + "\\n", end="")
"""


def _of_srun(rank: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(port - 61440),  # JAX makes the port of it
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def _of_open_mpi(rank: int, port: int) -> dict[str, str]:
    del port
    return {
        "OMPI_VERSION": "5.0.11",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
    }


def _of_mpich(rank: int, port: int) -> dict[str, str]:
    del port
    return {"PMI_SIZE": "2", "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}


def _of_torchrun(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port - 1),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # it listens at that port itself
    }


_CLUSTERS = pytest.mark.parametrize(
    ("file", "starter", "variables"),
    [
        ("slurm.sbatch", "srun", _of_srun),
        ("mpi.sh", "mpirun", _of_open_mpi),
        ("mpi.sh", "mpirun", _of_mpich),
        ("torchrun.sh", "torchrun", _of_torchrun),
    ],
    ids=["slurm", "open mpi", "mpich", "torchrun"],
)


def _run(folder: pathlib.Path, file: str, starter: str, variables, port: int) -> list[str]:
    """Runs the file as it is, with a stand-in for the launcher of the cluster."""
    shutil.copy(_FOLDER / file, folder)
    _write_program(folder / starter, _STAND_IN.format(python=sys.executable))
    _write_program(folder / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    ran = subprocess.run(
        ["bash", file],
        cwd=folder,
        env=environment(
            PATH=f"{folder}:{os.environ['PATH']}",
            JAX_PLATFORMS="cpu",
            JAX_NUM_CPU_DEVICES="2",
            HOST="127.0.0.1",
            **({"JAX_DIST_TOKEN": "00ff" * 8} if file == "torchrun.sh" else {}),
            STAND_IN=json.dumps([variables(rank, port) for rank in range(2)]),
            **({"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"} if file == "mpi.sh" else {}),
        ),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.splitlines())


def _write_program(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@_CLUSTERS
def test_each_rank_finds_its_place(tmp_path, monkeypatch, file, starter, variables):
    (tmp_path / "train.py").write_text(_TELLS_ITS_VARIABLES)

    places, tokens = [], set()
    for line in _run(tmp_path, file, starter, variables, 62000):
        with monkeypatch.context() as rank:
            for name in os.environ:
                rank.delenv(name)
            for name, value in json.loads(line).items():
                rank.setenv(name, value)
            found = initialization.find(None, None, None, None, timeout=10)
            tokens.add(os.environ["JAX_DIST_TOKEN"])
        places.append(f"{found.rank} of {found.processes} at {found.address}, {found.devices}")

    assert sorted(places) == ["0 of 2 at 127.0.0.1:62000, (0,)", "1 of 2 at 127.0.0.1:62000, (1,)"]
    (token,) = tokens
    assert re.fullmatch("[0-9a-f]{32}", token)
    assert list(tmp_path.glob("token*")) == []


@pytest.mark.slow
@_CLUSTERS
def test_the_program_runs(tmp_path, file, starter, variables):
    shutil.copy(_FOLDER / "train.py", tmp_path)
    said = _run(tmp_path, file, starter, variables, _free_port())

    assert [line for line in said if line.startswith("process ")] == [
        "process 0 of 2: 4 devices",
        "process 1 of 2: 4 devices",
    ]


def _free_port() -> int:
    """Of those that SLURM's numbers lead to."""
    for port in range(61440 + os.getpid() % 4000, 65535):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


@pytest.mark.parametrize(
    "file", ["slurm.sbatch", "mpi.sh", "torchrun.sh", "tpu_pod.sh"], ids=lambda file: file
)
def test_bash_can_read_it(file):
    read = subprocess.run(
        ["bash", "-n", _FOLDER / file], capture_output=True, text=True, check=False
    )

    assert (read.returncode, read.stderr) == (0, "")


def test_the_jobset_agrees_with_itself():
    yaml = pytest.importorskip("yaml")  # orbax and flax bring it
    job_set = yaml.safe_load((_FOLDER / "jobset.yaml").read_text())
    (workers,) = job_set["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}

    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (2, 2, 0)
    assert variables["JAX_NUM_PROCESSES"] == "2"
    assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "train", "key": "token"}}
    # <job set>-<replicated job>-<number of the job>-<number of the pod>.<job set>
    assert variables["JAX_COORDINATOR_ADDRESS"] == "train-workers-0-0.train:55527"
    assert container["ports"] == [{"containerPort": 55527}]
    assert container["command"] == ["python", "train.py"]


def test_the_tpu_commands_reach_all_hosts(tmp_path):
    _write_program(tmp_path / "gcloud", '#!/bin/bash\nprintf "%s|" "$@"; echo\n')
    ran = subprocess.run(
        ["bash", _FOLDER / "tpu_pod.sh"],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", TPU="pod", ZONE="zone"),
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout.splitlines() == [
        "compute|tpus|tpu-vm|scp|train.py|token|pod:|--zone=zone|--worker=all|",
        "compute|tpus|tpu-vm|ssh|pod|--zone=zone|--worker=all|"
        "--command=JAX_DIST_TOKEN=$(cat token) exec python3 train.py|",
    ]
    assert re.fullmatch("[0-9a-f]{32}", (tmp_path / "token").read_text())
    assert (tmp_path / "token").stat().st_mode & 0o077 == 0


def test_the_train_job_is_one_by_the_schema_of_its_resource():
    yaml = pytest.importorskip("yaml")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    train_job = yaml.safe_load((_FOLDER / "trainjob.yaml").read_text())

    found = models.TrainerV1alpha1TrainJob.from_dict(train_job)

    assert found.to_dict() == train_job  # else a field has a name that the resource does not know
    assert found.spec.runtime_ref.name == "jax-distributed"
    assert (found.spec.trainer.num_nodes, found.spec.trainer.command) == (2, ["python", "train.py"])
    assert found.spec.trainer.env[0].value_from.secret_key_ref.key == "token"


# ---- the table of variables in docs/processes.md

_OF_ENGINES = {  # what each engine sets in rank 1 of 4, and what is made of it
    "jax-dist launch": (
        {
            "JAX_COORDINATOR_ADDRESS": "127.0.0.1:4000",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "1",
            "JAX_LOCAL_DEVICE_IDS": "1",
        },
        Membership("127.0.0.1:4000", 4, 1, (1,)),
    ),
    "Kubernetes JobSet, Kubeflow TrainJob, Ray": (
        {
            "JAX_COORDINATOR_ADDRESS": "train-node-0-0.train:29500",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "1",
        },
        Membership("train-node-0-0.train:29500", 4, 1, None),
    ),
    "torchrun": (
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "1"},
        Membership("node0:29500", 4, 1, None),
    ),
    "SLURM": (
        {
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
        },
        Membership("node1:61447", 4, 1, (1,)),
    ),
    "Open MPI 4": (
        {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        Membership("10.96.0.1:62624", 4, 1, (1,)),
    ),
}


def _table() -> dict[str, list[str]]:
    """The engines of the page, and the variables that it says they set."""
    page = (_FOLDER.parent / "processes.md").read_text()
    start = page.index("| engine | address of rank 0 |")
    rows = page[start : page.index("\n\n", start)].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {engine: re.findall("`([A-Za-z_]+)`", " ".join(rest)) for engine, *rest in cells}


@pytest.mark.parametrize("engine", _OF_ENGINES)
def test_each_variable_of_the_table_says_what_the_page_says(monkeypatch, engine):
    values, expected = _OF_ENGINES[engine]
    for name in list(os.environ):
        if name.startswith(("JAX_COORD", "JAX_NUM_P", "JAX_PROC", "JAX_LOCAL", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def find(variables: dict[str, str]) -> Membership | None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)  # JAX looks there
            return initialization.find(None, None, None, None, timeout=1, environment=variables)

    assert sorted(_table()[engine]) == sorted(values)
    assert find(values) == expected
    for name in values:
        try:
            found = find({other: value for other, value in values.items() if other != name})
        except (KeyError, RuntimeError):  # of JAX, and of ours
            found = None
        assert found != expected, f"{name} is not needed"
