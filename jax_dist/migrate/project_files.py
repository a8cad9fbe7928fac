"""The other files of a project, as far as a migration asks: who defines a name, who imports one."""

import ast
import os
import re
from collections.abc import Mapping, Sequence

from jax_dist.lint.model.project import Project
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import Module

_LONGEST = 20  # files that hand a name on; more are a circle
_MOST_FILES = 5000  # that are looked at beside the paths


class ProjectFiles:
    """The files that are migrated together, and those beside them.

    Args:
      paths: those that are migrated.
      project: resolves imports.
    """

    def __init__(self, paths: Sequence[str] = (), project: Project | None = None):
        self.project: Project = project or Project(tuple(paths))
        self.shown: Mapping[str, str] = {os.path.abspath(path): path for path in paths}
        self._texts: dict[str, bytes] = {}
        self._folders: set[str] = set()

    def is_imported(self, path: str, name: str) -> bool:
        """Return whether another file may import `name` from the file at an absolute path."""
        stem, folder = os.path.splitext(os.path.basename(path))[0], os.path.dirname(path)
        if stem == "__init__":
            stem = os.path.basename(folder)
        wanted = re.compile(
            rb"\bfrom\s[\w.]*\b%b\s+import\s[^\n]*(?:\*|\b%b\b)|\bfrom\s[\w.]*\b%b\s+import\s*\(|\b%b\.%b\b"
            % ((stem.encode(), name.encode()) * 1 + (stem.encode(), stem.encode(), name.encode()))
        )
        return any(
            other != path and wanted.search(text) and self._imports(text, stem, name)
            for other, text in self._near(folder).items()
        )

    def _imports(self, text: bytes, stem: str, name: str) -> bool:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return False
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module)) if module.split(".")[-1] == stem:
                    if any(alias.name in (name, "*") for alias in node.names):
                        return True
                case ast.Attribute(value=ast.Name(id=base) | ast.Attribute(attr=base)):
                    if (base, node.attr) == (stem, name):
                        return True
        return False

    def _near(self, folder: str) -> dict[str, bytes]:
        """Return the texts of the files among the paths, and of those in the package around."""
        for path in self.shown if not self._folders else ():
            self._read(path)
        while os.path.isfile(os.path.join(folder, "__init__.py")):
            folder = os.path.dirname(folder)
        if folder not in self._folders:
            self._folders.add(folder)
            self._read_folder(folder)
        return self._texts

    def _read_folder(self, folder: str) -> None:
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                if name.endswith(".py") and len(self._texts) < _MOST_FILES:
                    self._read(os.path.join(parent, name))

    def _read(self, path: str) -> None:
        if path in self._texts or not path.endswith(".py") or not os.path.isfile(path):
            return
        try:
            with open(path, "rb") as file:
                self._texts[path] = file.read()
        except OSError:
            self._texts[path] = b""

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
    if bindings is None:
        bases = module.scopes.module.star_imports
        return ".".join((module.absolute(bases[0]), *names)) if len(bases) == 1 else None
    if bindings[0].kind != "import":
        return None
    return ".".join((module.absolute(bindings[0].target), *names[1:]))
