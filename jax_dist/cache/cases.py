"""Two compilations of one program, and what of their difference is not explained yet."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jax_dist.cache.causes import Finding, finding
from jax_dist.cache.changes import Change
from jax_dist.cache.records import Compile

MOST_DETAILS = 3
PROGRAM = "computation"  # the component of the key


@dataclasses.dataclass(slots=True)
class Case:
    """Two compilations, and what no rule has explained yet."""

    one: Compile
    other: Compile
    components: list[str]
    changes: list[Change]
    settings: dict[str, tuple[str, str]]  # those that differ
    is_read: bool = False  # there were changes; if there are none, we cannot see what differs

    def __post_init__(self) -> None:
        self.is_read = bool(self.changes)

    def explain(self, *components: str) -> None:
        """Takes components away that a rule has explained."""
        self.components = [name for name in self.components if name not in components]

    def explain_all(self, *, besides: tuple[str, ...] = ()) -> None:
        """Takes all away: one cause explains whatever else differs."""
        self.components = [name for name in self.components if name in besides]
        self.changes = []

    def take(self, wanted: Callable[[Change], bool]) -> list[Change]:
        """Takes the changes away that a rule explains."""
        taken = [change for change in self.changes if wanted(change)]
        self.changes = [change for change in self.changes if not wanted(change)]
        return taken

    def differ(self, name: str) -> tuple[str, str] | None:
        """Both texts of a setting that differs."""
        return self.settings.get(name)


def told(name: str, taken: Sequence[Change], *, texts: bool = True) -> Iterator[Finding]:
    if not taken:
        return
    details = dict.fromkeys(str(change) if texts else change.place for change in taken)
    more = len(details) - MOST_DETAILS
    shown = list(details)[:MOST_DETAILS]
    yield finding(name, *shown, *([f"and {more} more"] if more > 0 else []))
