"""Which files are looked at: those that are named, and what the folders that are named hold.

Patterns are written as the settings spell them: `build`, `*_pb2.py`, `docs/old/*`. One without a
slash is matched with each name in the path; one with a slash is matched with the path as it is
seen from the folder of the settings, and with the folders above it.
"""

import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Iterator, Sequence

from jax_dist._usage import MisuseError, hint


@dataclasses.dataclass(frozen=True)
class Patterns:
    """Some patterns, and the folder from which those with a slash are seen."""

    texts: tuple[str, ...]
    folder: str

    def match_name(self, name: str) -> bool:
        """Whether a pattern without a slash matches this one name."""
        plain, expression = self._of_names
        return name in plain or (expression is not None and bool(expression.match(name)))

    def match_place(self, path: str) -> bool:
        """Whether a pattern with a slash matches the path or a folder above it."""
        if self._of_places is None:
            return False
        return any(self._of_places.match(place) for place in _and_above(self._seen(path)))

    def match(self, path: str) -> bool:
        """Whether any pattern matches the path, a name in it, or a folder above it."""
        names = self._seen(path).split("/")
        return any(map(self.match_name, names)) or self.match_place(path)

    @functools.cached_property
    def _of_names(self) -> tuple[frozenset[str], re.Pattern[str] | None]:
        names = [name for name in map(_tidy, self.texts) if "/" not in name]
        plain = frozenset(name for name in names if not re.search(r"[*?\[]", name))
        return plain, _any_of([name for name in names if name not in plain])

    @functools.cached_property
    def _of_places(self) -> re.Pattern[str] | None:
        return _any_of([place for place in map(_tidy, self.texts) if "/" in place])

    def _seen(self, path: str) -> str:
        try:
            seen = os.path.relpath(path, self.folder)
        except ValueError:  # Windows: another drive
            seen = path
        return seen.replace(os.sep, "/")


def _tidy(text: str) -> str:
    text = text.replace("\\", "/").rstrip("/")
    return text.removeprefix("./").removeprefix("**/")


def _any_of(globs: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(fnmatch.translate, globs))) if globs else None


def _and_above(place: str) -> list[str]:
    """`a/b/c.py` gives itself, `a/b` and `a`."""
    parts = place.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]


EXCLUDED = (
    ".eggs",
    ".git",
    ".hg",
    ".ipynb_checkpoints",
    ".jax_dist_cache",
    ".mypy_cache",
    ".nox",
    ".pytest_cache",
    ".ruff_cache",
    ".svn",
    ".tox",
    ".venv",
    "__pycache__",
    "__pypackages__",
    "build",
    "dist",
    "node_modules",
    "site-packages",
    "venv",
)

_SUFFIXES = (".py", ".pyi", ".ipynb")


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFiles:
    """What a search gave, each part sorted."""

    files: tuple[str, ...]  # named as the user named the folder they are in
    unreadable: tuple[str, ...] = ()  # folders that could not be opened


def find(paths: Sequence[str], exclude: Patterns) -> FoundFiles:
    """The files to look at, each once.

    Links to folders are not followed, so that no loop is entered; links to files are, unless what
    they lead to is there already.

    Args:
      paths: files, looked at whatever they are called, and folders.
      exclude: what is passed over inside the folders.

    Raises:
      MisuseError: a path does not exist.
    """
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise MisuseError(_missing(missing))
    named = [path for path in paths if not os.path.isdir(path)]
    walk = _Walk(exclude)
    for path in paths:
        if os.path.isdir(path):
            walk.enter(path)
    files = dict.fromkeys(map(_plain, [*named, *walk.files]))
    if walk.links:
        known = {os.path.realpath(file): file for file in files}
        for link in sorted(walk.links):
            known.setdefault(os.path.realpath(link), _plain(link))
        files = dict.fromkeys(known.values())
    return FoundFiles(tuple(sorted(files)), tuple(sorted(walk.unreadable)))


class _Walk:
    def __init__(self, exclude: Patterns) -> None:
        self.files: list[str] = []
        self.links: list[str] = []
        self.unreadable: list[str] = []
        self._exclude = exclude

    def enter(self, folder: str) -> None:
        folders = [*self._folders_in(_plain(folder))]
        while folders:  # not recursive: some trees are deeper than Python's stack
            folder = folders.pop()
            # A virtual environment, whatever it is called, holds the code of others.
            if not os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
                folders += self._folders_in(folder)

    def _folders_in(self, folder: str) -> Iterator[str]:
        prefix = "" if folder == "." else folder
        try:
            entries = os.scandir(folder)
        except OSError:
            self.unreadable.append(folder)
            return
        with entries:
            for entry in entries:
                path = os.path.join(prefix, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if not self._excluded(entry.name, path):
                        yield path
                elif entry.name.endswith(_SUFFIXES) and not self._excluded(entry.name, path):
                    self._keep(entry, path)

    def _keep(self, entry: "os.DirEntry[str]", path: str) -> None:
        if not entry.is_symlink():
            self.files.append(path)
        elif entry.is_file():  # neither a folder nor a link that leads nowhere
            self.links.append(path)

    def _excluded(self, name: str, path: str) -> bool:
        return self._exclude.match_name(name) or self._exclude.match_place(path)


def _plain(path: str) -> str:
    """`./a//b.py` and `a/b.py` are one file; `a/../b.py` stays, for `a` may be a link."""
    drive, rest = os.path.splitdrive(path)
    start = os.sep if rest.startswith(("/", os.sep)) else ""
    parts = [part for part in rest.replace(os.sep, "/").split("/") if part not in ("", ".")]
    return drive + start + os.sep.join(parts) or "."


def _missing(paths: Sequence[str]) -> str:
    here = os.getcwd()
    return "\n".join(
        f"there is no file or folder {path}, seen from {here}. {_near(path)}" for path in paths
    )


def _near(path: str) -> str:
    """What is there that is spelled alike; else, how much of the path is there."""
    folder, name = os.path.split(path)
    while folder and not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        names = []
    return hint(name, names, f"There is no {name} in {folder or 'this folder'}.")
