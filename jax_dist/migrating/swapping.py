"""Puts migrated files in place for as long as it takes to try them."""

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from jax_dist.checker import writing
from jax_dist.checker.misuse import MisuseError


class Swap:
    """Files that have been replaced, and come back unless they are kept."""

    def __init__(self, before: Mapping[Path, bytes], after: Mapping[Path, bytes], backup: Path):
        self.backup = backup  # where the old files lie meanwhile
        self.kept = False
        self._before, self._after = before, after

    def put_in_place(self) -> None:
        """Writes the new files."""
        for path, data in self._after.items():
            if self._before.get(path) != data:
                writing.write(str(path), data)

    def keep(self) -> None:
        """Leaves the new files where they are."""
        self.kept = True

    def put_back(self) -> None:
        """Restores the old files, byte by byte."""
        for path, data in self._before.items():
            if not path.exists() or path.read_bytes() != data:
                writing.write(str(path), data)
        for path in self._after:
            if path not in self._before:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def swapped(before: Mapping[Path, bytes], after: Mapping[Path, bytes]) -> Iterator[Swap]:
    """Replaces files; at the end they are as they were, unless `keep` was called.

    Whatever ends it, an error, Ctrl-C or SIGTERM, the old bytes come back. Meanwhile they also lie
    in a folder, for the case that this process is killed.

    Args:
      before: what the files hold, by path.
      after: what they shall hold.

    Raises:
      MisuseError: a file no longer holds what `before` says.
      OSError: a file cannot be written. If it is an old one, its copy stays in the folder.
    """
    check_unchanged(before)
    swap = Swap(before, after, _backed_up(before))
    with _ended_in_order():
        try:
            swap.put_in_place()
            yield swap
        finally:
            if not swap.kept:
                _put_back(swap)
    shutil.rmtree(swap.backup)


def _put_back(swap: Swap) -> None:
    try:
        swap.put_back()
    except OSError as error:
        error.add_note(f"The files as they were lie in {swap.backup}; files.txt there lists them.")
        raise


def check_unchanged(before: Mapping[Path, bytes]) -> None:
    """Raises a MisuseError where someone else has written to the files meanwhile."""
    for path, data in before.items():
        if path.read_bytes() != data:
            raise MisuseError(f"{path} has changed since it was read; start again")


def _backed_up(before: Mapping[Path, bytes]) -> Path:
    """A folder with numbered copies, and a list that says which is which."""
    folder = Path(tempfile.mkdtemp(prefix="jax_dist_before_"))
    lines = []
    for number, (path, data) in enumerate(before.items()):
        (folder / str(number)).write_bytes(data)
        lines.append(f"{number}\t{path.resolve()}\n")
    (folder / "files.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM raises, as Ctrl-C does, so that what is open is closed."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
