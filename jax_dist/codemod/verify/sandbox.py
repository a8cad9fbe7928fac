"""Where programs are tried: a view of the project whose changes are nobody else's.

On Linux, an overlay: all paths stay, and what the program writes lies elsewhere. Where the system
does not allow it, a copy, which the program's paths lead into as far as we can see them.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.codemod.verify import overlay

Way: TypeAlias = Literal["overlay", "copy"]

ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # signals by which people end a program

_PREFIX, _LOCK = "jax_dist_verify_", "lock"
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_LEFT_OUT = ("__pycache__", ".git", ".hg")
_SPECIAL = frozenset(",:\\\n")  # of the mount's options
_PLACES = ("/var/tmp", "/dev/shm")  # where nothing of the user's is, beside the usual one


class Sandbox:
    """The project as one run sees it.

    Args:
      folder: an empty one outside of the project, which holds what is written.
      roots: the folders that make up the project, none inside another.
      way: how it is kept apart.
    """

    def __init__(self, folder: Path, roots: Sequence[Path], way: Way):
        self._folder, self._roots, self.way = folder, roots, way
        for number, root in enumerate(roots):
            if way == "copy":
                _copy(root, folder / str(number), roots, folder)
            else:
                (folder / str(number)).mkdir()
                (folder / f"work-{number}").mkdir()

    def put(self, path: Path, data: bytes) -> None:
        """Has a file of the project hold this, for this run alone."""
        real = path.resolve()
        number, root = self._root(real)
        there = self._folder / str(number) / real.relative_to(root)
        there.parent.mkdir(parents=True, exist_ok=True)
        there.unlink(missing_ok=True)  # it may be a link
        there.write_bytes(data)
        if real.exists():
            shutil.copymode(real, there)
        # Else Python may take the bytecode of the project for it, which goes by size and second.
        ahead = time.time() + 1000
        os.utime(there, (ahead, ahead))

    def inside(self, path: str) -> str:
        """The path by which the program finds a file."""
        if self.way == "overlay":
            return path
        for number, root in enumerate(self._roots):
            if path == str(root) or path.startswith(f"{root}{os.sep}"):
                return str(self._folder / str(number)) + path[len(str(root)) :]
        return path

    def outside(self, path: str) -> str:
        """The path that users know, of one that the program has seen."""
        for number, root in enumerate(self._roots):
            copy = os.path.realpath(self._folder / str(number))
            if self.way == "copy" and (path == copy or path.startswith(copy + os.sep)):
                return str(root) + path[len(copy) :]
        return path

    def command(self, command: Sequence[str]) -> list[str]:
        """What to start in place of a command, so that it runs in here and ends with us."""
        overlays = [
            [str(root), str(self._folder / str(number)), str(self._folder / f"work-{number}")]
            for number, root in enumerate(self._roots)
        ]
        wanted = {
            "parent": os.getpid(),
            "folder": self.inside(os.path.realpath(os.curdir)),
            "overlays": overlays if self.way == "overlay" else [],
        }
        python = [sys.executable, "-I", "-S", str(Path(overlay.__file__))]
        return [*python, json.dumps(wanted), *(self._argument(each) for each in command)]

    def search_path(self, inherited: str) -> list[str]:
        """PYTHONPATH: a copy comes before all that may lead to the project itself."""
        entries = [
            self.inside(os.path.abspath(each)) for each in inherited.split(os.pathsep) if each
        ]
        if self.way == "overlay":
            return entries
        own = [self._folder / str(number) for number in range(len(self._roots))]
        sources = [each / "src" for each in own]
        return [*map(str, (each for each in (*sources, *own) if each.is_dir())), *entries]

    def _argument(self, text: str) -> str:
        """A path, or one behind a `=`."""
        name, equals, path = text.partition("=")
        return f"{name}={self.inside(path)}" if equals else self.inside(text)

    def _root(self, path: Path) -> tuple[int, Path]:
        for number, root in enumerate(self._roots):
            if path.is_relative_to(root):
                return number, root
        raise ValueError(f"{path} is not of this project")


def check_command(command: Sequence[str]) -> None:
    """Raises a FileNotFoundError where the command is not there."""
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])


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
        if any((each / mark).exists() for mark in _MARKS):
            return each
    return folder


def base(folders: Sequence[Path]) -> str:
    """A folder for temporary files outside of these.

    Raises:
      MisuseError: there is none.
    """
    for name in (tempfile.gettempdir(), *_PLACES):
        path = Path(name).resolve()
        if os.access(path, os.W_OK) and not any(path.is_relative_to(each) for each in folders):
            return str(path)
    raise MisuseError(
        "--verify needs a folder for temporary files outside of the project: set TMPDIR"
    )


def way(folder: Path, folders: Sequence[Path]) -> Way:
    """How a project can be kept apart here.

    Args:
      folder: an empty one, for the trial.
      folders: the project's.
    """
    if sys.platform != "linux" or os.environ.get("JAX_DIST_VERIFY_BY_COPY"):
        return "copy"
    if any(_SPECIAL & set(f"{each}{folder}") for each in folders) or _has_mounts(folders):
        return "copy"
    (folder / "trial").mkdir()
    trial = Sandbox(folder / "trial", folders, "overlay")
    ran = subprocess.run(trial.command(["true"]), capture_output=True, check=False)
    _discard(folder / "trial")
    return "copy" if ran.returncode else "overlay"


def _has_mounts(folders: Sequence[Path]) -> bool:
    """Whether another file system is mounted below; an overlay would show an empty folder there."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [Path(line.split()[4].replace("\\040", " ")) for line in file]
    return any(folder in point.parents for folder in folders for point in points)


@contextlib.contextmanager
def folder(place: str) -> Iterator[Path]:
    """An empty folder for runs, which goes with them; so does what killed ones have left.

    Args:
      place: the folder that it is made in.
    """
    for left in Path(place).glob(f"{_PREFIX}*"):
        if _is_abandoned(left):
            _discard(left)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with open(made / f"{_LOCK}.new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when this process ends
        os.rename(lock.name, made / _LOCK)  # so that nobody ever sees it free while we live
        try:
            yield made
        finally:
            with _undisturbed():
                _discard(made)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals of the impatient wait for what takes only a moment."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


def _is_abandoned(made: Path) -> bool:
    """Whether its process has ended; one without a lock may just have been made."""
    try:
        with open(made / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _discard(folder: Path) -> None:
    """Removes what runs have left, also where they took their rights away."""
    for path, names, _ in os.walk(folder):
        for name in names:
            each = os.path.join(path, name)
            if not os.path.islink(each):
                with contextlib.suppress(OSError):  # another process may discard it too
                    os.chmod(each, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def _copy(root: Path, to: Path, folders: Sequence[Path], folder: Path) -> None:
    size = sum(
        each.lstat().st_size
        for each in root.rglob("*")
        if each.is_file() and _is_copied(each, root)
    )
    free = shutil.disk_usage(to.parent).free
    if size > free // 2:
        raise MisuseError(
            f"--verify has to copy {root} ({size >> 20} MB), and has room for {free >> 21} MB: run "
            "it in a smaller folder, or set TMPDIR to one with more room"
        )

    def passed_over(path: str, names: list[str]) -> list[str]:
        return [name for name in names if name in _LEFT_OUT or _is_environment(Path(path, name))]

    shutil.copytree(root, to, symlinks=True, ignore=passed_over)
    for path, names, files in os.walk(root):
        for name in names:
            if _is_environment(Path(path, name)):
                (to / Path(path, name).relative_to(root)).symlink_to(Path(path, name))
        names[:] = [each for each in names if not _is_environment(Path(path, each))]
        for name in (*names, *files):
            _redirect(Path(path, name), to / Path(path, name).relative_to(root), folders, folder)


def _is_copied(path: Path, root: Path) -> bool:
    above = [root, *(root / each for each in path.relative_to(root).parents)]
    return not (set(path.relative_to(root).parts) & set(_LEFT_OUT)) and not any(
        map(_is_environment, above)
    )


def _is_environment(path: Path) -> bool:
    """A virtual environment: its programs know their own place."""
    return (path / "pyvenv.cfg").is_file()


def _redirect(link: Path, copy: Path, folders: Sequence[Path], folder: Path) -> None:
    """A link into the project by an absolute path leads into the copy."""
    if not copy.is_symlink() or not os.path.isabs(os.readlink(copy)):
        return
    for number, root in enumerate(folders):
        target = Path(os.readlink(link))
        if target.is_relative_to(root):
            copy.unlink()
            copy.symlink_to(folder / str(number) / target.relative_to(root))
