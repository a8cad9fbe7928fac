"""Which file gives a name its meaning: `pmap` may be an alias that another file defines."""

import ast
import os

from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module

_LONGEST = 20  # files that hand a name on; more are a circle


def definer(module: Module, project: Project, reference: ast.expr) -> str | None:
    """The other file of the project that binds a name which is used here.

    Files that only import it and hand it on are looked through.

    Args:
      module: the file that uses the name.
      project: finds the others.
      reference: the name, or attribute: `constants.pmap`.

    Returns:
      The path; None where the name is bound in this file, or comes from no file of the project.
    """
    name = _imported(module, reference)
    path = os.path.abspath(module.source.path)
    home: str | None = None
    for _ in range(_LONGEST):
        found = None if name is None else _found(project, name, os.path.dirname(path))
        if found is None:
            return home
        path, rest = found
        home = path
        other = project.opened(path)
        name = None if other is None else _handed_on(other, rest)
    return home


def _imported(module: Module, reference: ast.expr) -> str | None:
    """The dotted name, where an import of this file gives it."""
    attributes: list[str] = []
    while isinstance(reference, ast.Attribute):
        attributes.insert(0, reference.attr)
        reference = reference.value
    if not isinstance(reference, ast.Name):
        return None
    found = module.scope(reference).lookup(reference.id)
    if found is None:
        return _from_star(module, [reference.id, *attributes])
    binding = found[1][0]
    if binding.kind != "import":
        return None
    return ".".join((module.absolute(binding.target), *attributes))


def _handed_on(module: Module, names: list[str]) -> str | None:
    """What the module imports under the first of the names, with the others behind it."""
    bindings = module.scopes.module.bindings.get(names[0])
    if bindings is None:
        return _from_star(module, names)
    if bindings[0].kind != "import":
        return None
    return ".".join((module.absolute(bindings[0].target), *names[1:]))


def _from_star(module: Module, names: list[str]) -> str | None:
    bases = module.scopes.module.star_imports
    return ".".join((module.absolute(bases[0]), *names)) if len(bases) == 1 else None


def _found(project: Project, name: str, folder: str) -> tuple[str, list[str]] | None:
    """The file of the longest part that is a module, and what is asked of it."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = project.file(".".join(parts[:length]), folder)
        if path is not None:
            return path, parts[length:]
    return None
