"""Which copies in one body become scans: those that save most are taken first."""

import dataclasses
import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jax_dist import _compat
from jax_dist.passes.findings import Finding
from jax_dist.passes.rolling_copies import Copies, Roll
from jax_dist.passes.rolling_keys import Keys
from jax_dist.passes.rolling_lines import loop_line
from jax_dist.passes.rolling_repeats import Stretch, best_start, stretches
from jax_dist.passes.units import human_bytes

CODE = "JXD407"
LEAST_COPIES = 4
LEAST_EQUATIONS = 20  # of a copy without a loop in it, those of its bodies counted
MOST_BYTES = 16_000_000  # stacked, on one device


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of the copies in one body."""

    rolls: tuple[Roll, ...]  # in program order, none over another
    findings: tuple[Finding, ...]


def choose(eqns: Sequence[JaxprEqn], last_read: Mapping[Any, int], keys: Keys) -> Choice:
    """Decides on the equations of one body.

    Args:
      eqns: all of them.
      last_read: the place of the last equation that reads each variable.
      keys: numbers the equations.
    """
    if len(eqns) < LEAST_COPIES:
        return Choice((), ())
    chooser = _Chooser(eqns, last_read, keys)
    for stretch in stretches([keys.of(eqn) for eqn in eqns], LEAST_COPIES):
        chooser.offer(stretch)
    return chooser.choice()


class _Chooser:
    """Takes what saves most, as soon as nothing that is not looked at yet could save more."""

    def __init__(self, eqns: Sequence[JaxprEqn], last_read: Mapping[Any, int], keys: Keys) -> None:
        self._eqns, self._last_read, self._keys = eqns, last_read, keys
        self._taken: list[Roll] = []
        self._refused: list[tuple[Stretch, Finding]] = []
        # By saving, period and start; a stretch, and what it becomes where that is known.
        self._offers: list[tuple[int, int, int, int, Stretch, Roll | None]] = []
        self._count = 0  # so that no two offers are equal

    def offer(self, stretch: Stretch, roll: Roll | None = None) -> None:
        """Offers a stretch, if it would be worth it."""
        copies = stretch.copies if roll is None else roll.copies
        saving = self._weight(stretch) * (copies - 1)
        if copies >= LEAST_COPIES and saving > 0:
            self._count += 1
            offer = -saving, stretch.period, stretch.start, self._count, stretch, roll
            heapq.heappush(self._offers, offer)

    def choice(self) -> Choice:
        while self._offers:
            *_, stretch, roll = heapq.heappop(self._offers)
            if any(_overlap(stretch if roll is None else roll, other) for other in self._taken):
                self._offer_rest(stretch)
            elif roll is not None:
                self._taken.append(roll)
                self._offer_rest(stretch)
            else:
                self._look_at(stretch)
        rolls = sorted(self._taken, key=lambda roll: roll.start)
        found = [(roll.start, _rolled(self._eqns, roll)) for roll in rolls]
        found += [(stretch.start, finding) for stretch, finding in self._apart()]
        findings = tuple(finding for _, finding in sorted(found, key=lambda each: each[0]))
        return Choice(tuple(rolls), findings)

    def _look_at(self, stretch: Stretch) -> None:
        found = self._roll(stretch)
        if isinstance(found, Roll):
            self.offer(stretch, found)
        else:
            self._refused.append((stretch, found))

    def _offer_rest(self, stretch: Stretch) -> None:
        """What is left of a stretch beside all that is taken."""
        start = stretch.start
        for roll in sorted(self._taken, key=lambda roll: roll.start):
            if _overlap(stretch, roll):
                self.offer(dataclasses.replace(stretch, start=start, stop=max(start, roll.start)))
                start = roll.stop
        if start < stretch.stop:
            self.offer(dataclasses.replace(stretch, start=start))

    def _apart(self) -> Iterator[tuple[Stretch, Finding]]:
        """Refusals beside all that is taken, the first of those over one another."""
        told: list[Stretch | Roll] = list(self._taken)
        for stretch, finding in self._refused:
            if not any(_overlap(stretch, other) for other in told):
                told.append(stretch)
                yield stretch, finding

    def _weight(self, stretch: Stretch) -> int:
        """Of a copy, in equations that XLA compiles; 0 if it is too small."""
        copy = self._eqns[stretch.start : stretch.start + stretch.period]
        weight = sum(map(self._keys.weight, copy))
        large = weight >= LEAST_EQUATIONS or any(map(self._keys.has_loop, copy))
        return weight if large else 0

    def _roll(self, stretch: Stretch) -> Roll | Finding:
        start = best_start(stretch, _edges(self._eqns, stretch))
        stretch = dataclasses.replace(stretch, start=start)
        copy = self._eqns[start : start + stretch.period]
        if any(map(_compat.has_side_effects, copy)):
            return _refused(stretch, copy, _EFFECTS)
        copies = Copies(self._eqns, stretch)
        first, count = copies.longest_alike()
        if count < LEAST_COPIES:
            return _refused(stretch, copy, _UNLIKE)
        roll = copies.rolled(first, count, self._last_read)
        if roll.stacked_bytes > MOST_BYTES:
            needed, most = human_bytes(roll.stacked_bytes), human_bytes(MOST_BYTES)
            why = f"to stack what they take and make needs {needed} on a device, more than {most}"
            return _refused(stretch, copy, why)
        return roll


_EFFECTS = "they print, call back or write, which JAX orders and counts as it is written"
_UNLIKE = f"their operands do not come from alike places in {LEAST_COPIES} copies in a row"


def _refused(stretch: Stretch, copy: Sequence[JaxprEqn], why: str) -> Finding:
    what = f"{_counted(stretch.copies, copy)} are kept"
    return Finding(CODE, "refused", what, why, loop_line(copy))


def _rolled(eqns: Sequence[JaxprEqn], roll: Roll) -> Finding:
    copy = eqns[roll.start : roll.start + roll.period]
    what = f"{_counted(roll.copies, copy)}: one scan"
    return Finding(CODE, "rewritten", what, "", loop_line(copy))


def _counted(copies: int, copy: Sequence[JaxprEqn]) -> str:
    return f"{copies} copies of {len(copy)} equation{'s' * (len(copy) > 1)}"


def _overlap(one: Stretch | Roll, other: Stretch | Roll) -> bool:
    return one.start < other.stop and other.start < one.stop


def _edges(eqns: Sequence[JaxprEqn], stretch: Stretch) -> Iterator[tuple[int, int]]:
    """Places of the maker and of the reader of each value made and read in a stretch."""
    made: dict[Any, int] = {}
    for place in range(stretch.start, stretch.stop):
        eqn = eqns[place]
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in made:
                yield made[atom], place
        made.update((var, place) for var in eqn.outvars)
