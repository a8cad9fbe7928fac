"""Runs the user's program so that nothing that it does to a file lasts.

On Linux, over an overlay of all files: each is at its path, and what the program writes lies
elsewhere. Where the system does not allow it, in a copy of the project, which the program's paths
lead into as far as we can see them; it may write nowhere else.
"""

import ast
import codecs
import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.launch import run_to_end
from jax_dist.migrate.verify import evidence, isolation, repository, workplace
from jax_dist.migrate.verify.evidence import Run
from jax_dist.migrate.verify.program_text import comes_first
from jax_dist.migrate.verify.recording import bootstrap, lost

_Way: TypeAlias = Literal["overlay", "locked copy", "copy"]

_RECORDING = Path(__file__).with_name("recording")
_GRACE_SECONDS = 2
_RUNS_PYTHON = re.compile(r"python|(ba|da|z|k|fi)?sh$|busybox")  # or may start it
_OPEN = ("/dev", "/proc")  # where a program writes that keeps nothing


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
    folders = workplace.roots(files)
    free = [Path(each).resolve() for each in scratch]
    for each in free:
        if each.exists() and not (each.is_dir() and not os.listdir(each)):
            raise MisuseError(f"--scratch {each}: it must be a new folder or an empty one")
        if any(each.is_relative_to(root) for root in folders):
            raise MisuseError(
                f"--scratch {each}: it lies in the project, which each run may write to as it is; "
                "name a folder outside, or leave the option out"
            )

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Signals raise, as Ctrl-C does by itself, so that what runs is ended.
    others = [name for name in workplace.ENDING if name != "SIGINT"]
    with (
        workplace.signals(others, leave),
        workplace.working_folder(workplace.outside(folders)) as folder,
    ):
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

    def recorded(
        self, changes: Mapping[Path, bytes], files: Iterable[Path], *, watched: bool = False
    ) -> Run:
        """Runs the command to its end, with its mapped functions recorded.

        Args:
          changes: what files of the project hold for this run alone.
          files: that are being migrated, whose jitted functions are recorded too.
          watched: whether the expressions of what they hold tell their values.

        Raises:
          OSError: the command cannot be started.
        """
        self._runs += 1
        hooked = {
            path: _with_start(_with_helper_recorded(data), self._first) if _is_code(path) else data
            for path, data in changes.items()
        }
        box = self._sandbox(hooked)
        inside = [box.inside(str(Path(file).resolve())) for file in files]
        ended = self._run(box, {"files": inside, "watched": watched})
        for site in ended.record.sites:
            site.file = box.outside(site.file)
        return ended

    def _sandbox(self, changes: Mapping[Path, bytes]) -> "_Sandbox":
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

    @property
    def _first(self) -> Path:
        """What Python imports first in the present run."""
        return self._records.with_name("path")

    def _run(self, box: "_Sandbox", wanted: Mapping[str, Any]) -> Run:
        folder, records, first = self._records.parent, self._records, self._first
        own, output = folder / "own", folder / "output"
        for each in (first, own, records):
            each.mkdir(parents=True)
        (records / lost.NAME).write_bytes(bytes(1))  # room for it, before the disk is full
        shutil.copy(_RECORDING / "bootstrap.py", first / "sitecustomize.py")
        path = [str(first), *box.search_path(os.environ.get("PYTHONPATH", ""))]
        environment = _environment(self._devices)
        writable: list[str] = []
        if self.way != "overlay":
            writable = [str(box.folder), str(records), str(own), *map(str, self._scratch), *_OPEN]
            # Python would write bytecode beside what it imports.
            environment |= {"TMPDIR": str(own), "PYTHONDONTWRITEBYTECODE": "1"}
            wanted = {"writable": writable, **wanted}
        environment |= {"PYTHONPATH": os.pathsep.join(path)}
        told = {"package": str(_RECORDING), "folder": str(records), **wanted}
        (first / "settings.json").write_text(json.dumps(told))
        with workplace.emptied(self._scratch):
            command = box.command(self.command, writable)
            left: list[str] = []
            see_left = lambda: left.extend(_still_running(str(folder)))
            try:
                code = run_to_end(command, environment, output, self._timeout, see_left)
            finally:
                for process in _processes_of(str(folder)):  # in sessions of their own, too
                    with contextlib.suppress(OSError):  # it has just ended
                        os.kill(int(process.name), signal.SIGKILL)
        return evidence.read(code, output.read_text(errors="replace"), records, left)


def _is_code(path: Path) -> bool:
    """Whether Python runs the file as it is: what a notebook holds can be read as Python, too."""
    return path.suffix != ".ipynb"


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


def _with_start(data: bytes, first: Path) -> bytes:
    """A file that starts the recording where Python did not: it may ignore PYTHONPATH.

    No line moves: it stands before the first statement, or in an empty line above it.
    """
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    path = str(first / "sitecustomize.py")
    lines = data.removeprefix(mark).splitlines(keepends=True)
    start = f"__import__('runpy').run_path({path!a}, run_name={bootstrap.LATE!r})"
    try:
        body = [each for each in ast.parse(data).body if not comes_first(each)]
    except (SyntaxError, ValueError):
        return data
    at = body[0].lineno - 1 if body else 0
    if body and not hasattr(body[0], "body") and body[0].col_offset == 0:
        lines[at : at + 1] = [start.encode(), b"; ", lines[at]]
    elif at and not lines[at - 1].strip():
        lines[at - 1] = start.encode() + lines[at - 1].lstrip(b" \t\f")
    return mark + b"".join(lines)


def _processes_of(folder: str) -> Iterator[Path]:
    """Those that a run has started, which its environment tells: it names the folder."""
    own = os.fsencode(os.path.join(folder, ""))
    for process in Path("/proc").glob("[0-9]*"):  # nothing there on other systems
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if own in (process / "environ").read_bytes():
                yield process


def _still_running(folder: str) -> list[str]:
    """The commands of what a run has left, and may yet call a mapped function."""
    latest = time.monotonic() + _GRACE_SECONDS  # helpers of Python end a moment after it
    while (left := list(_commands_of(folder))) and time.monotonic() < latest:
        time.sleep(0.05)
    return left


def _commands_of(folder: str) -> Iterator[str]:
    for process in _processes_of(folder):
        with contextlib.suppress(OSError):
            if _RUNS_PYTHON.match((process / "exe").readlink().name):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                yield shlex.join(words[:-1])


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
        # In an overlay the project is a mount, and may lie in a repository that is outside of it.
        "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1",
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
        if way != "overlay":  # as deep in a repository as the folder itself
            self._views = {r: view / repository.within(r) for r, view in self._views.items()}
        for number, (root, view) in enumerate(self._views.items()):
            if way != "overlay":
                workplace.copy(root, self._views)
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
            workplace.discard(each)
        if not ran.returncode:
            return way
    return "copy"
