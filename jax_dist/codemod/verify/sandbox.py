"""Runs the user's program in a view of the project whose changes are nobody else's.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.codemod.verify import evidence, overlay, program_text
from jax_dist.codemod.verify.evidence import Evidence, Run, RunRecord
from jax_dist.launch.ranks import run_to_end

Way: TypeAlias = Literal["overlay", "copy"]

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")  # signals by which people end a program

_RECORDING = Path(__file__).with_name("recording")
_PREFIX, _LOCK = "jax_dist_verify_", "lock"
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_LEFT_OUT = ("__pycache__", ".git", ".hg")
_SPECIAL = frozenset(",:\\\n")  # of the mount's options
_PLACES = ("/var/tmp", "/dev/shm")  # where nothing of the user's is, beside the usual one


@dataclass
class Workspace:
    """Where runs of one command take place, one after another.

    Args:
      command: the program and its arguments.
      folder: an empty one outside of the project.
      roots: the folders of the project.
      way: how it is kept apart.
      devices: how many CPU devices to simulate.
      timeout: the seconds after which a run is stopped; None for never.
    """

    command: Sequence[str]
    folder: Path
    roots: Sequence[Path]
    way: Way
    devices: int
    timeout: float | None
    _runs: int = field(default=0, init=False)

    def recorded(self, changes: Mapping[Path, bytes], files: Iterable[Path]) -> Run:
        """Runs the command to its end, with its mapped functions recorded.

        Args:
          changes: what files of the project hold for this run alone.
          files: that are being migrated, whose jitted functions are recorded too.

        Raises:
          OSError: the command cannot be started.
        """
        hooked = {path: program_text.with_helper_recorded(data) for path, data in changes.items()}
        folder, box = self._next(), self._sandbox(hooked)
        inside = [box.inside(str(Path(file).resolve())) for file in files]
        code, output = self._to_the_end(box, folder, {"files": inside})
        found = evidence.read_spots(folder / "records")
        return Run(code, output, _outside(evidence.read_calls(folder / "records"), box), found)

    def merged(self, changes: Mapping[Path, bytes]) -> tuple[dict[int, Evidence], int | None, str]:
        """Runs a merged program: what happened at its places, the exit code and the output.

        Args:
          changes: what files of the project hold for this run alone.

        Raises:
          OSError: the command cannot be started.
        """
        folder, box = self._next(), self._sandbox(changes)
        code, output = self._to_the_end(box, folder, {"merged": True})
        return evidence.read_spots(folder / "records"), code, output

    def _next(self) -> Path:
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        return folder

    def _sandbox(self, changes: Mapping[Path, bytes]) -> "_Sandbox":
        folder = self.folder / f"sandbox-{self._runs}"
        folder.mkdir()
        box = _Sandbox(folder, self.roots, self.way)
        for path, data in changes.items():
            box.put(path, data)
        return box

    def _to_the_end(
        self, box: "_Sandbox", folder: Path, wanted: Mapping[str, Any]
    ) -> tuple[int | None, str]:
        (folder / "records").mkdir()
        (folder / "path").mkdir()
        shutil.copy(_RECORDING / "bootstrap.py", folder / "path" / "sitecustomize.py")
        path = [str(folder / "path"), *box.search_path(os.environ.get("PYTHONPATH", ""))]
        environment = _environment(self.devices) | {
            "PYTHONPATH": os.pathsep.join(path),
            "JAX_DIST_RECORD": json.dumps(
                {"package": str(_RECORDING), "folder": str(folder / "records"), **wanted}
            ),
        }
        output = folder / "output"
        code = run_to_end(box.command(self.command), environment, output, self.timeout)
        text = output.read_text(errors="replace")
        return code, text


@contextlib.contextmanager
def stage(
    command: Sequence[str], files: Iterable[Path], *, devices: int, timeout: float | None
) -> Iterator[Workspace]:
    """Keeps a project apart for some runs; nothing that they do reaches it.

    Whatever ends the block, an error, Ctrl-C or a signal, the runs end too, and so they do where
    this process is killed.

    Args:
      command: the program and its arguments.
      files: that are being migrated.
      devices: how many CPU devices to simulate.
      timeout: the seconds after which a run is stopped; None for never.

    Raises:
      MisuseError: there is no room for it.
      OSError: the command cannot be started.
    """
    _check_command(command)
    folders = roots(files)
    with _ended_in_order(), working_folder(_base(folders)) as folder:
        how = way(folder, folders)
        yield Workspace(tuple(command), folder, folders, how, devices, timeout)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Signals raise, as Ctrl-C does, so that what runs is ended."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    others = [name for name in _ENDING if name != "SIGINT"]  # which raises by itself
    numbers = [getattr(signal, name) for name in others if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    changed = {k: old for k, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in changed:
            signal.signal(number, leave)
        yield
    finally:
        for number, old in changed.items():
            signal.signal(number, old)


def _outside(record: RunRecord, box: "_Sandbox") -> RunRecord:
    """The same, with the paths that users know."""
    sites = tuple(replace(site, file=box.outside(site.file)) for site in record.sites)
    return replace(record, sites=sites)


def _environment(devices: int) -> dict[str, Any]:
    """This process's, with simulated devices, and with one order of sets for all runs."""
    inherited = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    flags = [
        flag
        for flag in inherited.pop("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform_device_count")
    ]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
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


def _check_command(command: Sequence[str]) -> None:
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


def _base(folders: Sequence[Path]) -> str:
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
    trial = _Sandbox(folder / "trial", folders, "overlay")
    ran = subprocess.run(trial.command(["true"]), capture_output=True, check=False)
    _discard(folder / "trial")
    return "copy" if ran.returncode else "overlay"


def _has_mounts(folders: Sequence[Path]) -> bool:
    """Whether another file system is mounted below; an overlay would show an empty folder there."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [Path(line.split()[4].replace("\\040", " ")) for line in file]
    return any(folder in point.parents for folder in folders for point in points)


@contextlib.contextmanager
def working_folder(place: str) -> Iterator[Path]:
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
    numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
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
