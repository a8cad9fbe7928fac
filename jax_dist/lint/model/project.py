"""The other files of a project: what an imported name means there.

Only files below the given paths are read. Meanings are cached; syntax trees only for a while.
"""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence

from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import KNOWN, Meaning, Module

_DEEPEST = 12  # folders between a file and the root of its project
# Names that a file defines itself are no aliases: `def f`, `class A`, and `x = 3` but not `x = y`.
_DEFINED = re.compile(
    rb"(?m)^(?:(?:async )?def|class)[ \t]+(\w+)"
    rb"|^(\w+)[ \t]*=(?![ \t]*(?:[\w.]+[ \t]*(?:#.*)?\r?$|[\w.]*partial\())"
)


class Project:
    """The files of a project, found by the imports in others; `paths` are in it, or its folders."""

    def __init__(self, paths: Sequence[str] = ()):
        self._tops = tuple({os.path.join(_top_of(os.path.abspath(path)), "") for path in paths})
        self._meanings: dict[tuple[str, str], Meaning | None] = {}
        self._import_root = functools.cache(_import_root)
        self._is_package = functools.cache(_is_package)
        self._defined = functools.lru_cache(64)(_defined_names)
        self.file: Callable[[str, str], str | None] = functools.cache(self._file)
        self.opened: Callable[[str], Module | None] = functools.lru_cache(8)(self._open)

    def module(self, source: sources.Source) -> Module:
        """Parse one file; raise ParseError if Python cannot."""
        path = os.path.abspath(source.path)
        folder = os.path.dirname(path)
        name, elsewhere = self.dotted_name(path), lambda name: self.meaning(name, folder)
        return Module(source, name, elsewhere)

    def _open(self, path: str) -> Module | None:
        """Return another file of the project; None if it cannot be read or parsed."""
        with contextlib.suppress(OSError, sources.UnreadableError, sources.ParseError):
            return self.module(sources.read(path, sources.read_bytes(path)))
        return None

    def dotted_name(self, path: str) -> str:
        """Return the name to import a file by, such as "scenic.train_lib.utils"."""
        folder, file = os.path.split(path)
        parts = [] if file == "__init__.py" else [os.path.splitext(file)[0]]
        while self._is_package(folder):
            folder, name = os.path.split(folder)
            parts.insert(0, name)
        return ".".join(parts)

    def meaning(self, name: str, folder: str) -> Meaning | None:
        """Return what `pkg.module.name` means to a file in `folder`; None if no file shows it."""
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):  # the longest part that is a module
            path = self.file(".".join(parts[:length]), folder)
            if path is not None:
                return self._meaning_in(path, ".".join(parts[length:]))
        return None

    def _meaning_in(self, path: str, name: str) -> Meaning | None:
        """Return what "pmap" or "compat.pmap" means in the module at `path`, such as "jax.pmap".

        None if the file does not show it, or defines the name itself.
        """
        key = (path, name)
        if key in self._meanings:
            return self._meanings[key]
        self._meanings[key] = None  # ends a circle of imports
        base, _, attribute = name.rpartition(".")
        meaning = None
        if base:
            module_meaning = self._meaning_in(path, base)  # of "compat" in "compat.pmap"
            if module_meaning is not None and not module_meaning.is_partial:
                full_name = f"{module_meaning.name}.{attribute}"
                meaning = self.meaning(full_name, os.path.dirname(path)) or Meaning(full_name)
        elif name.encode() not in self._defined(path):  # else the file need not be parsed
            module = self.opened(path)
            meaning = module and module.meaning_of_name(module.scopes.module, name)
        self._meanings[key] = meaning
        return meaning

    def _file(self, name: str, folder: str) -> str | None:
        """Return the file that `import name` in `folder` reads; None if not one of the project."""
        parts = name.split(".")
        import_root = None if parts[0] in KNOWN else self._import_root(parts[0], folder)
        if import_root is None:
            return None
        base = os.path.join(import_root, *parts)
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            if path.startswith(self._tops) and os.path.isfile(path):
                return path
        return None


def _import_root(package: str, folder: str) -> str | None:
    """Return the nearest folder at or above `folder`, or its `src`, with a module `package`."""
    near = sources.folders_above(folder)[:_DEEPEST]
    places = (place for above in near for place in (above, os.path.join(above, "src")))
    return next((place for place in places if sources.holds_module(place, package)), None)


def _is_package(folder: str) -> bool:
    """Return whether a folder is a package; the root of the file system, without a name, is not."""
    return os.path.basename(folder) != "" and os.path.isfile(os.path.join(folder, "__init__.py"))


def _top_of(path: str) -> str:
    """Return a folder itself; for a file, the outermost folder with a mark such as `.git`."""
    if os.path.isdir(path):
        return path
    folder = os.path.dirname(path)
    return [folder, *filter(sources.is_project, sources.folders_above(folder))][-1]


def _defined_names(path: str) -> frozenset[bytes]:
    """Return the names of a file's functions, classes and values, as far as its text shows them."""
    with contextlib.suppress(OSError):
        return frozenset[bytes]().union(*_DEFINED.findall(sources.read_bytes(path)))
    return frozenset()
