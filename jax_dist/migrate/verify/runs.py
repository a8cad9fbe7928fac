"""Runs of a command in which `recording` changes jax and logs the mapped calls."""

import contextlib
import dataclasses
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_dist._usage import MisuseError
from jax_dist.lint.model import sources
from jax_dist.lint.rules._old_names import NAMES
from jax_dist.migrate.verify.recording.records import RecordedCall, read_calls

_RECORDING = Path(__file__).parent / "recording"
_MAPPED = Path(__file__).parents[1] / "_mapped.py"
# The module that Python imports first: it loads `recording` under a name of its own.
_SITECUSTOMIZE = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "_jax_dist_recording", {package!r} + "/__init__.py", submodule_search_locations=[{package!r}]
)
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
importlib.import_module(spec.name + ".start").start(**{settings!r})
"""
_SKIPPED = shutil.ignore_patterns(".git", ".hg", "__pycache__", "venv", ".venv", ".tox", ".*_cache")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a command, with the calls that it recorded."""

    exit_code: int | None  # None: it was stopped after the timeout
    output: str
    errors: str
    seconds: float
    calls: Sequence[Sequence[RecordedCall]]  # of each process, in order
    ran: frozenset[tuple[str, int]] = frozenset()  # path and line of each marker that was reached
    imported: frozenset[str] = frozenset()  # the paths of the project's modules that it imported


def root_of(paths: Sequence[str]) -> str:
    """Return the root of the project that holds all paths: the tree to copy for a run.

    It holds the current folder too. Where no folder above looks like the top of a project, as with
    `.git`, it is the innermost common folder. MisuseError is raised if that is /.
    """
    too_large = (os.path.abspath(os.sep), os.path.expanduser("~"))
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([*folders, os.getcwd()])
    if common == too_large[0]:
        raise MisuseError(f"only {common} holds the files and the current folder: change to theirs")
    above = (folder for folder in sources.folders_above(common) if folder not in too_large)
    return next(filter(sources.is_project, above), common)


@contextlib.contextmanager
def inject_recording(**settings: Any) -> Iterator[str]:
    """Yield a folder that, put first on PYTHONPATH, starts `recording` in each Python process.

    Its `sitecustomize.py`, which Python runs before a program, calls `recording.start.start` with
    `settings`, the vendored module, and the removed names of jax that one other name replaces.
    """
    old = {entry.old: entry.new for entry in NAMES if entry.new and entry.old.startswith("jax.")}
    settings |= {"mapped": str(_MAPPED), "old": old}
    with tempfile.TemporaryDirectory(prefix="jax-dist-") as folder:
        text = _SITECUSTOMIZE.format(package=str(_RECORDING), settings=settings)
        Path(folder, "sitecustomize.py").write_text(text, encoding="utf-8")
        yield folder


def run_with_library(command: Sequence[str], explain: str = "") -> int:
    """Run a command with `jax_dist.pmap` for `jax.pmap`, in all Python processes it starts.

    Names that newer jax removed, and that have a one-to-one replacement, are put back. `explain` is
    the file that gets the reports of `jax_dist.explain`; "": there are none. Returns the exit code,
    as a shell counts it. Raises MisuseError if the command cannot be started.
    """
    from jax_dist import launch  # only here: it takes longer to import than all of this

    with inject_recording(library=str(Path(__file__).parents[3]), explain=explain) as folder:
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise MisuseError(f"{command[0]} cannot be started: {error.strerror}") from error
        # Of a Ctrl-C the terminal tells the program itself.
        with launch.handle_signals(lambda n: n != signal.SIGINT and process.send_signal(n)):
            return launch.shell_code(process.wait())


def explain(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command, and return its exit code and `jax_dist.explain` of its mapped functions."""
    with tempfile.TemporaryDirectory(prefix="jax-dist-") as folder:
        path = Path(folder, "reports")
        code = run_with_library(command, explain=str(path))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return code, text.split("\0")[:-1]  # each report ends with a zero byte


def run_recorded(
    command: Sequence[str],
    root: str,
    texts: Mapping[str, bytes],
    *,
    work: Path,
    devices: int,
    timeout: float | None = None,
    **recording: Any,
) -> Run:
    """Run a command in a copy of a project, and return its recorded calls.

    Args:
      root: the folder of the project; the current folder is in it.
      texts: new contents of files, by path within the project.
      work: a new folder, for the copy and the recorded arrays, which are read later. The folder
        above it keeps compiled programs for further runs.
      timeout: seconds after which the command is stopped; None: never.
      recording: arguments of `Recorder`, for the run of a migrated program.
    """
    tree, records = work / "tree", work / "records"
    shutil.copytree(root, tree, symlinks=True, ignore=_SKIPPED)
    for path, text in texts.items():
        (tree / path).write_bytes(text)
    for folder in (records, work / "tmp"):
        folder.mkdir()
    (work / "ran").touch()
    recording |= {"folder": str(records), "tree": str(tree)}
    with inject_recording(record=recording, ran=str(work / "ran")) as injected:
        cwd, env = tree / os.path.relpath(os.getcwd(), root), _environment(injected, work, devices)
        exit_code, seconds = _run_until_timeout(command, work, timeout, cwd=cwd, env=env)
    read = lambda name: (work / name).read_text("utf-8", "replace").replace(str(tree), root)
    calls = [read_calls(process) for process in sorted(records.iterdir())]
    marks = [mark.split(" ", 1) for mark in read("ran").splitlines()]  # ["12", "a.py"]
    reached = frozenset((path, int(line)) for line, path in marks), _find_imported(tree)
    return Run(exit_code, read("stdout"), read("stderr"), seconds, calls, *reached)


def _find_imported(tree: Path) -> frozenset[str]:
    """Return `pkg/a.py` for each `pkg/__pycache__/a.cpython-311.pyc` that Python compiled."""
    compiled = (pyc.relative_to(tree) for pyc in tree.rglob("__pycache__/*.pyc"))
    return frozenset(str(pyc.parents[1] / f"{pyc.name.partition('.')[0]}.py") for pyc in compiled)


def _environment(injected: str, work: Path, devices: int) -> dict[str, str]:
    """Return environment variables that make runs in two copies of a project comparable.

    `injected` is the folder of `inject_recording`, and `work` that of `run_recorded`. Imports find
    the copy before an installed package of the same name. Programs that are the same in both runs,
    such as those that initialize a model, are compiled once.

    XLA may not use fused multiply-add: it rounds `a * b + c` once where it fuses both operations,
    and which operations it fuses depends on the device axis of their arrays.
    """
    tree = work / "tree"
    source = [str(tree / "src")] if (tree / "src").is_dir() else []
    python_path = [injected, str(tree), *source, os.environ.get("PYTHONPATH", "")]
    flags = re.sub(r"\S*host_platform_device_count\S*", "", os.environ.get("XLA_FLAGS", ""))
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags = f"--xla_cpu_max_isa=AVX {flags}"  # the newest without fused multiply-add
    return {
        **(os.environ | {"PYTHONDONTWRITEBYTECODE": ""}),  # `Run.imported`: modules with a .pyc
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(work / "tmp"),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_COMPILATION_CACHE_DIR": str(work.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": flags,
        "NPROC": "32",  # threads of XLA: else reductions depend on the number of cores
    }


def _run_until_timeout(
    command: Sequence[str], work: Path, timeout: float | None, **options: Any
) -> tuple[int | None, float]:
    """Run a command, and return its exit code (None: stopped after the timeout) and seconds.

    Its output goes to the files `stdout` and `stderr` in the folder `work`; `options` are of Popen.
    Processes that it started are killed when it ends.
    """
    program = shutil.which(command[0])
    if program is None:
        raise MisuseError(f"{command[0]} cannot be started: there is no such program")
    words = [os.path.abspath(program), *command[1:]]  # `./venv/bin/python` is not in the copy
    start = time.monotonic()
    with open(work / "stdout", "wb") as out, open(work / "stderr", "wb") as errors:
        options |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        process = subprocess.Popen(words, start_new_session=True, **options)
        try:
            return process.wait(timeout), time.monotonic() - start
        except subprocess.TimeoutExpired:
            return None, time.monotonic() - start
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
