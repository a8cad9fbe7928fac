"""Where the helpers of a migrated file are: in a module that it imports, or inside of it.

There is one module for each package, and for the scripts of a folder. A file imports it as it
imports the rest of its project, for that is known to work: by a relative import, by the package's
name, or as a file beside it. A notebook has the helpers inside, and so has a file that may be run
or imported in a way which does not find what lies beside it.
"""

import ast
import dataclasses
import functools
import keyword
import os
import re
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder

from jax_dist.lint.model import sources
from jax_dist.lint.model.import_graph import Imported, outermost_package
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate import helper_module
from jax_dist.migrate.process_signs import project_texts

NAMES = ("_mapped", "_mapped_devices", "_mapped_over_devices")
_NEEDS = re.compile(rb"\bpmap\b|\bdevice_put_(?:sharded|replicated)\b")
_CODE = (".py", ".ipynb")
_PACKAGING = ("pyproject.toml", "setup.py", "setup.cfg")
# A file goes elsewhere, without those beside it.
_COPIES = rb"(?:\b(?:COPY|ADD|s?cp|rsync|gsutil|upload\w*|spark-submit)\b|--py-files)[^\n]*"
_WITHOUT_FOLDER = re.compile(
    rb"PYTHONSAFEPATH|\bpython[\d.]*\s+-[a-zA-Z]*[IP]\b|import-?mode\W+importlib"
)
_CHANGES_PATH = re.compile(
    rb"sys\.path(?:\.(?:pop|remove|clear)\(|\s*=|\[[^\n]*\]\s*=)|del sys\.path"
)
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

    def __init__(self, project: Project, chosen: str):
        self._project, self._graph = project, project.graph
        self._chosen = os.path.abspath(chosen) if chosen else ""
        self._free: dict[str, str] = {}  # by folder: the name of its module
        self.migrated: set[str] = set()  # modules that files of their own package use in this run
        self._is_part_of_scripts = functools.cache(self._find_part_of_scripts)  # all files ask

    def of(self, module: Module) -> Home:
        """The home of a file's helpers."""
        path = os.path.abspath(module.source.path)
        if path.endswith(".ipynb"):
            return Home()
        if self._chosen:
            # As the files of its project import it.
            dotted = self._project.dotted_name(self._chosen)
            package, _, rest = dotted.partition(".")
            folder = self._chosen[: -len(f"{dotted}.py")] + package
            other = self._graph.other_name(folder) or package
            return Home(self._chosen, f"{other}.{rest}" if rest else dotted)
        package = self._own_package(path)
        if package is None or package.name in _BESIDE:
            other = self._other_package(path)
            if other is not None:
                return other
        if package is None:
            return self._beside(path)
        name = self._name_in(package.folder)
        target = os.path.join(package.folder, f"{name}.py")
        scripts = os.path.dirname(package.folder)
        if not os.path.exists(target) and self._is_part_of_scripts(package.folder):
            name = self._name_in(scripts)
            return Home(os.path.join(scripts, f"{name}.py"), name)
        if not package.is_relative:
            return Home(target, f"{package.name}.{name}")
        depth = os.path.relpath(os.path.dirname(path), package.folder)
        dots = "." * (1 if depth == os.curdir else 2 + depth.count(os.sep))
        return Home(target, f"{dots}{name}")

    def _find_part_of_scripts(self, package: str) -> bool:
        """Whether only scripts beside a package import it, and others of them need helpers too."""
        folder = os.path.dirname(package)
        if any(os.path.exists(os.path.join(folder, name)) for name in _PACKAGING):
            return False
        inside = [path for path in self._graph.files if _is_below(path, package)]
        users = {each.by for path in inside for each in self._graph.importers(path)} - {*inside}
        others = {path for path in self._graph.files if os.path.dirname(path) == folder} - users
        has_others = any(_NEEDS.search(self._graph.files[path]) for path in others)
        return bool(users) and has_others and all(os.path.dirname(p) == folder for p in users)

    def is_in_package(self, path: str) -> bool:
        """Whether a file belongs to a package whose module others may use."""
        package = self._own_package(os.path.abspath(path))
        return package is not None and package.name not in _BESIDE

    def _own_package(self, path: str) -> "_Package | None":
        """The outermost package around a file, if the file is used as a part of it."""
        folder = os.path.dirname(path)
        by_files = outermost_package(folder)
        for name, target, is_relative in self._graph.imports_of(path):
            if is_relative:
                top = by_files or folder
                name = os.path.basename(by_files)
                return _Package(top, name, is_relative=True)
            root = name.partition(".")[0]
            home = self._root_folder(root, folder)
            is_it = home and _is_below(path, home) and _is_below(target, home)
            if is_it and self._graph.may_be(home, root, path):
                return _Package(home, root, is_relative=False)
        importers = self._graph.importers(path)
        if not by_files:
            return self._named_by(importers, path)
        for imported in importers:
            name = self._name_in_file(imported.by, by_files)
            if imported.is_relative or name:
                is_relative = all(each.is_relative for each in importers)
                name = name or os.path.basename(by_files)
                return _Package(by_files, name, is_relative)
        if importers or not self._only_defines(path):
            return self._named_by(importers, path)
        # Or files inside of it import each other by its name.
        inside = sorted(each for each in self._graph.files if _is_below(each, by_files))
        names = (self._name_in_file(each, by_files) for each in inside)
        name = next(filter(None, names), "")
        return _Package(by_files, name, is_relative=False) if name else None

    def _named_by(self, importers: Iterable[Imported], path: str) -> "_Package | None":
        """The package by whose name its other files import this one.

        It may have no `__init__.py`, or lie in a folder that has one and is no package.
        """
        for importer in importers:
            folder = os.path.dirname(importer.by)
            for name, target, is_relative in self._graph.imports_of(importer.by):
                is_it = target == path and not is_relative
                root = name.partition(".")[0]
                home = self._root_folder(root, folder) if is_it else ""
                if not home or not _is_below(path, home):
                    continue
                if _is_below(importer.by, home) or self._only_defines(path):
                    return _Package(home, root, is_relative=False)
        return None

    def _only_defines(self, path: str) -> bool:
        """Whether a file is of no use as a script, so that it is always imported."""
        try:
            tree = sources.parse(self._graph.files[path])
        except (KeyError, sources.ParseError):
            return False
        return not any(
            isinstance(node, ast.For | ast.While | ast.With)
            or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))
            for node in tree.body
        )

    def _name_in_file(self, path: str, package: str) -> str:
        """The name by which a file imports from a package; "" where it does not."""
        folder = os.path.dirname(path)
        for name, _, is_relative in self._graph.imports_of(path):
            root = name.partition(".")[0]
            if not is_relative and self._root_folder(root, folder) == package:
                return root
        return ""

    def _root_folder(self, root: str, folder: str) -> str:
        """The folder of a package, seen from a file in `folder`; "" for a module or none at all."""
        if root == "jax":  # who needs helpers means the library, whatever folder is called so
            return ""
        home = self._project.home(root, folder)
        if home is None:
            return self._graph.package_called(root, folder)
        place = os.path.join(home, root)
        return place if os.path.isdir(place) else ""

    def _other_package(self, path: str) -> Home | None:
        """The module of a package that the file imports, and that is migrated in the same run."""
        folder = os.path.dirname(path)
        for name, _, is_relative in self._graph.imports_of(path):
            root = name.partition(".")[0]
            home = "" if is_relative else self._root_folder(root, folder)
            if not home or _is_below(path, home) or not self._graph.may_be(home, root, path):
                continue
            module = self._name_in(home)
            target = os.path.join(home, f"{module}.py")
            if target in self.migrated:
                return Home(target, f"{root}.{module}")
        return None

    def _beside(self, path: str) -> Home:
        """A module in the same folder, where files of it find each other; else the file itself."""
        folder = os.path.dirname(path)
        if not (self._imports_beside(path) or self._is_lone_script(path)):
            return Home()
        module = self._name_in(folder)
        return Home(os.path.join(folder, f"{module}.py"), module)

    def _imports_beside(self, path: str) -> bool:
        """Whether a file and another one of its folder import each other by their names."""
        folder = os.path.dirname(path)
        for name, target, is_relative in self._graph.imports_of(path):
            root = name.partition(".")[0]
            places = (os.path.join(folder, f"{root}.py"), os.path.join(folder, root, ""))
            if not is_relative and target.startswith(places):
                return True
        return any(
            not each.is_relative and os.path.dirname(each.by) == folder
            for each in self._graph.importers(path)
        )

    def _is_lone_script(self, path: str) -> bool:
        """Whether a file is run by its path, so that Python finds what lies beside it.

        It is where the file runs something, nothing imports it, its folder is no package, and no
        text of the project runs it by `-m`, installs it, or takes it elsewhere without its folder.
        """
        data = self._graph.files.get(path)
        folder, name = os.path.split(path)
        is_imported = bool(self._graph.importers(path)) or self._only_defines(path)
        if data is None or is_imported or outermost_package(folder) or _CHANGES_PATH.search(data):
            return False
        stem = re.escape(name.removesuffix(".py").encode())
        within = re.escape(os.path.basename(folder).encode())
        by_module = re.compile(rb"\b" + within + rb"\." + stem + rb"\b")
        alone = re.compile(_COPIES + rb"\b" + stem + rb"\.py\b")
        installed = re.compile(rb"\b" + stem + rb"(?:\.py)?[\"':]")
        for other, text in self._texts:
            is_packaging = os.path.basename(other) in _PACKAGING
            if other != path and (
                by_module.search(text)
                or (is_packaging and installed.search(text))
                or (not other.endswith(_CODE) and alone.search(text))
                or (not other.endswith(_CODE) and _WITHOUT_FOLDER.search(text))
            ):
                return False
        return True

    @functools.cached_property
    def _texts(self) -> list[tuple[str, bytes]]:
        """All files of the projects that may name one of their scripts."""
        return [*self._graph.files.items(), *project_texts(self._graph.roots)]

    def _name_in(self, folder: str) -> str:
        """A name for the module that nothing else in its folder has."""
        if folder not in self._free:
            self._free[folder] = next(
                (name for name in NAMES if _is_free(os.path.join(folder, name))), NAMES[-1]
            )
        return self._free[folder]


@dataclasses.dataclass(frozen=True, slots=True)
class _Package:
    folder: str
    name: str  # by which it is imported; "" where only relative imports reach it
    is_relative: bool  # how the file imports the rest of it


def is_within_package(path: str) -> bool:
    """Whether a module has a name of its own in all programs, that of its package."""
    return bool(outermost_package(os.path.dirname(path)))


def misfit(path: str) -> str:
    """Why no program could have its helpers in a module of that path; "" where it could."""
    path = os.path.abspath(path)
    folder, name = os.path.split(path.removesuffix(".py"))
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("__"):
        return "no program could import a module of this name"
    beside = os.path.join(folder, name)
    if os.path.isdir(beside) and any(each.endswith(".py") for each in os.listdir(beside)):
        return f"for Python, the package {os.path.relpath(beside)} beside it has the same name"
    if is_within_package(path):
        return ""
    found = PathFinder.find_spec(name)
    is_other = found is not None and found.origin is not None
    is_other = is_other and not os.path.exists(path)  # which may be what was found
    if is_other or name in KNOWN | sys.stdlib_module_names:
        return f"it would hide the module {name} from programs that import it"
    return ""


def _is_free(base: str) -> bool:
    """Whether nothing is there, or what an earlier migration has put there."""
    if os.path.isdir(base):
        return False
    try:
        with open(f"{base}.py", encoding="utf-8") as file:
            return helper_module.is_ours(file.read())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))
