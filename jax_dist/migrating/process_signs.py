"""Signs that a project runs in several processes: its code, its scripts, its settings.

One is enough for the whole project: where a program asks which process it is, another file may map
the functions. That none is found proves little, for what starts the processes may lie elsewhere.
"""

import dataclasses
import os
import re
from collections.abc import Iterator

from jax_dist.checker.model import discovery
from jax_dist.checker.model.import_graph import ImportGraph

_IN_CODE = (
    r"process_(?:index|count|id|allgather)|num_processes|host_(?:id|count)|num_hosts|num_nodes"
    r"|distributed\.initialize|multihost_utils|broadcast_one_to_all|coordinator_address"
    r"|make_array_from_process_local_data|multi-?_?(?:host|process)|mpi4py|mpirun"
)
_IN_SCRIPTS = (
    r"--worker=all|jobset|\bxpk\b|JAX_COORDINATOR\w*|JAX_NUM_PROCESSES|TPU_WORKER_ID|OMPI_\w+|PMI_\w+"
    r"|SLURM_\w+|\bsrun\b|#SBATCH[^\n]*--n(?:odes|tasks)|torchrun|mpirun|mpiexec"
)
_CODE = re.compile(_IN_CODE.encode(), re.IGNORECASE)
_SCRIPTS = re.compile(f"{_IN_CODE}|{_IN_SCRIPTS}".encode(), re.IGNORECASE)
_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".yaml", ".yml", ".toml", ".md", ".rst")
_NAMES = ("Dockerfile", "README", "Makefile")
_LARGEST = 2**20  # bytes of a file that is no code


@dataclasses.dataclass(frozen=True, slots=True)
class Sign:
    """One place that speaks of several processes."""

    path: str
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.word} in {os.path.relpath(self.path)}:{self.line}"


def first_sign(graph: ImportGraph) -> Sign | None:
    """The first sign in the files of some projects, code before scripts; None where there is none.

    Args:
      graph: of the projects.
    """
    for path, data in graph.files.items():
        found = _found(path, data, _CODE)
        if found is not None:
            return found
    for path in _scripts(graph.roots):
        try:
            with open(path, "rb") as file:
                found = _found(path, file.read(_LARGEST), _SCRIPTS)
        except OSError:
            continue
        if found is not None:
            return found
    return None


def _found(path: str, data: bytes, pattern: re.Pattern[bytes]) -> Sign | None:
    match = pattern.search(data)
    if match is None:
        return None
    line = data.count(b"\n", 0, match.start()) + 1
    return Sign(path, line, match[0].decode("utf-8", "replace"))


def _scripts(roots: tuple[str, ...]) -> Iterator[str]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - set(discovery.EXCLUDED))
            for name in sorted(names):
                if name.endswith(_SUFFIXES) or name.startswith(_NAMES):
                    yield os.path.join(folder, name)
