"""Programs that were watched while they ran, many by one command, and what they become by it."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import pickle
import sys
import time
from collections.abc import Mapping

from jax_dist.checker.engine.linter import load
from jax_dist.checker.model import sources
from jax_dist.checker.model.project import Project
from jax_dist.codemod import migration
from jax_dist.codemod.migration import MigrationOptions
from jax_dist.codemod.recorded_flow import RecordedFlow, WatchedFiles
from jax_dist.codemod.results import FileMigration, Form, ProjectContext
from jax_dist.codemod.shard_map import Promises
from jax_dist.codemod.verify import trial

OPTIONS = MigrationOptions(
    to="jax",
    plainest=Form.IDIOMATIC,
    slow_idioms=True,
    is_tried=True,
    promises=Promises(one_process=True),
)
_RUN = """\
import contextlib
import importlib
import warnings

warnings.filterwarnings("ignore", "Some donated buffers were not usable")
for name in {names!r}:
    with contextlib.suppress(Exception):  # some programs are wrong
        importlib.import_module(name).result()
"""
_TIMEOUT = 300.0  # seconds that another process may take for it


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """What a run of programs has shown, each of which has a function `result()`."""

    folder: pathlib.Path
    flow: RecordedFlow

    @functools.cache  # noqa: B019 - as long as the tests of a file
    def migrated(self, name: str) -> FileMigration:
        """What one becomes."""
        path = self.folder / f"{name}.py"
        context = ProjectContext(Project([str(path)]), str(self.folder / "_mapped.py"))
        options = dataclasses.replace(OPTIONS, flow=self.flow)
        source = sources.read(str(path), path.read_bytes())
        return migration.of_source(source, context, options)


def once(base: pathlib.Path, programs: Mapping[str, str]) -> Recorded:
    """Runs programs, or takes what another process has of the same ones.

    Args:
      base: a folder that the processes of a test run share.
      programs: their texts, by names that are modules of Python.
    """
    digest = hashlib.sha256(repr(sorted(programs.items())).encode()).hexdigest()[:16]
    folder = base / f"recorded-{digest}"
    done = folder / "record.pickle"
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + _TIMEOUT
        while not done.exists():
            assert time.monotonic() < until, "the process that runs the programs has failed"
            time.sleep(0.2)
        return Recorded(folder, pickle.loads(done.read_bytes()))
    (folder / ".git").mkdir()
    paths = {name: folder / f"{name}.py" for name in programs}
    for name, text in programs.items():
        paths[name].write_text(text)
    (folder / "run_all.py").write_text(_RUN.format(names=[*programs]))
    project = Project([str(each) for each in paths.values()])
    modules = [project.module(load(str(each), each.read_bytes())) for each in paths.values()]
    watched = WatchedFiles(modules)
    record = trial.watched([sys.executable, str(folder / "run_all.py")], watched.texts)
    flow = watched.flow(record, 8)
    written = folder / "record.unfinished"
    written.write_bytes(pickle.dumps(flow))
    os.replace(written, done)
    return Recorded(folder, flow)
