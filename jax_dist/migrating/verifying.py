"""Proves a migration: runs a command before and after it, and compares what was computed.

Equal numbers are not enough: `jit(vmap(f))` on one device gives them too. So the arguments and
results of every mapped function are compared, and the devices that hold the results are counted.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax_dist.migrating.judging import judged
from jax_dist.migrating.runs import Run, run
from jax_dist.migrating.swapping import check_unchanged, swapped
from jax_dist.migrating.verification import Verdict, Verification


@dataclass(frozen=True, slots=True)
class _Trial:
    """What both runs have in common."""

    command: tuple[str, ...]
    files: tuple[Path, ...]
    devices: int
    calls: int
    timeout: float | None

    def run(self, folder: Path) -> Run:
        folder.mkdir()
        return run(
            self.command,
            folder,
            files=self.files,
            devices=self.devices,
            calls=self.calls,
            timeout=self.timeout,
        )


def verified(
    command: Sequence[str],
    before: Mapping[Path, bytes],
    after: Mapping[Path, bytes],
    *,
    devices: int = 8,
    calls: int = 3,
    tolerance: float = 0.0,
    keep: bool = False,
    only_proven: bool = False,
    timeout: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Runs a command before and after a migration, and leaves the migrated files if it holds.

    The command runs twice, and a third time where something differs, to learn whether it computes
    the same twice at all. Where the runs differ, or this one is interrupted, the files get their
    old bytes back.

    Args:
      command: the program to run and its arguments; any that imports jax in a Python of its own.
      before: what the files hold now, by path.
      after: what they hold when migrated.
      devices: how many CPU devices to simulate.
      calls: how many calls of each mapped function to compare.
      tolerance: how far a float may differ, relative to the largest value of its array.
      keep: leaves the migrated files also where something differs.
      only_proven: takes them back also where not all could be compared.
      timeout: the seconds that each run may take.
      progress: is told what begins.

    Returns:
      What was found, and whether the files were taken back.

    Raises:
      MisuseError: a file no longer holds what `before` says.
      OSError: the command cannot be started, or a file cannot be written.
    """
    trial = _Trial(tuple(command), tuple(sorted({*before, *after})), devices, calls, timeout)
    judge = functools.partial(judged, trial.command, files=trial.files, tolerance=tolerance)
    check_unchanged(before)
    with tempfile.TemporaryDirectory(prefix="jax_dist_verify_") as name:
        folder = Path(name)
        progress("running the command before the migration")
        first = trial.run(folder / "before")
        with swapped(before, after) as swap:
            progress(f"running the command after it; the old files lie in {swap.backup}")
            second = trial.run(folder / "after")
            found = judge(first, second)
            if keep or found.proven or (found.verdict is Verdict.UNPROVEN and not only_proven):
                swap.keep()
        if found.verdict is Verdict.DIFFERENT and not keep:
            progress("running the command before the migration again, for something differs")
            third = trial.run(folder / "again")
            found = _with_steadiness(found, judge(first, third))
        return dataclasses.replace(found, rolled_back=not swap.kept)


def _with_steadiness(found: Verification, again: Verification) -> Verification:
    """Says what a second run before the migration showed."""
    if again.verdict is Verdict.DIFFERENT:
        said = (
            "the command does not compute the same twice, even without the migration: give it "
            "fixed seeds, and let it not go on from files of its last run"
        )
    else:
        said = "without the migration, the command computes the same twice"
    return dataclasses.replace(found, notes=(*found.notes, said))
