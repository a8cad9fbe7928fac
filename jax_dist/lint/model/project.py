"""The other files of a project: what an imported name means there.

The files behind the imports of a file that is linted are found, read and parsed once each.
"""

import contextlib
import itertools
import os
import re
from collections.abc import Sequence

from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import KNOWN, Meaning, Module

# What may hand on a name of another file: an import, or an assignment, at whatever depth.
_IMPORTS = re.compile(rb"(?m)^[ \t]*(?:from|import)\b(?:[^(\n#]*\([^)]*\)|.*)")
_ASSIGNED = re.compile(rb"(?m)^[ \t]*(\w+)[ \t]*(?::[^=\n]+)?=(?!=)")
_DEEPEST = 12  # folders between a file and the root of its project


class Project:
    """Finds the files behind imports, and reads each at most once.

    Args:
      paths: what the user gave; roots are found from the files themselves.
    """

    def __init__(self, paths: Sequence[str] = ()):
        self.paths = paths
        self._modules: dict[str, Module | None] = {}
        self._given: dict[str, set[bytes] | None] = {}
        self._files: dict[tuple[str, str], str | None] = {}
        self._names: dict[str, str] = {}
        self._folders: dict[str, list[str]] = {}
        self._tops = {
            path if os.path.isdir(path) else os.path.dirname(path)
            for path in map(os.path.abspath, paths)
        }
        self._homes: dict[tuple[str, str], str | None] = {}

    def held(self, source: sources.Source) -> Module | None:
        """Return the module of a file, where an import has led to it already."""
        module = self._modules.get(os.path.abspath(source.path))
        return module if module is not None and module.source == source else None

    def module(self, source: sources.Source) -> Module:
        """Parse one file; raise ParseError if Python cannot."""
        path = os.path.abspath(source.path)
        folder = os.path.dirname(path)
        name = self.dotted_name(path)
        return Module(source, name, lambda name: self.meaning(name, folder))

    def opened(self, path: str) -> Module | None:
        """Return the module in a file; None where it cannot be read."""
        if path not in self._modules:
            self._modules[path] = None  # ends a circle of imports
            with contextlib.suppress(OSError, sources.UnreadableError, sources.ParseError):
                self._modules[path] = self.module(sources.read(path, sources.read_bytes(path)))
        return self._modules[path]

    def _hands_on(self, path: str, name: str) -> bool:
        """Return whether a file may give a name by more than a def; most need not be parsed."""
        if path not in self._given:
            try:
                data = sources.read_bytes(path)
            except OSError:
                data = b""
            imports = b" ".join(_IMPORTS.findall(data))
            names = {*re.findall(rb"\w+", imports), *_ASSIGNED.findall(data)}
            self._given[path] = names if b"*" not in imports else None
        names = self._given[path]
        return names is None or name.encode() in names

    def dotted_name(self, path: str) -> str:
        """Return such as `"scenic.train_lib.utils"`, from the outermost package on."""
        folder, file = os.path.split(path)
        parts = [] if file == "__init__.py" else [os.path.splitext(file)[0]]
        package = self._package(folder)
        return ".".join([*([package] if package else []), *parts])

    def _package(self, folder: str) -> str:
        if folder not in self._names:
            parent, name = os.path.split(folder)
            if not os.path.isfile(os.path.join(folder, "__init__.py")) or parent == folder:
                self._names[folder] = ""
            else:
                above = self._package(parent)
                self._names[folder] = f"{above}.{name}" if above else name
        return self._names[folder]

    def meaning(self, name: str, folder: str) -> Meaning | None:
        """Return what `pkg.module.name` means, seen from a file in `folder`; None: not ours."""
        parts = name.split(".")
        if len(parts) < 2 or parts[0] in KNOWN or self.home(parts[0], folder) is None:
            return None
        for length in range(len(parts) - 1, 0, -1):
            path = self.any_file(".".join(parts[:length]), folder)
            if path is None:
                continue
            first, *rest = parts[length:]
            module = self.opened(path) if self._hands_on(path, first) else None
            if module is None:
                return None
            found = module.meaning_of_name(module.scopes.module, first)
            if found is None or not rest:
                return found
            return None if found.is_partial else module.canonical(".".join((found.name, *rest)))
        return None

    def file(self, name: str, folder: str) -> str | None:
        """Return the file of a module, as a file in `folder` would import it."""
        return None if name.partition(".")[0] in KNOWN else self.any_file(name, folder)

    def any_file(self, name: str, folder: str) -> str | None:
        """Return the same, also of packages that are known: flax, in its own repository."""
        key = (name, folder)
        if key not in self._files:
            parts = name.split(".")
            home = self.home(parts[0], folder)
            self._files[key] = None if home is None else module_file(os.path.join(home, *parts))
        return self._files[key]

    def home(self, root: str, folder: str) -> str | None:
        """Return the nearest folder at or above `folder` in which a package or module `root` lies.

        Or the `src` of such a folder: `tests/` imports what lies in `src/`.
        """
        key = (root, folder)
        if key not in self._homes:
            near = self._within(folder)
            places = (place for above in near for place in (above, f"{above}{os.sep}src"))
            found = (place for place in places if sources.holds_module(place, root))
            self._homes[key] = next(found, None)
        return self._homes[key]

    def _within(self, folder: str) -> list[str]:
        """Return a folder and those above it, up to the root of its project.

        That is the outermost folder with a mark of one, such as `.git`; else the one that was
        given, or that holds the package around.
        """
        if folder not in self._folders:
            near = list(itertools.islice(sources.folders_above(folder), _DEEPEST))
            roots = [above for above in near if _has_mark(above)][-1:]
            roots = roots or [above for above in near if above in self._tops]
            end = near.index(roots[-1]) if roots else 0
            while end + 1 < len(near) and os.path.isfile(os.path.join(near[end], "__init__.py")):
                end += 1
            self._folders[folder] = near[: end + 1]
        return self._folders[folder]


def _has_mark(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, mark)) for mark in sources.PROJECT_MARKS)


def module_file(base: str) -> str | None:
    """Return the file of a module or package, by its path without an ending."""
    for path in (f"{base}.py", os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            return path
    return None
