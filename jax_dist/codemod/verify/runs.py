"""Runs the user's program on simulated devices, apart from the project, with a module of ours."""

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax_dist.codemod.verify import evidence, marked_program, records, sandbox
from jax_dist.codemod.verify.evidence import Evidence
from jax_dist.codemod.verify.sandbox import Sandbox
from jax_dist.launch.ranks import run_to_end

_RECORDING = Path(__file__).with_name("recording")


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended, and what it mapped."""

    exit_code: int | None  # negative: the signal that ended it; None: it was stopped, being late
    output: str  # standard output and error
    record: records.RunRecord
    ran: Mapping[int, Evidence] = field(default_factory=dict)  # what it told of marked statements


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
    way: sandbox.Way
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
        hooked = {path: marked_program.with_helper_recorded(data) for path, data in changes.items()}
        folder, box = self._next(), self._sandbox(hooked)
        inside = [box.inside(str(Path(file).resolve())) for file in files]
        code, output = self._to_the_end(box, folder, {"files": inside})
        found = evidence.read(folder / "records")
        return Run(code, output, _outside(records.read(folder / "records"), box), found)

    def merged(self, changes: Mapping[Path, bytes]) -> tuple[dict[int, Evidence], int | None, str]:
        """Runs a merged program: what happened at its places, the exit code and the output.

        Args:
          changes: what files of the project hold for this run alone.

        Raises:
          OSError: the command cannot be started.
        """
        folder, box = self._next(), self._sandbox(changes)
        code, output = self._to_the_end(box, folder, {"merged": True})
        return evidence.read(folder / "records"), code, output

    def _next(self) -> Path:
        self._runs += 1
        folder = self.folder / f"run-{self._runs}"
        folder.mkdir()
        return folder

    def _sandbox(self, changes: Mapping[Path, bytes]) -> Sandbox:
        folder = self.folder / f"sandbox-{self._runs}"
        folder.mkdir()
        box = Sandbox(folder, self.roots, self.way)
        for path, data in changes.items():
            box.put(path, data)
        return box

    def _to_the_end(
        self, box: Sandbox, folder: Path, wanted: Mapping[str, Any]
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
    sandbox.check_command(command)
    folders = sandbox.roots(files)
    with _ended_in_order(), sandbox.folder(sandbox.base(folders)) as folder:
        way = sandbox.way(folder, folders)
        yield Workspace(tuple(command), folder, folders, way, devices, timeout)


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Signals raise, as Ctrl-C does, so that what runs is ended."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    others = [name for name in sandbox.ENDING if name != "SIGINT"]  # which raises by itself
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


def _outside(record: records.RunRecord, box: Sandbox) -> records.RunRecord:
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
