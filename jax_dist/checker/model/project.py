"""The other files of a project: what a name that is imported from one of them means there."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_dist.checker.model import sources
from jax_dist.checker.model.semantic_model import Meaning, Module
from jax_dist.checker.model.uses import KNOWN

if TYPE_CHECKING:
    from jax_dist.checker.model.import_graph import ImportGraph

# A file that says none of these cannot hand on what the rules speak of.
_WORTH_READING = (
    b"pmap",
    b"partial",
    b"replicate",
    b"shard_map",
    b"jax_utils",
    b"pjit",
    b"import *",
)
_DEEPEST = 12  # folders between a file and the root of its project


@dataclasses.dataclass
class Project:
    """Finds the files behind imports, and reads each at most once.

    Args:
      paths: what the user gave; roots are found from the files themselves.
    """

    paths: Sequence[str] = ()
    _modules: dict[str, Module | None] = dataclasses.field(default_factory=dict, repr=False)
    _files: dict[tuple[str, str], str | None] = dataclasses.field(default_factory=dict, repr=False)
    _names: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    _homes: dict[tuple[str, str], str | None] = dataclasses.field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {"paths": self.paths, "_modules": {}, "_files": {}, "_names": {}, "_homes": {}}

    @functools.cached_property
    def graph(self) -> "ImportGraph":
        """Who imports whom; made when it is asked for first."""
        from jax_dist.checker.model.import_graph import ImportGraph  # only here: linting needs none

        return ImportGraph(self.paths, self.any_file)

    def held(self, source: sources.Source) -> Module | None:
        """The module of a file, where an import has led to it already."""
        module = self._modules.get(os.path.abspath(source.path))
        return module if module is not None and module.source == source else None

    def module(self, source: sources.Source) -> Module:
        """Parses one file. Raises parsing.ParseError."""
        path = os.path.abspath(source.path)
        folder = os.path.dirname(path)
        name = self.dotted_name(path)
        return Module(source, name, lambda name: self.meaning(name, folder), lambda: self.graph)

    def opened(self, path: str) -> Module | None:
        """The module in a file; None where it cannot be read, or says nothing of interest."""
        if path not in self._modules:
            self._modules[path] = None  # ends a circle of imports
            self._modules[path] = self._read(path)
        return self._modules[path]

    @property
    def looked_into(self) -> list[str]:
        """The files that imports have led to so far, in the order in which they did."""
        return list(self._modules)

    def parsed(self, path: str) -> Module | None:
        """The module in a file, whatever it says; None where it cannot be read."""
        return self._read(path, (b"",))

    def _read(self, path: str, worth: tuple[bytes, ...] = _WORTH_READING) -> Module | None:
        try:
            with open(path, "rb") as file:
                data = file.read()
            if not any(word in data for word in worth):
                return None
            return self.module(sources.read(path, data))
        except (OSError, sources.UnreadableError, sources.ParseError):
            return None

    def dotted_name(self, path: str) -> str:
        """`"scenic.train_lib.utils"`: from the outermost folder in a row that is a package."""
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
        """What `pkg.module.name` means at home, seen from a file in `folder`; None: not ours."""
        root, _, rest = name.partition(".")
        if not rest or root in KNOWN:
            return None
        if self.home(root, folder) is None:
            return None
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            path = self.any_file(".".join(parts[:length]), folder)
            if path is not None:
                return self._meaning_in(path, parts[length:])
        return None

    def _meaning_in(self, path: str, attributes: list[str]) -> Meaning | None:
        module = self.opened(path)
        if module is None:
            return None
        found = module.meaning_of_name(module.scopes.module, attributes[0])
        if found is None or len(attributes) == 1:
            return found
        return (
            None if found.is_partial else module.canonical(".".join((found.name, *attributes[1:])))
        )

    def file(self, name: str, folder: str) -> str | None:
        """The file of a module, as a file in `folder` would import it."""
        return None if name.partition(".")[0] in KNOWN else self.any_file(name, folder)

    def any_file(self, name: str, folder: str) -> str | None:
        """The same, also of packages that are known: flax, in its own repository."""
        key = (name, folder)
        if key not in self._files:
            self._files[key] = self._search(name.split("."), folder)
        return self._files[key]

    def _search(self, parts: list[str], folder: str) -> str | None:
        home = self.home(parts[0], folder)
        if home is None:
            return None
        base = os.path.join(home, *parts)
        for path in (base + ".py", os.path.join(base, "__init__.py")):
            if os.path.isfile(path):
                return path
        return None

    def home(self, root: str, folder: str) -> str | None:
        """The nearest folder at or above `folder` in which a package or module `root` lies.

        Or the `src` of such a folder: `tests/` imports what lies in `src/`.
        """
        key = (root, folder)
        if key not in self._homes:
            places = (
                place for above in _upward(folder) for place in (above, f"{above}{os.sep}src")
            )
            self._homes[key] = next((place for place in places if _has(place, root)), None)
        return self._homes[key]


def _has(folder: str, root: str) -> bool:
    base = os.path.join(folder, root)
    return os.path.isdir(base) or os.path.isfile(base + ".py")


def _upward(folder: str) -> Iterator[str]:
    for _ in range(_DEEPEST):
        yield folder
        parent = os.path.dirname(folder)
        if parent == folder:
            return
        folder = parent
