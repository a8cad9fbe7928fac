"""The two runs of a migration; places that differ go back once."""

import ast
import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.migrate.places import FileMigration
from jax_dist.migrate.verify import comparison, runs
from jax_dist.migrate.verify.comparison import Key, Verdict, Verification
from jax_dist.migrate.verify.runs import Progress, Run

# Migrates again without the forms that differ at places, by path and line.
Again: TypeAlias = Callable[[Sequence[Key]], Sequence[FileMigration]]


def verify(
    command: Sequence[str],
    files: Sequence[FileMigration],
    again: Again | None = None,
    *,
    devices: int = 8,
    timeout: float | None = None,
    progress: Progress = lambda text: None,
) -> tuple[Sequence[FileMigration], Verification]:
    """Run a program before and after its migration, and compare the calls.

    Args:
      command: the program, as it is run in the current folder.
      files: the migration.
      again: migrates the files again, without the forms that differ; None: nothing goes back.
      devices: the number of CPU devices to simulate.
      timeout: seconds for each run.
      progress: is called with what runs, and since when.

    Returns:
      The files as they may be written, and the verdicts. `Verification.written` is False if the
      program still differs.
    """
    root = runs.root_of([file.path for file in files])
    within = {file.path: os.path.relpath(os.path.abspath(file.path), root) for file in files}
    if any(path.startswith(os.pardir) for path in within.values()):
        raise MisuseError(f"all files must be in one project: {root} does not hold them")
    options = {"devices": devices, "timeout": timeout, "progress": progress}
    before = runs.recorded(command, root, {}, title="running the old program", **options)
    places = [
        (within[file.path], place.line)
        for file in files
        for place in file.places
        if place.status == "done" and place.form and place.is_mapped
    ]

    def trial(files: Sequence[FileMigration], title: str) -> tuple[Run, Verification]:
        texts = {within[file.path]: file.after for file in files if file.changed}
        lines = {within[file.path]: written_lines(file) for file in files if file.changed}
        after = runs.recorded(command, root, texts, written=lines, title=title, **options)
        rounded = [
            (within[file.path], place.line)
            for file in files
            for place in file.places
            if place.form == "jit"
        ]
        return after, comparison.compare(command, before, after, places, rounded)

    _, verification = trial(files, "running the new program")
    if not verification.has_differences or again is None:
        written = not verification.has_differences
        return files, dataclasses.replace(verification, written=written)
    back = {(verdict.path, verdict.line): verdict for verdict in verification.verdicts}
    wrong = {path for (path, _), verdict in back.items() if verdict.difference}
    # All of a file: its mapped functions share values, and one form goes with another.
    keys = [key for key in back if key[0] in wrong] or list(back)
    shown = {inside: path for path, inside in within.items()}
    files = again([(shown[path], line) for path, line in keys])
    for file in files:
        within.setdefault(file.path, os.path.relpath(os.path.abspath(file.path), root))
    _, second = trial(files, "running it again, without what differs")
    verdicts = [_joined(verdict, back) for verdict in second.verdicts]
    seconds = [*verification.seconds, second.seconds[1]]
    written = not second.has_differences
    return files, dataclasses.replace(second, verdicts=verdicts, seconds=seconds, written=written)


def _joined(verdict: Verdict, before: Mapping[Key, Verdict]) -> Verdict:
    first = before[verdict.path, verdict.line]
    if first.difference and not verdict.difference:
        return dataclasses.replace(first, went_back=True)
    return verdict


def written_lines(file: FileMigration) -> list[tuple[int, int]]:
    """Return the lines of the calls of jax.jit in a new text that the old one has not."""
    if not file.path.endswith(".py"):
        return []
    old, new = (text.decode("utf-8", "replace").splitlines() for text in (file.before, file.after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    added = {
        line + 1
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag != "equal"
        for line in range(start, end)
    }
    try:
        tree = ast.parse(file.after)
    except (SyntaxError, ValueError):
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("jit", "partial")
        and "jit" in ast.unparse(node)
        and added & {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    ]
