"""Where a sequence of numbers repeats: pure Python, that knows nothing of programs.

A stretch repeats with period `p` if every number in it, but for the first `p`, equals the one `p`
places before.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

# A period is seen by a number that comes at most so many times in it, ...
_LOOKED_BACK = 4
# ... and of the periods seen, those with the most to say for them are tried.
_PERIODS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a sequence that repeats: `[start, stop)`."""

    start: int
    stop: int
    period: int

    @property
    def copies(self) -> int:
        return (self.stop - self.start) // self.period

    @property
    def slack(self) -> int:
        """By how much the first copy may start later, with as many copies."""
        return self.stop - self.start - self.copies * self.period


def stretches(numbers: Sequence[int], least_copies: int) -> list[Stretch]:
    """All stretches of at least so many copies, by the most frequent periods.

    Takes time in proportion to the length.

    >>> stretches([7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 8], 3)
    [Stretch(start=1, stop=11, period=3)]
    """
    found: list[Stretch] = []
    for period in _periods(numbers, least_copies):
        found += _of_period(numbers, period, least_copies)
    return found


def _periods(numbers: Sequence[int], least_copies: int) -> list[int]:
    """Distances between equal numbers, the commonest first."""
    seen: dict[int, list[int]] = {}
    distances: Counter[int] = Counter()
    for place, number in enumerate(numbers):
        before = seen.setdefault(number, [])
        distances.update(place - each for each in before)
        before.append(place)
        del before[:-_LOOKED_BACK]
    often = [
        (distance, times) for distance, times in distances.items() if times >= least_copies - 1
    ]
    often.sort(key=lambda pair: (-pair[1], pair[0]))
    return [distance for distance, _ in often[:_PERIODS]]


def _of_period(numbers: Sequence[int], period: int, least_copies: int) -> Iterator[Stretch]:
    start = 0
    for place in range(period, len(numbers) + 1):
        if place < len(numbers) and numbers[place] == numbers[place - period]:
            continue
        if place - start >= least_copies * period:
            yield Stretch(start, place, period)
        start = place - period + 1


def best_start(stretch: Stretch, edges: Iterator[tuple[int, int]]) -> int:
    """Where to start the first copy, so that the fewest values go from one copy to the next.

    Args:
      stretch: the copies may start up to its slack later.
      edges: places of the maker and the reader of each value in it.
    """
    period = stretch.period
    changes = [0] * (period + 1)  # of the number of crossings, by the place of the border
    for maker, reader in edges:
        if reader - maker < period:
            first, last = (maker + 1) % period, reader % period
            changes[first] += 1
            changes[last + 1] -= 1
            if first > last:
                changes[0] += 1
                changes[period] -= 1
    crossings, count = [], 0
    for change in changes[:period]:
        count += change
        crossings.append(count)
    starts = range(stretch.start, stretch.start + min(stretch.slack, period - 1) + 1)
    return min(starts, key=lambda start: crossings[start % period])
