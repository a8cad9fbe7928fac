"""From where a migrated file gets its helpers: one module for each package, or the file itself.

A file imports its helpers as it imports the rest of its project, for that is known to work: by a
relative import, by the package's name, or as a file beside it. What imports nothing of a project,
and is imported by nothing, gets the helpers inside.
"""

import ast
import dataclasses
import os
from collections.abc import Iterable

from jax_dist.checker.model.import_graph import Imported
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating import helper_text

_NAMES = ("_mapped", "_mapped_devices", "_mapped_over_devices")
# Packages that are installed with no release: they take what the package under test has.
_BESIDE = frozenset(("tests", "test", "testing", "examples", "example", "benchmarks", "scripts"))


@dataclasses.dataclass(frozen=True, slots=True)
class Home:
    """Where the helpers of one file are.

    `path` is that of the module, absolute; "" stands for the file itself.
    """

    path: str = ""
    module: str = ""  # as the file imports it: "pkg._mapped", ".._mapped", "_mapped"

    @property
    def is_inside(self) -> bool:
        return not self.path

    def imported_by(self, tree: ast.Module) -> frozenset[str]:
        """The functions that a file imports from the module."""
        level = len(self.module) - len(self.module.lstrip("."))
        name = self.module[level:]
        return frozenset(
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.level, node.module) == (level, name)
            for alias in node.names
        )


class Homes:
    """Finds the home of each file.

    Args:
      project: finds the files behind imports, and says who imports whom.
      chosen: the path that the user gave for the one module; "" where none.
    """

    def __init__(self, project: Project, chosen: str = ""):
        self._project, self._graph = project, project.graph
        self._chosen = os.path.abspath(chosen) if chosen else ""
        self._free: dict[str, str] = {}  # by folder: the name of its module
        self.migrated: set[str] = set()  # modules that files of their own package use in this run

    def of(self, module: Module) -> Home:
        """The home of a file's helpers."""
        path = os.path.abspath(module.source.path)
        if path.endswith(".ipynb"):
            return Home()
        if self._chosen:
            dotted = self._project.dotted_name(self._chosen)
            return Home(self._chosen, dotted)
        package = self._own_package(path)
        if package is None or package.name in _BESIDE:
            other = self._other_package(path)
            if other is not None:
                return other
        if package is not None:
            return self._in_package(path, package)
        return self._beside(path)

    def is_in_package(self, path: str) -> bool:
        """Whether a file belongs to a package whose module others may use."""
        package = self._own_package(os.path.abspath(path))
        return package is not None and package.name not in _BESIDE

    def _own_package(self, path: str) -> "_Package | None":
        """The outermost package around a file, if the file is used as a part of it."""
        folder = os.path.dirname(path)
        by_files = self._outermost(folder)
        imports = list(self._graph.imports_of(path))
        for name, target, is_relative in imports:
            if is_relative:
                top = by_files or folder
                return _Package(top, by_files is not None, is_relative=True)
            root = name.partition(".")[0]
            home = self._root_folder(root, folder)
            if home and _is_below(path, home) and _is_below(target, home):
                return _Package(home, has_name=True, is_relative=False)
        importers = self._graph.importers(path)
        if by_files is None:
            return self._named_by(importers, path)
        name = os.path.basename(by_files)
        for imported in importers:
            if imported.is_relative or self._names_package(imported.by, name):
                is_relative = all(each.is_relative for each in importers)
                return _Package(by_files, has_name=True, is_relative=is_relative)
        return None

    def _named_by(self, importers: Iterable[Imported], path: str) -> "_Package | None":
        """The package without `__init__.py` by whose name its other files import this one."""
        for importer in importers:
            folder = os.path.dirname(importer.by)
            for name, target, is_relative in self._graph.imports_of(importer.by):
                is_it = target == path and not is_relative
                home = self._root_folder(name.partition(".")[0], folder) if is_it else ""
                if home and _is_below(path, home) and _is_below(importer.by, home):
                    return _Package(home, has_name=True, is_relative=False)
        return None

    def _names_package(self, path: str, name: str) -> bool:
        return any(each.partition(".")[0] == name for each, _, _ in self._graph.imports_of(path))

    def _outermost(self, folder: str) -> str | None:
        found = None
        while os.path.isfile(os.path.join(folder, "__init__.py")):
            found = folder
            folder = os.path.dirname(folder)
        return found

    def _root_folder(self, root: str, folder: str) -> str:
        """The folder of a package, seen from a file in `folder`; "" for a module or none at all."""
        home = self._project.home(root, folder)
        place = "" if home is None else os.path.join(home, root)
        return place if os.path.isdir(place) else ""

    def _in_package(self, path: str, package: "_Package") -> Home:
        name = self._name_in(package.folder)
        target = os.path.join(package.folder, f"{name}.py")
        if not package.is_relative:
            return Home(target, f"{package.name}.{name}")
        depth = os.path.relpath(os.path.dirname(path), package.folder)
        dots = "." * (1 if depth == os.curdir else 2 + depth.count(os.sep))
        return Home(target, f"{dots}{name}")

    def _other_package(self, path: str) -> Home | None:
        """The module of a package that the file imports, and that is migrated in the same run."""
        folder = os.path.dirname(path)
        for name, _, is_relative in self._graph.imports_of(path):
            root = name.partition(".")[0]
            home = "" if is_relative else self._root_folder(root, folder)
            if not home or _is_below(path, home):
                continue
            module = self._name_in(home)
            target = os.path.join(home, f"{module}.py")
            if target in self.migrated:
                return Home(target, f"{root}.{module}")
        return None

    def _beside(self, path: str) -> Home:
        """A module in the same folder, where files of it import each other so."""
        folder = os.path.dirname(path)
        seen = any(
            _is_beside(folder, name, target, is_relative)
            for name, target, is_relative in self._graph.imports_of(path)
        )
        if not seen:
            beside = (each for each in self._graph.importers(path) if not each.is_relative)
            seen = any(os.path.dirname(each.by) == folder for each in beside)
        if not seen:
            return Home()
        module = self._name_in(folder)
        return Home(os.path.join(folder, f"{module}.py"), module)

    def _name_in(self, folder: str) -> str:
        """A name for the module that nothing else in its folder has."""
        if folder not in self._free:
            self._free[folder] = next(
                (name for name in _NAMES if _is_free(os.path.join(folder, name))), _NAMES[-1]
            )
        return self._free[folder]


@dataclasses.dataclass(frozen=True, slots=True)
class _Package:
    folder: str
    has_name: bool  # else only relative imports reach it
    is_relative: bool  # how the file imports the rest of it

    @property
    def name(self) -> str:
        return os.path.basename(self.folder) if self.has_name else ""


def _is_free(base: str) -> bool:
    """Whether nothing is there, or what an earlier migration has put there."""
    if os.path.isdir(base):
        return False
    try:
        with open(f"{base}.py", encoding="utf-8") as file:
            return helper_text.is_ours(file.read())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _is_beside(folder: str, name: str, target: str, is_relative: bool) -> bool:  # noqa: FBT001
    """Whether an import finds a module or package that lies in the folder of the file itself."""
    root = name.partition(".")[0]
    beside = (os.path.join(folder, f"{root}.py"), os.path.join(folder, root, ""))
    return not is_relative and target.startswith(beside)


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))
