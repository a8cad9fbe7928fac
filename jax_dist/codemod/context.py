"""What a file is judged with: the names, the imports and the habits of its project.

One sign that a project runs in several processes is enough for all of it: where a program asks
which process it is, another file may map the functions. That none is found proves little, for what
starts the processes may lie elsewhere.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Sequence

from jax_dist.checker.engine.linter import load
from jax_dist.checker.model import sources
from jax_dist.checker.model.project import ImportGraph, Project, outermost_package
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.sources import ParseError, UnreadableError
from jax_dist.codemod import pmap_renames
from jax_dist.codemod.helper_module import Homes

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


def _first_sign(graph: ImportGraph) -> Sign | None:
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
            folders[:] = sorted(set(folders) - set(sources.EXCLUDED))
            for name in sorted(names):
                if name.endswith(_SUFFIXES) or name.startswith(_NAMES):
                    yield os.path.join(folder, name)


_VALUE = re.compile(
    rb"pmap\s*(?:[]),}:]|==|!=|is\b|in\b|not\b|else\b|if\b|$)|(?:==|\bis|\bin)[^\n]*pmap"
)
_REPLICATE = re.compile(
    rb"\bjax_utils\.replicate\b|\bfrom flax\.jax_utils import[^\n]*\breplicate\b"
)
_TYPE = re.compile(rb"\bPmapFunction\b")
_FAKE = re.compile(rb"\bfake_pmap|(?:patch|setattr|object)\([^)]*[\"']jax\.pmap[\"']|jax\.pmap = ")


@dataclasses.dataclass(frozen=True, slots=True)
class PmapValue:
    """A place to which `jax.pmap` goes as a value."""

    path: str  # absolute
    line: int
    is_compared: bool
    is_here: bool  # in a file of this run


@dataclasses.dataclass(eq=False)
class ProjectContext:
    """One run: the files that are migrated together, and the projects around them."""

    project: Project
    graph: ImportGraph
    homes: Homes
    among: frozenset[str] | None = None  # absolute paths of what is migrated; None: all is

    @classmethod
    def of(cls, paths: Sequence[str], helpers: str = "") -> "ProjectContext":
        """Of files that are migrated together.

        Args:
          paths: the files.
          helpers: the path of the module for all helpers; "" where each package has its own.
        """
        project = Project(tuple(paths))
        among = frozenset(map(os.path.abspath, paths))
        return cls(project, project.graph, Homes(project, helpers), among)

    @classmethod
    def alone(cls) -> "ProjectContext":
        """Of a file that is judged by itself."""
        project = Project()
        return cls(project, project.graph, Homes(project))

    @functools.cached_property
    def sign(self) -> Sign | None:
        """What shows that the program runs in several processes."""
        return _first_sign(self.graph)

    def comparison(self, module: Module) -> PmapValue | None:
        """A place that may meet a function of this file, and asks whether it is jax.pmap.

        Not those where all that they may meet is migrated together: in files of this run that no
        other file imports, such as tests.
        """
        return next(
            (
                found
                for found in self._near(module)
                if found.is_compared and not (found.is_here and self._is_last(found.path))
            ),
            None,
        )

    def twin(self, module: Module) -> PmapValue | None:
        """A place to which pmap goes as a value too, in a file that is not migrated now."""
        path = os.path.abspath(module.source.path)
        others = (found for found in self._near(module) if found.path != path)
        return next((found for found in others if not found.is_here), None)

    def _near(self, module: Module) -> Iterator[PmapValue]:
        """The places that may meet a function of a file."""
        path = os.path.abspath(module.source.path)
        is_here = self.among is not None and path in self.among
        for line, is_compared in pmap_renames.meetings(module):
            yield PmapValue(path, line, is_compared, is_here)
        for found in self._meetings:
            if found.path != path and self.graph.are_connected(path, found.path):
                yield dataclasses.replace(found, is_here=found.is_here and is_here)

    def _is_last(self, path: str) -> bool:
        return not self.graph.importers(path)

    def fake(self) -> str | None:
        """A place of the projects that has jax.pmap replaced while it runs."""
        return self._first(_FAKE)

    @functools.cached_property
    def question_of_type(self) -> str | None:
        """A place that knows functions of jax.pmap by the name of their type."""
        return self._first(_TYPE)

    def asks_for_type(self, module: Module) -> bool:
        """Whether `question_of_type` is in the module's package, and may meet its functions."""
        if self.question_of_type is None:
            return False
        path = os.path.abspath(module.source.path)
        package = outermost_package(os.path.dirname(path))
        asker = os.path.abspath(self.question_of_type)
        is_near = package and asker.startswith(os.path.join(package, ""))
        return bool(is_near and self.graph.importers(path))

    def replicate_of_flax(self) -> str | None:
        """A place of the projects that calls flax.jax_utils.replicate."""
        return self._first(_REPLICATE)

    def _first(self, pattern: re.Pattern[bytes]) -> str | None:
        for path, data in self.graph.files.items():
            found = pattern.search(data)
            if found is not None:
                line = data.count(b"\n", 0, found.start()) + 1
                return f"{os.path.relpath(path)}:{line}"
        return None

    @functools.cached_property
    def _meetings(self) -> list[PmapValue]:
        """All places of the projects to which jax.pmap goes as a value."""
        found: list[PmapValue] = []
        for path, data in self.graph.files.items():
            if not _VALUE.search(data):
                continue
            try:
                module = self.project.module(load(path, data))
            except (UnreadableError, ParseError):
                continue
            is_here = self.among is not None and path in self.among
            found += (PmapValue(path, *each, is_here) for each in pmap_renames.meetings(module))
        return found
