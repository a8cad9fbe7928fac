"""The arguments and results of mapped functions, and those of them that are laid out alike."""

import ast
import dataclasses
import enum
from typing import TypeAlias

from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.stacking import Kind
from jax_dist.migrating.following import First


class Layout(enum.Enum):
    """How the values of a slot lie on the devices."""

    STACKED = "a device axis in front"
    SHARED = "whole on each device"
    SPLIT = "one global array, cut along its first dimension"


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One positional argument of a mapped function."""

    site: Site
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One result of a mapped function; position None: all that it returns."""

    site: Site
    position: int | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A copy for each device, or a split by their number, and of what."""

    node: ast.Call
    of: ast.expr
    kind: Kind
    devices: ast.expr | None = None  # the first of all devices, where copies are on these alone


Slot: TypeAlias = Argument | Result | ast.expr  # the expression of a source


@dataclasses.dataclass(slots=True)
class Component:
    """Slots that are laid out alike."""

    slots: list[Slot] = dataclasses.field(default_factory=list)
    sources: list[Source] = dataclasses.field(default_factory=list)
    firsts: list[First] = dataclasses.field(default_factory=list)
    forests: list[ast.Call] = dataclasses.field(default_factory=list)  # of get_metrics
    shown: list[ast.expr] = dataclasses.field(default_factory=list)  # where others see the axis
    donors: list[Site] = dataclasses.field(default_factory=list)  # that donate one of the slots
    kept: str = ""  # why the axis stays; "" where it can go
    cautions: list[str] = dataclasses.field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """What the slots can be."""
        kinds = {source.kind for source in self.sources}
        if self.kept or not self.slots:
            return Layout.STACKED
        if kinds == {Kind.REPLICATED}:
            return Layout.SHARED
        results = any(isinstance(slot, Result) for slot in self.slots)
        if kinds == {Kind.SPLIT}:
            return Layout.STACKED if results or self.firsts or self.forests else Layout.SPLIT
        if not kinds and (self.firsts or self.forests) and results:
            return Layout.SHARED
        return Layout.STACKED
