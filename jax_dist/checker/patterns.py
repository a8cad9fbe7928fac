"""Patterns for paths, as the settings spell them: `build`, `*_pb2.py`, `docs/old/*`.

A pattern without a slash is matched with each name in the path; one with a slash is matched with
the path as it is seen from the folder of the settings, and with the folders above it.
"""

import dataclasses
import fnmatch
import functools
import os
import re
from collections.abc import Sequence


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
