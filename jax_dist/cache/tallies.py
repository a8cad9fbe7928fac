"""What the cache did in this process, counted by function."""

import collections
import dataclasses
import threading
from typing import Any


@dataclasses.dataclass(slots=True)
class Counts:
    """Of one function, or of all together."""

    hits: int = 0
    misses: int = 0  # compiled here, in full
    written: int = 0  # of the misses: is in the cache now
    failed: int = 0  # of the misses: did not compile
    seconds_saved: float = 0.0  # what loading took less than compiling had taken
    seconds_compiling: float = 0.0
    # Of the misses: why it is not in the cache; in the order in which they were seen.
    unwritten: dict[str, int] = dataclasses.field(default_factory=collections.Counter)

    @property
    def requests(self) -> int:
        return self.hits + self.misses

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "hits": self.hits,
            "misses": self.misses,
            "written": self.written,
            "failed": self.failed,
            "unwritten": dict(self.unwritten),
            "seconds_saved": round(self.seconds_saved, 3),
            "seconds_compiling": round(self.seconds_compiling, 3),
        }


class Tally:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._functions: dict[str, Counts] = {}

    def hit(self, function: str, saved: float) -> None:
        with self._lock:
            counts = self._of(function)
            counts.hits += 1
            counts.seconds_saved += saved

    def miss(self, function: str, seconds: float, unwritten: str | None) -> None:
        with self._lock:
            counts = self._of(function)
            counts.misses += 1
            counts.seconds_compiling += seconds
            if unwritten is None:
                counts.written += 1
            else:
                counts.unwritten[unwritten] += 1

    def failure(self, function: str, seconds: float) -> None:
        with self._lock:
            counts = self._of(function)
            counts.misses += 1
            counts.failed += 1
            counts.seconds_compiling += seconds

    def functions(self) -> dict[str, Counts]:
        """A copy, in the order in which the functions came first."""
        with self._lock:
            return {
                name: dataclasses.replace(counts, unwritten=counts.unwritten.copy())
                for name, counts in self._functions.items()
            }

    def _of(self, function: str) -> Counts:
        return self._functions.setdefault(function, Counts())


def together(functions: dict[str, Counts]) -> Counts:
    """The sum over all functions."""
    total = Counts()
    for counts in functions.values():
        for field in dataclasses.fields(Counts):
            if field.name != "unwritten":
                value = getattr(total, field.name) + getattr(counts, field.name)
                setattr(total, field.name, value)
        for reason, times in counts.unwritten.items():
            total.unwritten[reason] = total.unwritten.get(reason, 0) + times
    return total
