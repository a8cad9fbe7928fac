"""The traceback that a rank wrote, for a rank that raised need not end: JAX waits at its exit."""

from collections.abc import Sequence

_FIRST = "Traceback (most recent call last):"
_LONGEST = 100  # lines


class Traceback:
    """Follows the lines of a rank, and keeps the last traceback among them.

    >>> traceback = Traceback()
    >>> traceback.follow(["epoch 1", "Traceback (most recent call last):", "  File a.py", "E: no"])
    >>> traceback.lines[-1], traceback.is_last_word
    ('E: no', True)
    >>> traceback.follow(["epoch 2"])
    >>> traceback.is_last_word
    False
    """

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()
        self.is_last_word = False  # nothing was written since
        self._unfinished: list[str] = []

    def follow(self, lines: Sequence[str]) -> None:
        """Takes what the rank has written."""
        for line in lines:
            self._follow(line)

    def _follow(self, line: str) -> None:
        if line.startswith(_FIRST):
            self._unfinished = [line]
        elif self._unfinished:
            self._unfinished.append(line)
        self.is_last_word = bool(self._unfinished) and not line.startswith((" ", _FIRST))
        if self.is_last_word or len(self._unfinished) > _LONGEST:
            self.lines = tuple(self._unfinished)
            self._unfinished = []
