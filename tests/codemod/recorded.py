"""Programs that are watched while they run, many by one command."""

import pathlib
import sys
from collections.abc import Mapping

from jax_dist.checker.engine.linter import load
from jax_dist.checker.model.project import Project
from jax_dist.codemod.recorded_flow import RecordedFlow, WatchedFiles
from jax_dist.codemod.verify import trial

_RUN = """\
import contextlib
import importlib
import warnings

warnings.filterwarnings("ignore", "Some donated buffers were not usable")
for name in {names!r}:
    with contextlib.suppress(Exception):  # some programs are wrong
        importlib.import_module(name).result()
"""


def flow_of(folder: pathlib.Path, programs: Mapping[str, str]) -> RecordedFlow:
    """What a run of programs shows, each of which has a function `result()`.

    Args:
      folder: where they are written, each as `NAME.py`; NAME must be one of Python.
      programs: their texts.
    """
    (folder / ".git").mkdir(parents=True)
    paths = {name: folder / f"{name}.py" for name in programs}
    for name, text in programs.items():
        paths[name].write_text(text)
    (folder / "run_all.py").write_text(_RUN.format(names=[*programs]))
    project = Project([str(each) for each in paths.values()])
    modules = [project.module(load(str(each), each.read_bytes())) for each in paths.values()]
    watched = WatchedFiles(modules)
    command = [sys.executable, str(folder / "run_all.py")]
    record = trial.watched(command, watched.texts)
    return watched.flow(record, 8)
