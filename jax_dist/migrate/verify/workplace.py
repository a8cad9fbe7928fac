"""The folders of a run: the project's, a copy of it, what is made for runs and goes with them."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_dist._usage import MisuseError
from jax_dist.lint.model import sources
from jax_dist.migrate.verify import repository

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # signals by which people end a program

_PREFIX, _LOCK = "jax_dist_verify_", "lock"
_LEFT_OUT = ("__pycache__", repository.NAME, ".hg")
_PLACES = ("/var/tmp", "/dev/shm")  # where nothing of the user's is, beside the usual one


def roots(files: Iterable[Path]) -> list[Path]:
    """The folders that files and the current folder belong to, up to what marks a project.

    Raises:
      MisuseError: one of them is the whole disk.
    """
    folders = {_project(each.resolve().parent) for each in files}
    folders.add(_project(Path.cwd().resolve()))
    for folder in folders:
        if folder == Path(folder.anchor):
            raise MisuseError("--verify does not run in the root folder: change to the project's")
    return sorted(
        folder for folder in folders if not any(other in folder.parents for other in folders)
    )


def _project(folder: Path) -> Path:
    home = Path.home()
    for each in (folder, *folder.parents):
        if each in (home, Path(each.anchor)):
            break
        if any((each / mark).exists() for mark in sources.PROJECT_MARKS):
            return each
    return folder


def outside(folders: Sequence[Path]) -> str:
    """A folder for temporary files outside of these."""
    for name in (tempfile.gettempdir(), *_PLACES):
        path = Path(name).resolve()
        if os.access(path, os.W_OK) and not any(path.is_relative_to(each) for each in folders):
            return str(path)
    raise MisuseError(
        "--verify needs a folder for temporary files outside of the project: set TMPDIR"
    )


@contextlib.contextmanager
def working_folder(place: str) -> Iterator[Path]:
    """An empty folder for runs, which goes with them; so does what killed ones have left.

    Args:
      place: the folder that it is made in.
    """
    for left in Path(place).glob(f"{_PREFIX}*"):
        # Its process has ended where its lock is free; one without a lock may just have been made.
        with contextlib.suppress(OSError), open(left / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            discard(left)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with open(made / f"{_LOCK}.new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when this process ends
        os.rename(lock.name, made / _LOCK)  # so that nobody ever sees it free while we live
        try:
            yield made
        finally:
            with signals(ENDING, signal.SIG_IGN):  # of the impatient: it takes only a moment
                discard(made)


@contextlib.contextmanager
def signals(names: Iterable[str], handler: Any) -> Iterator[None]:
    """Has signals handled in another way, but not those that are ignored."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    changed = {k: old for k, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in changed:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in changed.items():
            signal.signal(number, old)


def discard(folder: Path) -> None:
    """Removes what runs have left, also where they took their rights away."""
    for path, names, _ in os.walk(folder):
        for name in names:
            each = os.path.join(path, name)
            if not os.path.islink(each):
                with contextlib.suppress(OSError):  # another process may discard it too
                    os.chmod(each, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def copy(root: Path, views: Mapping[Path, Path]) -> None:
    """Copies a folder of the project; links into the project lead into the copies.

    Pipes and sockets are left out, and so is what goes while it is copied. A repository of git, the
    folder's or one inside, has a copy that can be asked and written to.
    """
    to = views[root]
    to.parent.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []  # what is below the folder, but not below environments
    tops: dict[Path, Path] = {}  # the top folders of repositories, by their copies
    for path, names, files in os.walk(root):
        if repository.NAME in (*names, *files):
            tops[to / Path(path).relative_to(root)] = Path(path)
        names[:] = [name for name in names if name not in _LEFT_OUT]
        parts += [Path(path, name) for name in (*names, *files) if name not in _LEFT_OUT]
        names[:] = [name for name in names if not _is_environment(Path(path, name))]
    if depth := len(repository.within(root).parts):  # it is a part of one
        tops[to.parents[depth - 1]] = root.parents[depth - 1]
    size = sum(map(_size, parts)) + sum(map(repository.size, tops.values()))
    free = shutil.disk_usage(to.parent).free
    if size > free // 2:
        raise MisuseError(
            f"--verify has to copy {root} ({size >> 20} MB), and has room for {free >> 21} MB: run "
            "it in a smaller folder, or set TMPDIR to one with more room"
        )

    def passed_over(path: str, names: list[str]) -> list[str]:
        return [name for name in names if name in _LEFT_OUT or not _is_copied(Path(path, name))]

    try:
        shutil.copytree(root, to, symlinks=True, ignore=passed_over)
    except shutil.Error as error:
        _check_gone(error)
    for copied, top in tops.items():
        if copied.is_dir():
            repository.copy(top, copied)
    for each in parts:
        copy = to / each.relative_to(root)
        if _is_environment(each):
            copy.symlink_to(each)
        elif copy.is_symlink() and os.path.isabs(target := os.readlink(copy)):
            for other, view in views.items():
                if Path(target).is_relative_to(other):
                    copy.unlink()
                    copy.symlink_to(view / Path(target).relative_to(other))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size if path.is_file() else 0
    except OSError:  # it has gone meanwhile
        return 0


def _is_copied(path: Path) -> bool:
    """Whether something is a file, a folder or a link, and no environment."""
    try:
        kind = path.lstat().st_mode
    except OSError:  # it has gone meanwhile
        return False
    is_one = stat.S_ISREG(kind) or stat.S_ISDIR(kind) or stat.S_ISLNK(kind)
    return is_one and not _is_environment(path)


def _check_gone(error: shutil.Error) -> None:
    """Raises MisuseError for what could not be copied, but not for what has gone meanwhile."""
    for source, _, why in error.args[0]:
        if not str(why).startswith(f"[Errno {errno.ENOENT}]"):
            raise MisuseError(
                f"--verify has to copy {source}, and cannot: {why}. Let it be read, or move it out "
                "of the project"
            ) from error


def _is_environment(path: Path) -> bool:
    """A virtual environment: its programs know their own place."""
    return (path / "pyvenv.cfg").is_file()


@contextlib.contextmanager
def emptied(folders: Iterable[Path]) -> Iterator[None]:
    """Folders that had been empty lose what a run leaves in them, and go where they were new."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            if os.listdir(folder):
                raise MisuseError(f"--scratch {folder}: something was put there meanwhile")
            stack.callback(_empty, folder, whole=is_new)
        yield


def _empty(folder: Path, *, whole: bool) -> None:
    if folder.is_symlink() or not folder.is_dir():  # the run has put something else there
        folder.unlink(missing_ok=True)
        return
    for each in os.scandir(folder):
        if each.is_dir(follow_symlinks=False):
            discard(Path(each.path))
        else:
            os.unlink(each.path)
    if whole:
        folder.rmdir()
