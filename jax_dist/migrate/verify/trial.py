"""The two runs of a migration; places that differ go back once."""

import ast
import dataclasses
import difflib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jax_dist._usage import MisuseError
from jax_dist.migrate import review
from jax_dist.migrate.places import Back, FileMigration, Target
from jax_dist.migrate.verify import comparison, runs
from jax_dist.migrate.verify.comparison import Key, Verification
from jax_dist.migrate.verify.runs import Progress

# Migrates again with other forms of places, by path and line.
Again: TypeAlias = Callable[[Mapping[Key, Back]], Sequence[FileMigration]]


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
      again: migrates the files again, with other forms of places; None: nothing goes back.
      devices: the number of CPU devices to simulate.
      timeout: seconds for each run.
      progress: is called with what runs, and since when.

    Returns:
      The files as they may be written, and the verdicts. Nothing may be written if the program
      still differs: if `Verification.has_differences`.
    """
    root = runs.root_of([file.path for file in files])
    by_path = _by_path(files, root)
    if any(path.startswith(os.pardir) for path in by_path):
        raise MisuseError(f"all files must be in one project: {root} does not hold them")
    forms = _forms(by_path)
    with tempfile.TemporaryDirectory(prefix="jax-dist-records-") as kept:
        run = functools.partial(
            runs.recorded, command, root, devices=devices, timeout=timeout, progress=progress
        )
        texts = {path: review.marked(file, path) for path, file in by_path.items() if file.touched}
        before = run(texts, title="running the old program", kept=kept)

        def trial(files: Sequence[FileMigration], title: str) -> Verification:
            changed = {path: file for path, file in _by_path(files, root).items() if file.changed}
            jits = [key for key, form in _forms(changed).items() if form == "jit"]
            after = run(
                {path: file.after for path, file in changed.items()},
                written={path: written_lines(file) for path, file in changed.items()},
                title=title,
                replayed=kept if jits else "",
            )
            result = comparison.compare(command, before, after, [*forms], jits)
            lines = (review.unreached(file, path, before.ran) for path, file in changed.items())
            return dataclasses.replace(result, review=[*itertools.chain.from_iterable(lines)])

        first = trial(files, "running the new program")
        back = {} if again is None else _going_back(first, forms)
        if again is None or not back:
            return files, first
        files = again({(by_path[path].path, line): to for (path, line), to in back.items()})
        second = trial(files, "running it again, without what differs")
    verdicts = [
        dataclasses.replace(first_verdict, went_back=True)
        if first_verdict.difference and not verdict.difference
        else verdict
        for first_verdict, verdict in zip(first.verdicts, second.verdicts, strict=True)
    ]
    seconds = [*first.seconds, second.seconds[1]]
    return files, dataclasses.replace(second, verdicts=verdicts, seconds=seconds)


def _by_path(files: Sequence[FileMigration], root: str) -> dict[str, FileMigration]:
    """Return the files by their paths within the project."""
    return {os.path.relpath(os.path.abspath(file.path), root): file for file in files}


def _forms(files: Mapping[str, FileMigration]) -> dict[Key, str]:
    """Return the form of each mapped function that is migrated."""
    return {
        (path, place.line): place.form
        for path, file in files.items()
        for place in file.places
        if place.status == "done" and place.form and place.is_mapped
    }


def _going_back(verification: Verification, forms: Mapping[Key, str]) -> dict[Key, Back]:
    """Return the places that take another form, with that and the reason."""
    back: dict[Key, Back] = {}
    wrong: set[str] = set()
    for verdict in verification.verdicts:
        key = verdict.path, verdict.line
        if forms[key] == "jit":
            if not verdict.calls:
                back[key] = "shard_map", "the command never calls it"
            elif verdict.difference or not verdict.replays:
                back[key] = "shard_map", verdict.reason
        elif verdict.difference:
            wrong.add(verdict.path)
    if not back and not wrong and verification.has_differences:
        wrong = {path for path, _ in forms}
    # All of a file: its mapped functions share values.
    for key, form in forms.items():
        if key[0] in wrong:
            back[key] = _BELOW[form], "it computes something else in the other form"
    return back


_BELOW: dict[str, Target | None] = {
    "jit": "shard_map",
    "shard_map": "vendored",
    "vendored": None,
    "jax_dist": None,
}


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
    tree = ast.parse(file.after)
    decorators = {
        decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
    }
    spans = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and (node in decorators or _is_call_of_jit(node))
        if "jit" in ast.unparse(node)
    ]
    return [(start, end) for start, end in spans if added & {*range(start, end + 1)}]


def _is_call_of_jit(node: ast.expr) -> bool:
    """Return whether an expression is `jit(...)`, or a partial, as of jit."""
    last = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return last in ("jit", "partial")
