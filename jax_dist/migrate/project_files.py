"""The other files of a project, as far as a migration asks: who defines a name."""

import ast
import os
from collections.abc import Mapping, Sequence

from jax_dist.lint.model.project import Project
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import Module

_LONGEST = 20  # files that hand a name on; more are a circle


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
        """Return the file that a dotted name leads to, and the one definition that it has there."""
        home, _, name = dotted.rpartition(".")
        path = self.project.file(home, os.path.dirname(os.path.abspath(module.source.path)))
        other = self.project.opened(path, is_whole=True) if home and path else None
        bindings = other.scopes.module.bindings.get(name, ()) if other else ()
        return (other, bindings[0].node) if len(bindings) == 1 else (None, None)

    def definer(self, module: Module, reference: ast.expr) -> str | None:
        """Return the other file of the project that binds a name which is used here.

        Files that only import it and hand it on are looked through. None if the name, or attribute
        such as `constants.pmap`, is bound in this file, or comes from no file of the project.
        """
        names: list[str] = []
        while isinstance(reference, ast.Attribute):
            names.insert(0, reference.attr)
            reference = reference.value
        if not isinstance(reference, ast.Name):
            return None
        names.insert(0, reference.id)
        bound = module.scope(reference).lookup(reference.id)
        name = _imported(module, names, None if bound is None else bound[1])
        path, home = os.path.abspath(module.source.path), None
        for _ in range(_LONGEST):
            file = None
            parts = [] if name is None else name.split(".")
            for length in range(len(parts) - 1, 0, -1):  # the longest part that is a module
                file = self.project.file(".".join(parts[:length]), os.path.dirname(path))
                if file is not None:
                    names = parts[length:]
                    break
            if file is None:
                return home
            path = home = file
            other = self.project.opened(path)
            bindings = None if other is None else other.scopes.module.bindings.get(names[0])
            name = None if other is None else _imported(other, names, bindings)
        return home


def _imported(module: Module, names: list[str], bindings: Sequence[Binding] | None) -> str | None:
    """Return what the module imports under the first of the names, with the others behind it."""
    if bindings is None or bindings[0].kind != "import":
        return None
    return ".".join((module.absolute(bindings[0].target), *names[1:]))
