"""Many files: those that say something of pmap, in several processes where that pays."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jax_dist.checker import linter, pools
from jax_dist.checker.examining import load
from jax_dist.checker.project import Project
from jax_dist.checker.sources import UnreadableError
from jax_dist.migrating import by_rules, files
from jax_dist.migrating.files import Options
from jax_dist.migrating.outcomes import FileMigration

Progress: TypeAlias = Callable[[int, int], None]  # files done, files in all

# A file that holds none of these has no place to migrate, except for renamed functions.
_WORDS = (b"pmap", b"replicate", b"device_put_")
_ENOUGH = 100  # files to migrate, from which on starting processes pays


@dataclasses.dataclass(frozen=True)
class Migrator:
    """What is done to each file."""

    options: Options
    project: Project = dataclasses.field(default_factory=Project)

    def migrated(self, path: str, data: bytes) -> FileMigration | None:
        """One file; None where there is nothing to do in it, and nothing to say of it."""
        if not wanted(data):
            return None
        try:
            source = load(path, data)
        except UnreadableError as error:
            return FileMigration(path, data, data, problem=str(error))
        found = files.migrate(source, self.project, self.options)
        return found if found.outcomes or found.problem or found.changed else None


def wanted(data: bytes) -> bool:
    """Whether a file may have something to migrate, by its bytes; False is certain."""
    if any(word in data for word in _WORDS):
        return True
    return linter.wanted(data, by_rules.CODES)


def migrate(
    paths: Sequence[str],
    options: Options,
    *,
    jobs: int | None = None,
    progress: Progress = lambda done, total: None,
) -> list[FileMigration]:
    """Migrates files together; nothing is written.

    Args:
      paths: the files. A name that one of them defines and another uses is migrated in both.
      options: what is asked for.
      jobs: how many processes; None: as many as pay.
      progress: is told how far it is.

    Returns:
      The files with something to migrate, and those that could not be read, in the order given.
    """
    options = dataclasses.replace(options, among=frozenset(map(os.path.abspath, paths)))
    migrator = Migrator(options, Project(tuple(paths)))
    unreadable: dict[str, FileMigration] = {}
    pending: list[str] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                if wanted(file.read()):
                    pending.append(path)
        except OSError as error:
            unreadable[path] = _unreadable(path, error)
    found = unreadable
    done = len(paths) - len(pending)
    for part in _in_parts(pending, migrator, pools.jobs_for(len(pending), _ENOUGH, jobs)):
        found |= {path: migration for path, migration in part if migration is not None}
        done += len(part)
        progress(done, len(paths))
    return [found[path] for path in paths if path in found]


_Part: TypeAlias = list[tuple[str, FileMigration | None]]


def _unreadable(path: str, error: OSError) -> FileMigration:
    return FileMigration(path, b"", b"", problem=f"it cannot be read: {error.strerror or error}")


def _in_parts(paths: Sequence[str], migrator: Migrator, jobs: int) -> Iterator[_Part]:
    if jobs == 1:
        for path in paths:
            yield _part([path], migrator)
    else:
        yield from pools.in_chunks(_part, paths, jobs, _start, migrator)


_here: list[Migrator] = []  # of a worker process, so that it keeps what it learns of the project


def _start(migrator: Migrator) -> None:
    _here[:] = [migrator]


def _part(paths: Sequence[str], migrator: Migrator | None = None) -> _Part:
    migrator = migrator or _here[0]
    found: _Part = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                found.append((path, migrator.migrated(path, file.read())))
        except OSError as error:
            found.append((path, _unreadable(path, error)))
        except Exception as error:
            error.add_note(f"while {path} was migrated")
            raise
    return found
