"""Programs that were watched while they ran, many by one command, and what they become by it."""

import dataclasses
import functools
import hashlib
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

from jax_dist.lint.engine.linter import load
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.recorded_flow import RecordedFlow, WatchedFiles
from jax_dist.migrate.results import FileMigration, Form, ProjectContext
from jax_dist.migrate.verify import trial

OPTIONS = MigrationOptions(
    to="jax",
    plainest=Form.IDIOMATIC,
    slow_idioms=True,
    is_tried=True,
    promises=Promises(one_process=True),
)
_RUN = """\
import contextlib
import os
import sys
import warnings

warnings.filterwarnings("ignore", "Some donated buffers were not usable")
for name in {names!r}:
    sys.path[:1] = [os.path.join(os.path.dirname(__file__), f"of_{{name}}")]
    with contextlib.suppress(Exception):  # some programs are wrong
        exec(f"import {{name}}; {{name}}.result()")  # so that no text says who uses it
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """What a run of programs has shown, each of which has a function `result()`."""

    folder: pathlib.Path
    flow: RecordedFlow

    @functools.cache  # noqa: B019 - as long as the tests of a file
    def migrated(self, name: str) -> FileMigration:
        """What one becomes without the device axis."""
        return self.to(name, OPTIONS)

    def to(self, name: str, options: MigrationOptions) -> FileMigration:
        """What one becomes."""
        path = _path(self.folder, name)
        context = ProjectContext(Project([str(path)]), str(path.with_name("_mapped.py")))
        options = dataclasses.replace(options, flow=self.flow)
        source = sources.read(str(path), path.read_bytes())
        return migration.of_source(source, context, options)


def once(made_once: Callable[..., Recorded], programs: Mapping[str, str]) -> Recorded:
    """Runs programs in one of the workers.

    Args:
      made_once: the fixture.
      programs: their texts, by names that are modules of Python.
    """
    digest = hashlib.sha256(repr(sorted(programs.items())).encode()).hexdigest()[:16]
    return made_once(f"recorded-{digest}", lambda folder: run(folder, programs))


def run(folder: pathlib.Path, programs: Mapping[str, str]) -> Recorded:
    """Runs programs, which are written to an empty folder."""
    paths = [_path(folder, name) for name in programs]
    for path, text in zip(paths, programs.values(), strict=True):
        (path.parent / ".git").mkdir(parents=True)
        path.write_text(text)
    (folder / "run_all.py").write_text(_RUN.format(names=[*programs]))
    return Recorded(folder, flow(paths, [sys.executable, str(folder / "run_all.py")]))


def _path(folder: pathlib.Path, name: str) -> pathlib.Path:
    """That of a program, which is a project of its own."""
    return folder / f"of_{name}" / f"{name}.py"


def flow(paths: Sequence[pathlib.Path], command: Sequence[str]) -> RecordedFlow:
    """What a command shows of some files, on 8 devices."""
    project = Project([str(each) for each in paths])
    watched = WatchedFiles([project.module(load(str(e), e.read_bytes())) for e in paths])
    return watched.flow(trial.watched(command, watched.texts), 8)
