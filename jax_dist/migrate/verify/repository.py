"""Gives a copy of a folder the git repository of that folder, so that a program may ask git.

It has all but the objects, which it borrows as `git clone --shared` does: git reads them where they
are, and writes what is new into the copy.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

NAME = ".git"

# Large, or they lead back; of the top folder.
_LEFT_OUT = ("objects", "lfs", "annex", "modules", "worktrees", "commondir", "gitdir")
_CONFIGS = ("config", "config.worktree")
_ELSEWHERE = re.compile(rb"(?mi)^[ \t]*(?:worktree|bare)[ \t]*=.*\n?")


def within(root: Path) -> Path:
    """The path of a folder in the repository that it belongs to; "." where it is in none."""
    for each in (root, *root.parents):
        if (each / NAME).exists():
            return root.relative_to(each)
    return Path()


def size(folder: Path) -> int:
    """The bytes that `copy` writes."""
    found = 0
    for _, source in _parts(_folders(folder)):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            found += source.lstat().st_size
    return found


def copy(folder: Path, to: Path) -> None:
    """Makes the repository of a folder one of its copy too; nothing where it has none.

    Args:
      folder: the top folder of a repository, a work tree or a submodule.
      to: the copy, which exists.
    """
    folders = _folders(folder)
    if not folders:
        return
    target = to / NAME
    for each in ("objects/info", "refs/heads"):  # without these, git sees no repository
        (target / each).mkdir(parents=True)
    for name, source in _parts(folders):
        made = target / name
        made.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # it has gone meanwhile
            shutil.copy(source, made)
    for name in _CONFIGS:
        with contextlib.suppress(FileNotFoundError):
            made = target / name
            made.write_bytes(_ELSEWHERE.sub(b"", made.read_bytes()))
    lines = [os.fsencode(each) + b"\n" for each in _stores(folders[0] / "objects")]
    (target / "objects" / "info" / "alternates").write_bytes(b"".join(lines))


def _folders(folder: Path) -> list[Path]:
    """What all work trees share, then what this one has for itself."""
    own = folder / NAME
    if own.is_file():
        own = folder / _said(own).removeprefix("gitdir:").strip()
    if not (own / "HEAD").is_file():
        return []
    shared = own / (_said(own / "commondir").strip() or os.curdir)
    return [each.resolve() for each in (shared, own)]


def _said(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def _parts(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """The files to copy, by their names in the copy; later ones count."""
    for top in dict.fromkeys(folders):
        for path, names, files in os.walk(top):
            if Path(path) == top:
                names[:] = [name for name in names if name not in _LEFT_OUT]
                files = [name for name in files if name not in _LEFT_OUT]
            for name in files:
                source = Path(path, name)
                # A lock is of a git that runs now; a pipe cannot be read.
                if not name.endswith(".lock") and source.is_file():
                    yield str(source.relative_to(top)), source


def _stores(objects: Path) -> Iterator[Path]:
    """A folder of objects, and those from which it borrows itself."""
    yield objects
    for line in _said(objects / "info" / "alternates").splitlines():
        if line and not line.startswith("#"):
            yield (objects / line).resolve()
