"""The files that are looked at, each as text that can be parsed and edited.

A `Source` goes back to the very same bytes. The files are those that are named, and what the
folders that are named hold.
"""

import ast
import bisect
import codecs
import dataclasses
import errno
import fnmatch
import functools
import io
import itertools
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence

from jax_dist._usage import MisuseError, hint
from jax_dist.lint.model.findings import Position

_LONGEST_LINE = 1000  # bytes of a line that are kept for a finding


class UnreadableError(ValueError):
    """A file whose bytes are not text in the encoding that it declares."""


class ParseError(ValueError):
    """Python cannot parse the file; carries the line and column, from 1."""

    def __init__(self, message: str, line: int = 1, column: int = 1):
        super().__init__(message, line, column)
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
    bom: bool = False

    @functools.cached_property
    def line_starts(self) -> list[int]:
        """The offset at which each line begins."""
        lines = self.code.splitlines(keepends=True)
        if not lines or lines[-1].endswith((b"\n", b"\r")):
            lines.append(b"")
        return list(itertools.accumulate(map(len, lines[:-1]), initial=0))

    def position(self, offset: int) -> Position:
        line = bisect.bisect_right(self.line_starts, offset) - 1
        column = offset - self.line_starts[line]
        if not self._is_ascii:  # bytes that begin no character do not count
            column -= bisect.bisect_left(self._continuations(line), column)
        return Position(line + 1, column + 1)

    @functools.cached_property
    def _is_ascii(self) -> bool:
        return self.code.isascii()

    @functools.cached_property
    def _by_line(self) -> dict[int, list[int]]:
        return {}

    def _continuations(self, line: int) -> list[int]:
        """Return where in a line bytes stand that go on with a character."""
        if line not in self._by_line:
            end = self.line_starts[line + 1] if line + 1 < len(self.line_starts) else None
            text = self.code[self.line_starts[line] : end]
            self._by_line[line] = [at for at, byte in enumerate(text) if byte & 0xC0 == 0x80]
        return self._by_line[line]

    def line_text(self, offset: int) -> str:
        """Return the line that holds `offset`, without its end.

        Of a very long one, "…" and the part from `offset` on.
        """
        line = bisect.bisect_right(self.line_starts, offset) - 1
        start = self.line_starts[line]
        end = self.line_starts[line + 1] if line + 1 < len(self.line_starts) else len(self.code)
        if end - start <= _LONGEST_LINE:
            return self.code[start:end].decode("utf-8", "replace").rstrip("\r\n")
        part = self.code[offset : min(end, offset + _LONGEST_LINE)]
        return f"…{part.decode('utf-8', 'ignore')}".rstrip("\r\n")

    def written(self, code: bytes) -> bytes:
        """Return the file's bytes once `code` is in the place of its code."""
        if self.encoding == "utf-8":
            return codecs.BOM_UTF8 + code if self.bom else code
        return code.decode("utf-8").encode(self.encoding)

    def edited(self, code: bytes) -> "Source":
        """Return the file as it will be read once `code` is in the place of its code."""
        return dataclasses.replace(self, code=code, python=code)


def read(path: str, data: bytes) -> Source:
    """Raise UnreadableError where the bytes are not what they say they are."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnreadableError("the file is UTF-16, which Python does not read; save it as UTF-8")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise UnreadableError(str(error)) from error
    if encoding in ("utf-8", "utf-8-sig"):
        bom = data.startswith(codecs.BOM_UTF8)
        code = data[len(codecs.BOM_UTF8) :] if bom else data
        _check(code, "utf-8")
        return Source(path, code, code, bom=bom)
    _check(data, encoding)
    code = data.decode(encoding).encode("utf-8")
    return Source(path, code, code, encoding)


def _check(data: bytes, encoding: str) -> None:
    try:
        data.decode(encoding)
    except (UnicodeError, LookupError) as error:
        raise UnreadableError(f"the file is not {encoding}: {error}") from error


def looks_like_python(path: str, data: bytes) -> bool:
    """Return whether a file can be judged by the words in its bytes, without parsing it.

    Not one of UTF-16, with broken bytes, or with another name, which the user must have given.
    """
    if b"\0" in data or not (path == "-" or path.endswith(_SUFFIXES)):
        return False
    try:
        return data.isascii() or bool(data.decode())
    except UnicodeDecodeError:
        return False


def parse(code: bytes) -> ast.Module:
    """Raise ParseError."""
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
    """Some patterns, and the folder from which those with a slash are seen.

    They are written as the settings spell them: `build`, `*_pb2.py`, `docs/old/*`. One without a
    slash is matched with each name in the path; one with a slash is matched with the path as it is
    seen from the folder, and with the folders above it.
    """

    texts: tuple[str, ...]
    folder: str

    def match_name(self, name: str) -> bool:
        """Return whether a pattern without a slash matches this one name."""
        plain, expression = self._of_names
        return name in plain or (expression is not None and bool(expression.match(name)))

    def match_place(self, path: str) -> bool:
        """Return whether a pattern with a slash matches the path or a folder above it."""
        if self._of_places is None:
            return False
        places = itertools.accumulate(self._seen(path).split("/"), "{}/{}".format)
        return any(map(self._of_places.match, places))

    def match(self, path: str) -> bool:
        """Return whether any pattern matches the path, a name in it, or a folder above it."""
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


_NOT_OURS = """
.eggs .git .hg .ipynb_checkpoints .mypy_cache .nox .pytest_cache .ruff_cache .svn
.tox .venv __pycache__ __pypackages__ build dist node_modules site-packages venv
"""
EXCLUDED = tuple(_NOT_OURS.split())
PROJECT_MARKS = (".git", ".github", "pyproject.toml", "setup.py", "setup.cfg")  # of its top folder

_SUFFIXES = (".py", ".pyi", ".ipynb")


def display(path: str) -> str:
    r"""Return a path for a message, with what would move a cursor or end a line escaped.

    >>> display("a\n\x1b[31m.py")
    'a\\n\\x1b[31m.py'
    """
    if path.isprintable():
        return path
    escaped = (each.encode("unicode_escape").decode() for each in path)
    return "".join(
        each if each.isprintable() else new for each, new in zip(path, escaped, strict=True)
    )


def read_bytes(path: str) -> bytes:
    """Return what a regular file holds; raise OSError for a pipe, a device or a folder."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", path)
        return file.read()


def find_files(paths: Sequence[str], exclude: Patterns) -> FoundFiles:
    """Return the files to look at, each once.

    Links to folders are not followed, so that no loop is entered. Links to files are followed
    within the folder that was named, or the current one: what is read may be printed.

    Args:
      paths: files, looked at whatever they are called, and folders.
      exclude: what is passed over inside the folders.

    Raises:
      MisuseError: a path does not exist.
    """
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise MisuseError("\n".join(map(_missing, missing)))
    walk = _Walk(exclude)
    for path in paths:
        if os.path.isdir(path):
            walk.enter(path)
        else:
            walk.add(path, os.path.dirname(path) or ".")
    files = dict.fromkeys(map(_plain, walk.files))
    known = {os.path.realpath(file): file for file in files if walk.links}
    for link in sorted(walk.links):
        known.setdefault(os.path.realpath(link), _plain(link))
    return FoundFiles(
        tuple(sorted(known.values() if known else files)), tuple(sorted(walk.skipped))
    )


class _Walk:
    def __init__(self, exclude: Patterns) -> None:
        self.files: list[str] = []
        self.links: list[str] = []
        self.skipped: list[str] = []
        self._exclude = exclude

    def add(self, path: str, top: str) -> None:
        """Take a file, if it is a regular one and no link leads out of `top`."""
        is_link = os.path.islink(path)
        if not os.path.isfile(path):
            if os.path.exists(path):  # not a link that leads nowhere
                self.skipped.append(f"{display(path)} is not a regular file")
        elif is_link and not _is_below(path, (top, os.getcwd())):
            self.skipped.append(f"{display(path)} is a link that leads out of {display(top)}")
        else:
            (self.links if is_link else self.files).append(path)

    def enter(self, top: str) -> None:
        folders = [*self._folders_in(_plain(top), top)]
        while folders:  # not recursive: some trees are deeper than Python's stack
            folder = folders.pop()
            # A virtual environment, whatever it is called, holds the code of others.
            if not os.path.isfile(os.path.join(folder, "pyvenv.cfg")):
                folders += self._folders_in(folder, top)

    def _folders_in(self, folder: str, top: str) -> Iterator[str]:
        prefix = "" if folder == "." else folder
        try:
            entries = os.scandir(folder)
        except OSError as error:
            self.skipped.append(f"the folder {display(folder)} cannot be read: {error.strerror}")
            return
        with entries:
            for entry in entries:
                path = os.path.join(prefix, entry.name)
                is_folder = entry.is_dir(follow_symlinks=False)
                if not (is_folder or entry.name.endswith(_SUFFIXES)):
                    continue
                if self._exclude.match_name(entry.name) or self._exclude.match_place(path):
                    continue
                shown = path.encode(errors="backslashreplace").decode()
                if shown != path:
                    self.skipped.append(f"the name of {display(shown)} is not UTF-8")
                elif is_folder:
                    yield path
                elif not os.path.isdir(path):
                    self.add(path, top)


def _is_below(path: str, tops: Iterable[str]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(os.path.join(os.path.realpath(top), "")) for top in tops)


def _plain(path: str) -> str:
    """Return one spelling of `./a//b.py` and `a/b.py`; `a/../b.py` stays, `a` may be a link."""
    drive, rest = os.path.splitdrive(path)
    start = os.sep if rest.startswith(("/", os.sep)) else ""
    parts = [part for part in rest.replace(os.sep, "/").split("/") if part not in ("", ".")]
    return drive + start + os.sep.join(parts) or "."


def _missing(path: str) -> str:
    folder, name = os.path.split(path)
    while folder and not os.path.isdir(folder):
        folder, name = os.path.split(folder)
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        names = []
    near = hint(name, names, f"There is no {display(name)} in {display(folder) or 'this folder'}.")
    return f"there is no file or folder {display(path)}, seen from {os.getcwd()}. {near}"


def folders_above(folder: str) -> Iterator[str]:
    """Yield a folder and those above it, the nearest first."""
    yield folder
    while (parent := os.path.dirname(folder)) != folder:
        yield (folder := parent)


def holds_module(folder: str, name: str) -> bool:
    """Return whether a folder holds a package or module, as far as a look at names shows."""
    base = os.path.join(folder, name)
    return os.path.isdir(base) or os.path.isfile(f"{base}.py")
