"""The runs before and after a migration; places that differ are migrated to another target."""

import dataclasses
import difflib
import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_dist.lint.model.project import Project
from jax_dist.migrate import renames, review
from jax_dist.migrate.places import Fallback, FileMigration, Target
from jax_dist.migrate.review import Line
from jax_dist.migrate.verify import comparison, runs
from jax_dist.migrate.verify.comparison import Key, Verification
from jax_dist.migrate.verify.runs import Run

# By the form of a place that differed: the one to migrate it to instead. Others are left.
_FALLBACKS: dict[str, Target] = {"jit": "shard_map", "shard_map": "vendored"}


def verify(
    command: Sequence[str],
    files: Sequence[FileMigration],
    again: Callable[[Mapping[Key, Fallback]], Sequence[FileMigration]] | None = None,
    *,
    devices: int = 8,
    timeout: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Sequence[FileMigration], Verification]:
    """Run a program before and after its migration, and compare the calls of mapped functions.

    Places that differ are migrated to another form, and the program runs once more.

    Args:
      command: the program, as it is run in the current folder.
      again: migrates the files again, with other targets for some places; None: never.
      progress: is called with what runs.

    Returns:
      The files as they may be written, unless `Verification.has_differences`, and the verdicts.
    """
    root = runs.root_of([file.path for file in files])
    by_path = _map_paths(files, root)
    forms = _forms(by_path)
    with tempfile.TemporaryDirectory(prefix="jax-dist-records-") as folder:

        def run(texts: Mapping[str, bytes], title: str, **recording: Any) -> Run:
            """Run the command with these texts of files; `recording` is of `run_recorded`."""
            work = Path(folder, str(len(os.listdir(folder))))  # the first is 0
            progress(title)
            limits = {"devices": devices, "timeout": timeout}
            return runs.run_recorded(command, root, texts, work=work, **limits, **recording)

        texts = {path: review.mark(x, path) for path, x in by_path.items() if x.changed_reads}
        before = run(texts, "running the old program")

        def compare_with(files: Sequence[FileMigration], title: str) -> Verification:
            """Run the migrated program, and return the verdicts, with lines that did not run."""
            changed = {path: file for path, file in _map_paths(files, root).items() if file.changed}
            has_jits = "jit" in _forms(changed).values()
            after = run(
                {path: file.after for path, file in changed.items()},
                title,
                written_lines={path: written_lines(file) for path, file in changed.items()},
                old_folder=os.path.join(folder, "0", "records") if has_jits else "",
            )
            # jax.jit sums over the whole batch, where pmap added up sums of its parts: may_round.
            result = comparison.compare(command, before, after, [*forms], may_round=has_jits)
            to_review: list[Line] = []
            for path, file in changed.items():
                texts = file.before.decode("utf-8").splitlines()
                unreached = [n for n in sorted(file.changed_reads) if (path, n) not in before.ran]
                to_review += [Line(file.path, n, texts[n - 1].strip()) for n in unreached]
            removed = _find_removed_names(root, before.imported - {*changed})
            return dataclasses.replace(result, review=to_review, removed=removed)

        first = compare_with(files, "running the new program")
        if again is None or not (fallbacks := _find_fallbacks(first, forms)):
            return files, first
        files = again({(by_path[path].path, line): x for (path, line), x in fallbacks.items()})
        second = compare_with(files, "running it again, without what differs")
    error = f": {first.problems[-1].strip()}" if first.problems else ""  # of the program
    for old, new in zip(first.verdicts, second.verdicts, strict=True):
        if old.difference:
            new.earlier = f"as {forms[old.path, old.line]}: {old.difference}{error}"
    seconds = [*first.seconds, second.seconds[1]]
    return files, dataclasses.replace(second, seconds=seconds)


def _map_paths(files: Sequence[FileMigration], root: str) -> dict[str, FileMigration]:
    """Return the files by their paths within the project."""
    return {os.path.relpath(os.path.abspath(file.path), root): file for file in files}


def _find_removed_names(root: str, paths: Collection[str]) -> list[str]:
    """Return where files of the project use names that newer jax removed: ["utils.py:7"]."""
    open_file = Project().opened  # None for a file that the program itself made, in its copy
    modules = filter(None, [open_file(os.path.join(root, path)) for path in sorted(paths)])
    planned_places = [renames.places_of_rules(module, None) for module in modules]
    return [os.path.relpath(x.place.where) for x in itertools.chain(*planned_places)]


def _forms(files: Mapping[str, FileMigration]) -> dict[Key, str]:
    """Return the form of each migrated mapped function: `{("a.py", 3): "jit"}`."""
    return {
        (path, place.line): place.form
        for path, file in files.items()
        for place in file.places
        if place.status == "done" and place.form and place.is_mapped
    }


def _find_fallbacks(verification: Verification, forms: Mapping[Key, str]) -> dict[Key, Fallback]:
    """Return the places to migrate to another target than their form, with that and the reason.

    Such as `{("a.py", 3): ("shard_map", "the command never calls it")}`. Of a file all other forms
    than jit are replaced together, as its mapped functions share values.
    """
    fallbacks: dict[Key, Fallback] = {}
    wrong_files: set[str] = set()
    for verdict in verification.verdicts:
        place = verdict.path, verdict.line
        if forms[place] != "jit":
            if verdict.difference:
                wrong_files.add(verdict.path)
        elif not verdict.calls:
            fallbacks[place] = "shard_map", "the command never calls it"
        elif verdict.difference:
            fallbacks[place] = "shard_map", verdict.reason
        elif not verdict.replays:
            fallbacks[place] = "shard_map", "no call of it was compared"
    if not fallbacks and not wrong_files and verification.has_differences:
        # The output or the exit code differs, and no place tells why.
        wrong_files = {path for path, _ in forms}
    for (path, line), form in forms.items():
        if path in wrong_files:
            reason = "it computes something else in the other form"
            fallbacks[path, line] = _FALLBACKS.get(form), reason
    return fallbacks


def written_lines(file: FileMigration) -> list[int]:
    """Return the lines of the new text that a migration wrote, from 1.

    A line such as `@functools.partial(` that stayed above them is one of them, for Python reports
    it as the line of the whole call.
    """
    old, new = (text.decode("utf-8", "replace").splitlines() for text in (file.before, file.after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    lines: list[int] = []
    for kind, _, _, start, end in matcher.get_opcodes():
        if kind != "equal":
            is_inside_call = start > 0 and new[start - 1].endswith("(")
            lines += range(start + 1 - is_inside_call, end + 1)
    return lines
