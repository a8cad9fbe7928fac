"""What a file is judged with: the names, the imports and the habits of its project."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence

from jax_dist.checker.examining import load
from jax_dist.checker.import_graph import ImportGraph
from jax_dist.checker.modules import Module
from jax_dist.checker.parsing import ParseError
from jax_dist.checker.project import Project
from jax_dist.checker.sources import UnreadableError
from jax_dist.migrating import process_signs, renaming
from jax_dist.migrating.helper_home import Homes
from jax_dist.migrating.process_signs import Sign

_FAKE = re.compile(rb"\bfake_pmap|(?:patch|setattr|object)\([^)]*[\"']jax\.pmap[\"']|jax\.pmap = ")


@dataclasses.dataclass(eq=False)
class Context:
    """One run: the files that are migrated together, and the projects around them."""

    project: Project
    graph: ImportGraph
    homes: Homes
    among: frozenset[str] | None = None  # absolute paths of what is migrated; None: all is

    @classmethod
    def of(cls, paths: Sequence[str], helpers: str = "") -> "Context":
        """Of files that are migrated together.

        Args:
          paths: the files.
          helpers: the path of the module for all helpers; "" where each package has its own.
        """
        project = Project(tuple(paths))
        among = frozenset(map(os.path.abspath, paths))
        return cls(project, project.graph, Homes(project, helpers), among)

    @classmethod
    def alone(cls) -> "Context":
        """Of a file that is judged by itself."""
        project = Project()
        return cls(project, project.graph, Homes(project))

    @functools.cached_property
    def sign(self) -> Sign | None:
        """What shows that the program runs in several processes."""
        return process_signs.first_sign(self.graph)

    def comparison(self, module: Module) -> tuple[str, int] | None:
        """A place that may meet a function of this file, and asks whether it is jax.pmap.

        Not those where all that they may meet is migrated together: in files of this run that no
        other file imports, such as tests.
        """
        path = os.path.abspath(module.source.path)
        for other, line in (*((path, each) for each in renaming.comparisons(module)), *self._all):
            if other == path or self.graph.are_connected(path, other):
                is_here = self.among is not None and {path, other} <= self.among
                if not is_here or self.graph.importers(other):
                    return other, line
        return None

    def fake(self) -> str | None:
        """A place of the projects that has jax.pmap replaced while it runs."""
        for path, data in self.graph.files.items():
            found = _FAKE.search(data)
            if found is not None:
                line = data.count(b"\n", 0, found.start()) + 1
                return f"{os.path.relpath(path)}:{line}"
        return None

    @functools.cached_property
    def _all(self) -> list[tuple[str, int]]:
        """All places of the projects that compare jax.pmap with something."""
        found: list[tuple[str, int]] = []
        for path, data in self.graph.files.items():
            if b"pmap" not in data or not (b" is " in data or b"==" in data or b" in " in data):
                continue
            try:
                module = self.project.module(load(path, data))
            except (UnreadableError, ParseError):
                continue
            found += ((path, line) for line in renaming.comparisons(module))
        return found
