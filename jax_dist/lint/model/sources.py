"""The files to lint: how they are found, and each as text that can be parsed and edited.

A `Source` that is not edited is written back as the very same bytes.
"""

import ast
import bisect
import dataclasses
import errno
import fnmatch
import functools
import io
import itertools
import os
import pathlib
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator, Sequence

from jax_dist._usage import MisuseError, hint
from jax_dist.lint.findings import Position


class UnreadableError(ValueError):
    """A file whose bytes are not text in the encoding that it declares."""


class ParseError(ValueError):
    """Python cannot parse the file; carries the line and column, from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(f"line {line}: {message}")
        self.message: str = message
        self.line: int = line
        self.column: int = column


@dataclasses.dataclass(frozen=True)
class Source:
    """One Python file.

    `code` is UTF-8 without a byte order mark, whatever the file's encoding; `python` is what is
    parsed, of the same length (a notebook hides its magics there).
    """

    path: str
    code: bytes
    python: bytes
    encoding: str = "utf-8"

    @functools.cached_property
    def line_starts(self) -> list[int]:
        """The offset at which each line begins."""
        lines = self.code.splitlines(keepends=True)
        if not lines or lines[-1].endswith((b"\n", b"\r")):
            lines.append(b"")
        return list(itertools.accumulate(map(len, lines[:-1]), initial=0))

    def row(self, offset: int) -> int:
        """Return the number of the line that holds a byte, from 0."""
        return bisect.bisect_right(self.line_starts, offset) - 1

    def position(self, offset: int) -> Position:
        """Return the line and column, both from 1, of a byte; columns count characters."""
        row = self.row(offset)
        start = self.line_starts[row]
        inside = bisect.bisect_left(self._continuations, offset)
        inside -= bisect.bisect_left(self._continuations, start)
        return Position(row + 1, offset - start - inside + 1)

    @functools.cached_property
    def _continuations(self) -> list[int]:
        """The offsets of the bytes that continue a character, and so are no column."""
        return [match.start() for match in re.finditer(rb"[\x80-\xbf]", self.code)]

    def line_text(self, offset: int, longest: int = 1000) -> str:
        """Return the line that holds `offset`, without its end.

        Of one with more bytes than `longest`, return "…" and the part that begins at `offset`.
        """
        row = self.row(offset)
        start = self.line_starts[row]
        end = self.line_starts[row + 1] if row + 1 < len(self.line_starts) else len(self.code)
        is_long = end - start > longest
        if is_long:
            start, end = offset, min(end, offset + longest)
        text = self.code[start:end].decode("utf-8", "ignore").rstrip("\r\n")
        return f"…{text}" if is_long else text

    def written(self, code: bytes) -> bytes:
        """Return the file's bytes once `code` is in the place of its code."""
        return code.decode().encode(self.encoding)

    def edit(self, code: bytes) -> "Source":
        """Return the file as it will be read once `code` is in the place of its code."""
        return dataclasses.replace(self, code=code, python=code)


def read(path: str, data: bytes) -> Source:
    """Return the text of a Python file; raise UnreadableError if its bytes cannot be decoded."""
    encoding = "utf-8"
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        code = data.decode(encoding).encode()
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
    except (UnicodeError, LookupError) as error:
        raise UnreadableError(f"the file is not {encoding}: {error}") from error
    return Source(path, code, code, encoding)


_LONG_LINE = 100_000  # bytes; of f-strings, Python 3.11 takes 41 s for a line of 800 kB
_F_STRING = re.compile(rb"""\b[rR]?[fF][rR]?["']""")


def parse(code: bytes) -> ast.Module:
    """Return the tree of some UTF-8 code; raise ParseError if Python cannot parse it."""
    for number, line in enumerate(code.splitlines() if len(code) > _LONG_LINE else (), start=1):
        if len(line) > _LONG_LINE and _F_STRING.search(line):
            why = "f-strings in a line of {:,} bytes, which takes minutes; split the line"
            raise ParseError(why.format(len(line)), number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own invalid escapes
            return ast.parse(code.decode())
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        raise ParseError(error.msg or "invalid syntax", line, column) from error
    except (ValueError, RecursionError, MemoryError, SystemError) as error:
        raise ParseError(str(error) or type(error).__name__) from error


def parses(code: bytes) -> bool:
    """Return whether Python can parse a text by itself."""
    try:
        parse(code)
    except ParseError:
        return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class FoundFiles:
    """Result of a search for files, each part sorted."""

    files: tuple[str, ...]  # named as the user named the folder they are in
    skipped: tuple[str, ...] = ()  # sentences: what was not looked at, and why


@dataclasses.dataclass(frozen=True)
class Patterns:
    """Globs of files and folders, as the settings have them: `build`, `*_pb2.py`, `docs/old/*`.

    One without a slash is matched with each name in a path. One with a slash is matched with the
    path relative to `folder`, and with that of each folder above the file.
    """

    texts: tuple[str, ...]
    folder: str

    def match(self, path: str, name: str = "") -> bool:
        """Return whether a pattern matches a path, or a folder above it.

        `name` is its last part, if the names of the folders above need not be checked.
        """
        name_pattern, path_pattern = self._expressions
        parts = os.path.relpath(path, self.folder).replace(os.sep, "/").split("/")
        paths = itertools.accumulate(parts, "{}/{}".format)  # "a", "a/b", "a/b/c.py"
        names = [name] if name else parts
        return any(map(name_pattern.fullmatch, names)) or any(map(path_pattern.fullmatch, paths))

    @functools.cached_property
    def _expressions(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The patterns without a slash, and those with one, as an expression each."""
        texts = [text.replace("\\", "/").rstrip("/").removeprefix("./") for text in self.texts]
        texts = [text.removeprefix("**/") for text in texts]
        for_names = [fnmatch.translate(text) for text in texts if "/" not in text]
        for_paths = [fnmatch.translate(text) for text in texts if "/" in text]
        return re.compile("|".join(for_names)), re.compile("|".join(for_paths))


_NOT_OURS = """
.eggs .git .hg .ipynb_checkpoints .mypy_cache .nox .pytest_cache .ruff_cache .svn
.tox .venv __pycache__ __pypackages__ build dist node_modules site-packages venv
"""
EXCLUDED = tuple(_NOT_OURS.split())
_MARKS = (".git", ".github", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's top folder
_SUFFIXES = (".py", ".pyi", ".ipynb")


def display(path: str) -> str:
    """Return a path for a message, with what would move a cursor or end a line escaped."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in path)


def read_bytes(path: str) -> bytes:
    """Return what a regular file holds; raise OSError for a pipe, a device or a folder."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return file.read()


def find_files(paths: Sequence[str], exclude: Patterns) -> FoundFiles:
    """Return the files to lint, each once; raise MisuseError if a path does not exist.

    They are those that are named, and those in named folders but for `exclude`. Links are not
    followed: what they lead to is found where it lies, or is not of the project.
    """
    missing = [path for path in paths if not os.path.lexists(path)]
    if missing:
        raise MisuseError("\n".join(map(_missing, missing)))
    files: set[str] = set()
    skipped: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            files.update(_files_in(path, exclude, skipped))
        elif _is_regular(path):
            files.add(os.path.normpath(path))
        else:
            skipped.append(f"{display(path)} is no regular file, and links are not followed")
    return FoundFiles(tuple(sorted(files)), tuple(sorted(skipped)))


def _files_in(top: str, exclude: Patterns, skipped: list[str]) -> Iterator[str]:
    """Yield the files below a folder; add a sentence to `skipped` for what cannot be read."""

    def skip(error: OSError) -> None:
        skipped.append(f"the folder {display(error.filename)} cannot be read: {error.strerror}")

    for folder, folders, names in os.walk(top, onerror=skip):
        if "pyvenv.cfg" in names and folder != top:  # a virtual environment, whatever its name
            folders.clear()
            continue
        folders[:] = [x for x in folders if not exclude.match(os.path.join(folder, x), x)]
        for name in names:
            path = os.path.normpath(os.path.join(folder, name))
            if name.endswith(_SUFFIXES) and _is_regular(path) and not exclude.match(path, name):
                yield path


def _is_regular(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _missing(path: str) -> str:
    """Return the message for a path that does not exist, with the nearest name that does."""
    folder, name = os.path.split(path)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    near = hint(name, names, f"There is no {display(name)} in {display(folder) or 'this folder'}.")
    return f"there is no file or folder {display(path)}, seen from {os.getcwd()}. {near}"


def folders_above(folder: str) -> list[str]:
    """Return a folder and those above it, the nearest first."""
    return [folder, *map(str, pathlib.PurePath(folder).parents)]


def is_project(folder: str) -> bool:
    """Return whether a folder looks like the top of a project: it holds `.git` or the like."""
    return any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS)


def holds_module(folder: str, name: str) -> bool:
    """Return whether a folder holds `name.py` or a folder `name`, which may be a package."""
    base = os.path.join(folder, name)
    return os.path.isdir(base) or os.path.isfile(f"{base}.py")
