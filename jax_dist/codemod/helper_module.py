"""The helpers of a migration to plain JAX: their text, and from where a file gets them.

The text is cut from one file, `vendored/mapped.py`: the functions that are asked for, and what
these use. There is one module for each package. A file imports it as it imports the rest of its
project, for that is known to work: by a relative import, by the package's name, or as a file beside
it. What imports nothing of a project, and is imported by nothing, gets the helpers inside.
"""

import ast
import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import jax_dist
from jax_dist.checker.model import sources
from jax_dist.checker.model.project import Imported, Project, outermost_package
from jax_dist.checker.model.semantic_model import Module

_SOURCE = Path(__file__).with_name("vendored") / "mapped.py"
LICENCE = "# SPDX-License-Identifier: 0BSD"
_HEADING = re.compile(r"(?m)^# By jax-dist migrate \S+, ([0-9a-f]{12})\. Yours to keep\.$")
_WITHOUT_MAPPED = '"""Functions that JAX no longer has, by public names of JAX 0.8 or newer."""'


def functions() -> frozenset[str]:
    """The names that a file may ask for."""
    return frozenset(name for part in _parts() for name in part.names if not name.startswith("_"))


def module(names: Collection[str], unit: str = "    ") -> str:
    """A module that has some of `functions()`; `unit` is one step of indentation."""
    lines, tree = _tree()
    own = "\n".join(lines[tree.body[0].lineno - 1 : tree.body[0].end_lineno])
    docstring = own if "mapped" in names else _WITHOUT_MAPPED
    body = f"{docstring}\n\n{_imports(names)}\n\n\n{_definitions(names)}\n"
    body = _indented(body, unit)
    return f"{LICENCE}\n{_heading(body)}\n{body}"


def block(names: Collection[str], unit: str = "    ", bound: Collection[str] = ()) -> str:
    """The same for the inside of a file: statements of its level, with what they import.

    `bound` are names that the file has already, and by the same meaning.
    """
    body = f"{_imports(names, bound)}\n\n\n{_definitions(names, bound)}"
    return f"{LICENCE}\n{_heading(body)}\n{_indented(body.strip(), unit)}"


def bound_names(names: Collection[str]) -> dict[str, str]:
    """What a block binds: by name, what an import means by it, or "" for a definition."""
    bound = {name: "" for part in _needed(names) for name in part.names}
    for statement in ast.parse(_imports(names)).body:
        for alias in statement.names:  # type: ignore[attr-defined] # all are imports
            home = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            bound[alias.asname or alias.name.partition(".")[0]] = f"{home}{alias.name}"
    return bound


def present_in(text: str) -> frozenset[str]:
    """Those of the functions that a text defines at its level."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return functions() & found


def is_ours(text: str) -> bool:
    """Whether a migration has written a text; it may have been changed since."""
    return _HEADING.search(text) is not None


def is_unchanged(text: str) -> bool:
    """Whether nobody has changed it since, other than by a formatter."""
    found = _HEADING.search(text)
    return found is not None and found[1] == _digest(text[found.end() :])


def _heading(body: str) -> str:
    return f"# By jax-dist migrate {jax_dist.__version__}, {_digest(body)}. Yours to keep."


def _digest(text: str) -> str:
    """The same whatever a formatter makes of lines, quotes, commas and parentheses."""
    plain = re.sub(r"[\s'\"(),\\]", "", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def _indented(text: str, unit: str) -> str:
    """The text with another step of indentation; what hangs within a docstring hangs as far."""
    lines = text.splitlines()
    base = dict.fromkeys(range(len(lines)), 0)  # by line: spaces that a docstring begins with
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            base |= dict.fromkeys(range(node.lineno, node.end_lineno or 0), node.col_offset)
    for number, line in enumerate(lines):
        spaces = len(line) - len(line.lstrip(" "))
        steps = (base[number] or spaces) // 4
        lines[number] = unit * steps + line[4 * steps :] if spaces >= 4 * steps else line
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


# --- the source, taken apart


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One statement of the module's level."""

    names: frozenset[str]  # that it binds
    reads: frozenset[str]
    text: str  # with the comments above it
    is_close: bool  # to the part above: no blank line between


@functools.cache
def _tree() -> tuple[list[str], ast.Module]:
    text = _SOURCE.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


@functools.cache
def _parts() -> tuple[_Part, ...]:
    lines, tree = _tree()
    parts: list[_Part] = []
    for node in tree.body[1:]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        while lines[first - 2].startswith("#"):
            first -= 1
        stored = {each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)}
        names = stored or {node.name}  # type: ignore[attr-defined] # a function or a class
        reads = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        text = "\n".join(lines[first - 1 : node.end_lineno])
        is_close = bool(lines[first - 2].strip())
        parts.append(_Part(frozenset(names), frozenset(reads), text, is_close))
    return tuple(parts)


def _needed(names: Collection[str]) -> list[_Part]:
    """The parts that define these names, and what those use, in order."""
    wanted = set(names)
    found: list[_Part] = []
    while (parts := [part for part in _parts() if part.names & wanted]) != found:
        found = parts
        wanted.update(*(part.reads for part in parts))
    return found


def _definitions(names: Collection[str], bound: Collection[str] = ()) -> str:
    text = ""
    for part in _needed(names):
        if part.names <= set(bound):
            continue
        gap = "\n" if part.is_close and text else "\n\n\n"
        text += f"{gap if text else ''}{part.text}"
    return text


def _imports(names: Collection[str], bound: Collection[str] = ()) -> str:
    """The imports that are used, in the order of the source."""
    reads = {name for part in _needed(names) for name in part.reads}
    kept: list[tuple[int, str]] = []
    _, tree = _tree()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            used = [each for each in node.names if each.name in reads and each.name not in bound]
            if used:
                names_ = ", ".join(map(ast.unparse, used))
                home = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                line = f"{home}import {names_}"
                kept.append(("jax" in line, line))
    groups = [[line for is_jax, line in kept if is_jax == group] for group in (False, True)]
    return "\n\n".join("\n".join(group) for group in groups if group)


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

    def __init__(self, project: Project, chosen: str):
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
        if not package.is_relative:
            return Home(target, f"{package.name}.{name}")
        depth = os.path.relpath(os.path.dirname(path), package.folder)
        dots = "." * (1 if depth == os.curdir else 2 + depth.count(os.sep))
        return Home(target, f"{dots}{name}")

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
        """A module in the same folder, where files of it import each other so."""
        folder = os.path.dirname(path)
        imports = any(
            not is_relative
            and target.startswith(
                (os.path.join(folder, f"{root}.py"), os.path.join(folder, root, ""))
            )
            for name, target, is_relative in self._graph.imports_of(path)
            for root in [name.partition(".")[0]]
        )
        if not imports and not any(
            not each.is_relative and os.path.dirname(each.by) == folder
            for each in self._graph.importers(path)
        ):
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
    name: str  # by which it is imported; "" where only relative imports reach it
    is_relative: bool  # how the file imports the rest of it


def _is_free(base: str) -> bool:
    """Whether nothing is there, or what an earlier migration has put there."""
    if os.path.isdir(base):
        return False
    try:
        with open(f"{base}.py", encoding="utf-8") as file:
            return is_ours(file.read())
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))
