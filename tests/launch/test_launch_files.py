"""The files for clusters in docs/launch: what a process finds there, with fakes of launchers."""

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_FILES = _ROOT / "docs" / "launch"
_PYTHON = f"""#!{sys.executable}
import os
from jax_dist._multihost.initialization import find_job_place
print(*find_job_place(os.environ), os.environ.get("JAX_LOCAL_DEVICE_IDS"))
"""
_AFTER_OPTIONS = 'while [ "$1" != bash ]; do shift; done\n'
_LAUNCHERS: dict[str, tuple[str, str, str]] = {  # file, the fake launcher, and what a rank finds
    "torchrun": (
        "torchrun.sh",
        "export MASTER_ADDR=node1 MASTER_PORT=29400 WORLD_SIZE=8 RANK=5 LOCAL_RANK=1\n",
        "node1:29400 8 5 1\n",
    ),
    "Open MPI": (
        "mpi.sh",
        "export OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1\n",
        "here:1 8 5 1\n",
    ),
    "Intel MPI": ("mpi.sh", "export PMI_SIZE=8 PMI_RANK=5 MPI_LOCALRANKID=1\n", "here:1 8 5 1\n"),
}


@pytest.mark.parametrize("case", _LAUNCHERS)
def test_a_rank_finds_its_place(case, tmp_path):
    file, variables, place = _LAUNCHERS[case]
    launcher = "torchrun" if file == "torchrun.sh" else "mpirun"
    script = f'#!/bin/bash\n{variables}{_AFTER_OPTIONS}exec "$@"\n'
    for name, text in {launcher: script, "python": _PYTHON, "hostname": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
        "HOST": "node1",
        "JAX_PLATFORMS": "cpu",
    }
    if launcher == "mpirun":
        environment["JAX_COORDINATOR_ADDRESS"] = "here:1"
    done = subprocess.run(
        ["bash", _FILES / file], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == (place, "")


@pytest.mark.parametrize("file", sorted(path.name for path in _FILES.glob("*.s*")))
def test_the_shell_reads_the_files(file):
    subprocess.run(["bash", "-n", _FILES / file], check=True)
