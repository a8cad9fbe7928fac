"""Checks many files, in their order; what goes wrong in one of them stays there."""

from collections.abc import Callable, Sequence

from jax_dist.lint.engine.linter import Examiner, unreadable
from jax_dist.lint.model.findings import Code, Finding


def run(
    files: Sequence[str],
    examiner: Examiner,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """The findings of all files, in their order; `progress` is told how many are done."""
    found: list[Finding] = []
    for done, path in enumerate(files, start=1):
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            reason = error.strerror or error
            found.append(unreadable(path, f"the file cannot be read: {reason}"))
        else:
            if not examiner.passes_over(path, data):
                likely = examiner.likely(path, data)
                if likely is not None:
                    found += examined(path, data, examiner, likely)
        progress(done, len(files))
    return found


def examined(
    path: str, data: bytes, examiner: Examiner, likely: frozenset[Code] | None = None
) -> list[Finding]:
    """The findings of one file; a fault of ours is one of them, and stays in it."""
    try:
        return examiner.examined(path, data, likely)
    except Exception as error:  # noqa: BLE001 - other files must not suffer
        return [failed(path, error)]


def failed(path: str, error: Exception) -> Finding:
    """The finding for a file on which the checker itself fails."""
    said = f"{type(error).__name__}: {error}"
    return unreadable(path, f"jax-dist failed on this file ({said}); please report it")
