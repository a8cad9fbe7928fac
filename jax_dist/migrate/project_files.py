"""The other files of a project, in which a migration looks up who defines a name."""

import ast
import os
from collections.abc import Mapping, Sequence

from jax_dist.lint.model.project import Project
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import Module


class ProjectFiles:
    """The files that are migrated together, and those that they import.

    Args:
      paths: those that are migrated.
      project: resolves imports.
    """

    def __init__(self, paths: Sequence[str] = (), project: Project | None = None):
        self.project: Project = project or Project(tuple(paths))
        self.shown: Mapping[str, str] = {os.path.abspath(path): path for path in paths}

    def definition(self, module: Module, dotted: str) -> tuple[Module | None, ast.AST | None]:
        """Return the file that defines a dotted name, and the node that does; or None and None."""
        home, _, name = dotted.rpartition(".")
        path = self.project.file(home, os.path.dirname(os.path.abspath(module.source.path)))
        other = self.project.opened(path) if home and path else None
        bindings = other.scopes.module.bindings.get(name, ()) if other else ()
        return (other, bindings[0].node) if len(bindings) == 1 else (None, None)

    def definer(self, module: Module, reference: ast.expr) -> str | None:
        """Return the other file of the project that binds a name which is used here.

        Files that only re-export it are looked through. None if the name, or an attribute
        such as `constants.pmap`, is bound in this file, or comes from no file of the project.
        """
        names = module.text(reference).split(".")
        bound = module.scope(reference).lookup(names[0])
        return self._definer(module, names, bound[1] if bound else ())

    def _definer(
        self, module: Module, names: Sequence[str], bindings: Sequence[Binding]
    ) -> str | None:
        """Return the other file that binds the dotted name `names`, or None.

        `bindings` are those of its first part in `module`. If that is imported from a file which
        only imports it in its turn, the search goes on from there.
        """
        if not bindings or bindings[0].kind != "import":
            return None
        folder = os.path.dirname(os.path.abspath(module.source.path))
        parts = [*module.absolute(bindings[0].target).split("."), *names[1:]]
        for length in range(len(parts) - 1, 0, -1):  # the longest part that is a module
            path = self.project.file(".".join(parts[:length]), folder)
            if path is None:
                continue
            other, names_there = self.project.opened(path), parts[length:]
            if other is None:
                return path
            bindings_there = other.scopes.module.bindings.get(names_there[0], ())
            return self._definer(other, names_there, bindings_there) or path
        return None
