"""Runs the user's program so that nothing that it does to a file lasts.

On Linux, over an overlay of all files: each is at its path, and what the program writes lies
elsewhere. Where the system does not allow it, in a copy of the project, which the program's paths
lead into as far as we can see them; it may write nowhere else.
"""

import ast
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.checker.model import sources
from jax_dist.codemod.verify import evidence, isolation
from jax_dist.codemod.verify.evidence import Run
from jax_dist.launch.ranks import run_to_end

_Way: TypeAlias = Literal["overlay", "locked copy", "copy"]

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # signals by which people end a program

_RECORDING = Path(__file__).with_name("recording")
_PREFIX, _LOCK = "jax_dist_verify_", "lock"
_LEFT_OUT = ("__pycache__", ".git", ".hg")
_OPEN = ("/dev", "/proc")  # where a program writes that keeps nothing
_PLACES = ("/var/tmp", "/dev/shm")  # where nothing of the user's is, beside the usual one


@contextlib.contextmanager
def stage(
    command: Sequence[str],
    files: Iterable[Path],
    *,
    devices: int,
    timeout: float | None,
    scratch: Iterable[str] = (),
) -> Iterator["Workspace"]:
    """Keeps some runs apart from the user's files, and from each other.

    Whatever ends the block, an error, Ctrl-C or a signal, the runs end too, and so they do where
    this process is killed.

    Args:
      command: the program and its arguments.
      files: that are being migrated.
      devices: how many CPU devices to simulate.
      timeout: the seconds after which a run is stopped; None for never.
      scratch: folders, empty or new, that the runs may write to where there is no overlay.

    Raises:
      MisuseError: there is no room for it, or a folder for scratch holds something.
      OSError: the command cannot be started.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    folders = _roots(files)
    free = [Path(each).resolve() for each in scratch]
    for each in free:
        if each.exists() and not (each.is_dir() and not os.listdir(each)):
            raise MisuseError(f"--scratch {each}: it must be a new folder or an empty one")

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Signals raise, as Ctrl-C does by itself, so that what runs is ended.
    others = [name for name in _ENDING if name != "SIGINT"]
    with _signals(others, leave), working_folder(_outside(folders)) as folder:
        yield Workspace(tuple(command), folder, folders, devices, timeout, free)


class Workspace:
    """Where runs of one command take place, one after another.

    Args:
      command: the program and its arguments.
      folder: an empty one outside of the project.
      roots: the folders of the project.
      devices: how many CPU devices to simulate.
      timeout: the seconds after which a run is stopped; None for never.
      scratch: empty folders, or new ones, that runs may write to; without an overlay, no others.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        roots: Sequence[Path],
        devices: int,
        timeout: float | None,
        scratch: Sequence[Path] = (),
    ):
        self.command = command
        self.way: _Way = _way(folder, roots)
        self._folder, self._roots, self._scratch = folder, roots, scratch
        self._devices, self._timeout = devices, timeout
        self._runs = 0

    def recorded(self, changes: Mapping[Path, bytes], files: Iterable[Path]) -> Run:
        """Runs the command to its end, with its mapped functions recorded.

        Args:
          changes: what files of the project hold for this run alone.
          files: that are being migrated, whose jitted functions are recorded too.

        Raises:
          OSError: the command cannot be started.
        """
        hooked = {path: _with_helper_recorded(data) for path, data in changes.items()}
        box = self._sandbox(hooked)
        inside = [box.inside(str(Path(file).resolve())) for file in files]
        ended = self._run(box, {"files": inside})
        for site in ended.record.sites:
            site.file = box.outside(site.file)
        return ended

    def merged(self, changes: Mapping[Path, bytes]) -> Run:
        """Runs a merged program to its end; it writes down itself what happens at its places.

        Args:
          changes: what files of the project hold for this run alone.

        Raises:
          OSError: the command cannot be started.
        """
        return self._run(self._sandbox(changes), {"merged": True})

    def _sandbox(self, changes: Mapping[Path, bytes]) -> "_Sandbox":
        self._runs += 1
        folder = self._folder / f"sandbox-{self._runs}"
        folder.mkdir()
        box = _Sandbox(folder, self._roots, self.way, self._records)
        for path, data in changes.items():
            box.put(path, data)
        return box

    @property
    def _records(self) -> Path:
        """What the present run writes down of itself."""
        return self._folder / f"run-{self._runs}" / "records"

    def _run(self, box: "_Sandbox", wanted: Mapping[str, Any]) -> Run:
        folder, records = self._records.parent, self._records
        first, own, output = folder / "path", folder / "own", folder / "output"
        for each in (first, own, records):
            each.mkdir(parents=True)
        shutil.copy(_RECORDING / "bootstrap.py", first / "sitecustomize.py")
        path = [str(first), *box.search_path(os.environ.get("PYTHONPATH", ""))]
        environment = _environment(self._devices)
        writable: list[str] = []
        if self.way != "overlay":
            writable = [str(box.folder), str(records), str(own), *map(str, self._scratch), *_OPEN]
            # Python would write bytecode beside what it imports.
            environment |= {"TMPDIR": str(own), "PYTHONDONTWRITEBYTECODE": "1"}
            wanted = {"writable": writable, **wanted}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_DIST_RECORD": json.dumps(
                {"package": str(_RECORDING), "folder": str(records), **wanted}
            ),
        }
        with _emptied(self._scratch if writable else ()):
            command = box.command(self.command, writable)
            code = run_to_end(command, environment, output, self._timeout)
        return evidence.read(code, output.read_text(errors="replace"), records)


@contextlib.contextmanager
def _emptied(folders: Iterable[Path]) -> Iterator[None]:
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
    for each in os.scandir(folder):
        if each.is_dir(follow_symlinks=False):
            _discard(Path(each.path))
        else:
            os.unlink(each.path)
    if whole:
        folder.rmdir()


_RECORD_HELPER = "__import__('_jax_dist_recording.start').start.record_helper(globals())\n"


def _with_helper_recorded(data: bytes) -> bytes:
    """A file in which the helper `mapped` of `--to jax` is recorded, where the file has it.

    It may lie inside a script, which nobody imports, so the script itself has to tell.
    """
    if b"def mapped(" not in data or b"class _Program" not in data:
        return data
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return data
    helpers = [e for e in body if isinstance(e, ast.FunctionDef) and e.name == "mapped"]
    if not helpers:
        return data
    end, lines = helpers[-1].end_lineno, data.splitlines(keepends=True)
    return b"".join([*lines[:end], _RECORD_HELPER.encode(), *lines[end:]])


def _environment(devices: int) -> dict[str, Any]:
    """This process's, with simulated devices, and with one order of sets for all runs."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    number = "--xla_force_host_platform_device_count"
    flags = inherited.pop("XLA_FLAGS", "").split()
    flags = [*(flag for flag in flags if not flag.startswith(number)), f"{number}={devices}"]
    return {
        "PYTHONHASHSEED": "0",
        # The threads of XLA's CPU client. By default as many as cores, where simulated devices that
        # wait in collectives may take them all: XLA then ends the process after 40 seconds.
        "NPROC": str(4 * devices),
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
    }


class _Sandbox:
    """The disk as one run sees it.

    Args:
      folder: an empty one outside of the project, which holds what is written.
      roots: the folders that make up the project, none inside another.
      way: how they are kept apart.
      records: the folder that stays the same inside.
    """

    def __init__(self, folder: Path, roots: Sequence[Path], way: _Way, records: Path):
        self.folder, self.way, self._records = folder, way, records
        self._views = {root: folder / str(number) for number, root in enumerate(roots)}
        for number, (root, view) in enumerate(self._views.items()):
            if way != "overlay":
                _copy(root, self._views)
            else:
                view.mkdir()
                (folder / f"work-{number}").mkdir()

    def put(self, path: Path, data: bytes) -> None:
        """Has a file of the project hold this, for this run alone."""
        real = path.resolve()
        root = next(each for each in self._views if real.is_relative_to(each))
        there = self._views[root] / real.relative_to(root)
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
        return self._moved(path, {str(root): str(view) for root, view in self._views.items()})

    def outside(self, path: str) -> str:
        """The path that users know, of one that the program has seen."""
        views = self._views.items()
        return self._moved(path, {os.path.realpath(view): str(root) for root, view in views})

    def _moved(self, path: str, folders: Mapping[str, str]) -> str:
        for old, new in folders.items() if self.way != "overlay" else ():
            if path == old or path.startswith(old + os.sep):
                return new + path[len(old) :]
        return path

    def command(self, command: Sequence[str], writable: Sequence[str] = ()) -> list[str]:
        """What to start in place of a command, so that it runs in here and ends with us."""
        view = {
            "root": str(self.folder),
            "uppers": {
                str(root): [str(view), str(self.folder / f"work-{number}")]
                for number, (root, view) in enumerate(self._views.items())
            },
            "shared": [str(self._records)],
        }
        wanted = {
            "parent": os.getpid(),
            "folder": self.inside(os.path.realpath(os.curdir)),
            "view": view if self.way == "overlay" else None,
            "writable": writable if self.way == "locked copy" else (),
        }
        words = []
        for each in command:  # a path, or one behind a `=`
            name, equals, path = each.partition("=")
            words.append(f"{name}={self.inside(path)}" if equals else self.inside(each))
        return [sys.executable, "-I", "-S", isolation.__file__, json.dumps(wanted), *words]

    def search_path(self, inherited: str) -> list[str]:
        """PYTHONPATH: a copy comes before all that may lead to the project itself."""
        entries = [
            self.inside(os.path.abspath(each)) for each in inherited.split(os.pathsep) if each
        ]
        if self.way == "overlay":
            return entries
        own = [view / part for part in ("src", "") for view in self._views.values()]
        return [*(str(each) for each in own if each.is_dir()), *entries]


def _roots(files: Iterable[Path]) -> list[Path]:
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


def _outside(folders: Sequence[Path]) -> str:
    """A folder for temporary files outside of these."""
    for name in (tempfile.gettempdir(), *_PLACES):
        path = Path(name).resolve()
        if os.access(path, os.W_OK) and not any(path.is_relative_to(each) for each in folders):
            return str(path)
    raise MisuseError(
        "--verify needs a folder for temporary files outside of the project: set TMPDIR"
    )


def _way(folder: Path, roots: Sequence[Path]) -> _Way:
    """How runs can be kept apart here, as an empty folder outside of the project shows.

    The variable JAX_DIST_VERIFY_BY_COPY says that there shall be no overlay; "unlocked", that the
    kernel shall refuse nothing.
    """
    wanted = os.environ.get("JAX_DIST_VERIFY_BY_COPY")
    ways: list[_Way] = ["locked copy"] if wanted else ["overlay", "locked copy"]
    for way in ways if sys.platform == "linux" and wanted != "unlocked" else ():
        points = map(Path, isolation.mount_points())
        if way == "overlay" and any(each in point.parents for point in points for each in roots):
            continue  # no overlay may lie over other mounts
        trial, records = folder / "trial", folder / "records"
        for each in (trial, records):
            each.mkdir()
        box = _Sandbox(trial, roots if way == "overlay" else (), way, records)
        ran = subprocess.run(box.command(["true"], [str(trial)]), capture_output=True, check=False)
        for each in (trial, records):
            _discard(each)
        if not ran.returncode:
            return way
    return "copy"


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
            _discard(left)
    made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    with open(made / f"{_LOCK}.new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when this process ends
        os.rename(lock.name, made / _LOCK)  # so that nobody ever sees it free while we live
        try:
            yield made
        finally:
            with _signals(_ENDING, signal.SIG_IGN):  # of the impatient: it takes only a moment
                _discard(made)


@contextlib.contextmanager
def _signals(names: Iterable[str], handler: Any) -> Iterator[None]:
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


def _discard(folder: Path) -> None:
    """Removes what runs have left, also where they took their rights away."""
    for path, names, _ in os.walk(folder):
        for name in names:
            each = os.path.join(path, name)
            if not os.path.islink(each):
                with contextlib.suppress(OSError):  # another process may discard it too
                    os.chmod(each, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)


def _copy(root: Path, views: Mapping[Path, Path]) -> None:
    """Copies a folder of the project; links into the project lead into the copies."""
    to = views[root]
    parts: list[Path] = []  # what is below the folder, but not below environments
    for path, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        parts += [Path(path, name) for name in (*names, *files) if name not in _LEFT_OUT]
        names[:] = [name for name in names if not _is_environment(Path(path, name))]
    size = sum(each.lstat().st_size for each in parts if each.is_file())
    free = shutil.disk_usage(to.parent).free
    if size > free // 2:
        raise MisuseError(
            f"--verify has to copy {root} ({size >> 20} MB), and has room for {free >> 21} MB: run "
            "it in a smaller folder, or set TMPDIR to one with more room"
        )

    def passed_over(path: str, names: list[str]) -> list[str]:
        return [name for name in names if name in _LEFT_OUT or _is_environment(Path(path, name))]

    shutil.copytree(root, to, symlinks=True, ignore=passed_over)
    for each in parts:
        copy = to / each.relative_to(root)
        if _is_environment(each):
            copy.symlink_to(each)
        elif copy.is_symlink() and os.path.isabs(target := os.readlink(copy)):
            for other, view in views.items():
                if Path(target).is_relative_to(other):
                    copy.unlink()
                    copy.symlink_to(view / Path(target).relative_to(other))


def _is_environment(path: Path) -> bool:
    """A virtual environment: its programs know their own place."""
    return (path / "pyvenv.cfg").is_file()
