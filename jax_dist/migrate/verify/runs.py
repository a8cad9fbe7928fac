"""Runs of a command in a copy of its tree, with what `recording` does in each of its processes."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.lint.model import sources
from jax_dist.lint.rules._old_names import NAMES

Progress: TypeAlias = Callable[[str], None]

_RECORDING = Path(__file__).parent / "recording"
_MAPPED = Path(__file__).parents[1] / "_mapped.py"
_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".hg", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".pytest_cache"
)
_ROOT_SIGNS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
_TICK = 0.2  # seconds between two looks at a running command


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One recorded call of a mapped function."""

    path: str  # within the tree
    line: int  # where the function was mapped
    name: str  # of the function
    given: Sequence[Mapping[str, Any]]  # the leaves, as `recording.calls` describes them
    returned: Sequence[Mapping[str, Any]]
    raised: str
    values: Mapping[str, Any]  # by key of a leaf: its array, if it was kept
    replay: Mapping[str, str] | None = None  # "text" and "reason" of what differed in it, or ""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of the command."""

    exit_code: int | None  # None: it was stopped after the timeout
    output: str
    errors: str
    seconds: float
    calls: Sequence[Sequence[Call]]  # of each process
    ran: frozenset[tuple[str, int]] = frozenset()  # the lines of markers, by path within the tree


def root_of(paths: Sequence[str]) -> str:
    """Return the folder of the project that holds all paths, and the current folder if it can."""
    folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
    outside = (os.path.abspath(os.sep), os.path.expanduser("~"))
    common = os.path.commonpath([*folders, os.getcwd()])
    if common in outside:
        common = os.path.commonpath(folders)
    for folder in sources.folders_above(common):
        if folder in outside:
            break
        if any(os.path.exists(os.path.join(folder, sign)) for sign in _ROOT_SIGNS):
            return folder
    return common


def settings(**more: Any) -> dict[str, Any]:
    """Return the arguments of `recording.start` that are the same in all runs, and more."""
    old = {entry.old: entry.new for entry in NAMES if entry.new and entry.old.startswith("jax.")}
    return {"package": str(_RECORDING), "mapped": str(_MAPPED), "old": old, **more}


@contextlib.contextmanager
def injected(wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder that, first on PYTHONPATH, starts the recording in each process."""
    with tempfile.TemporaryDirectory(prefix="jax-dist-") as folder:
        Path(folder, "settings.json").write_text(json.dumps(dict(wanted)))
        shutil.copyfile(_RECORDING / "bootstrap.py", Path(folder, "sitecustomize.py"))
        yield folder


def recorded(
    command: Sequence[str],
    root: str,
    texts: Mapping[str, bytes],
    *,
    devices: int,
    timeout: float | None = None,
    written: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    replayed: str = "",
    kept: str | None = None,
    progress: Progress = lambda text: None,
    title: str = "",
) -> Run:
    """Run a command in a copy of a tree, and return its recorded calls.

    Args:
      command: the command.
      root: the tree; the current folder is in it.
      texts: new contents of files, by path within the tree.
      devices: how many CPU devices are simulated.
      timeout: seconds.
      written: by path, the lines of the calls of jax.jit that a migration wrote.
      replayed: the records of the old program, for replays of the steps that were written.
      kept: the folder for the records; None: they are not kept.
      progress: is called with what runs, and since when.
      title: of the run.
    """
    with tempfile.TemporaryDirectory(prefix="jax-dist-migrate-") as work:
        tree, records, temporary = (Path(work, name) for name in ("tree", "records", "tmp"))
        shutil.copytree(root, tree, symlinks=True, ignore=_LEFT_OUT)
        for path, text in texts.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(text)
        records = records if kept is None else Path(kept)
        records.mkdir(exist_ok=True)
        temporary.mkdir()
        wanted = settings(
            records=str(records),
            ran=str(Path(work, "ran")),
            tree=str(tree),
            written=dict(written or {}),
            replayed=replayed,
        )
        with injected(wanted) as folder:
            environment = _environment(folder, tree, temporary, devices)
            folder = str(tree / os.path.relpath(os.getcwd(), root))
            say = lambda seconds: progress(f"{title}: {seconds:.0f} s")
            ended = _run(command, folder, environment, timeout, Path(work), say)
        output, errors = (
            Path(work, name).read_text(encoding="utf-8", errors="replace").replace(str(tree), root)
            for name in ("stdout", "stderr")
        )
        processes = [_read(process) for process in sorted(records.iterdir())]
        return Run(ended[0], output, errors, ended[1], processes, _lines(Path(work, "ran")))


def _lines(ran: Path) -> frozenset[tuple[str, int]]:
    text = ran.read_text(encoding="utf-8") if ran.exists() else ""
    parts = (line.partition(" ") for line in text.splitlines())
    return frozenset((path, int(line)) for line, _, path in parts)


def _environment(folder: str, tree: Path, temporary: Path, devices: int) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH", "")
    source = [str(tree / "src")] if (tree / "src").is_dir() else []
    python_path = [folder, str(tree), *source, *filter(None, inherited.split(os.pathsep))]
    flags = " ".join(
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(temporary),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": flags,
        "NPROC": "32",  # threads of XLA: else reductions depend on the number of cores
    }


def _run(
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    timeout: float | None,
    work: Path,
    say: Callable[[float], None],
) -> tuple[int | None, float]:
    """Return how the command ended and how long it took; its output is in two files of `work`."""
    program = shutil.which(command[0])
    if program is None:
        raise MisuseError(f"{command[0]} cannot be started: there is no such program")
    program = os.path.abspath(program) if os.sep in command[0] else program
    start = time.monotonic()
    with open(work / "stdout", "wb") as out, open(work / "stderr", "wb") as errors:
        process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_TICK), time.monotonic() - start
                seconds = time.monotonic() - start
                say(seconds)
                if timeout is not None and seconds > timeout:
                    return None, seconds
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(folder: Path) -> list[Call]:
    import numpy as np  # only here: most runs of the codemod need none

    calls: list[Call] = []
    for line in (folder / "calls.jsonl").read_text().splitlines():
        event = json.loads(line)
        values: dict[str, Any] = {}
        archive = folder / f"{event['call']}.npz"
        if archive.exists():
            with np.load(archive) as arrays:
                values = {name: arrays[name] for name in arrays.files}
        place = (event["path"], event["line"], event["name"])
        leaves = (event["given"], event.get("returned", ()))
        raised = event.get("raised", "")
        calls.append(Call(*place, *leaves, raised, values, event.get("replay")))
    return calls
