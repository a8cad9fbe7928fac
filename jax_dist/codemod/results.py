"""What a migration did at each place, and what it left, with the reason."""

import ast
import dataclasses
from typing import Literal, TypeAlias

from jax_dist.checker.model.findings import Code, Fix
from jax_dist.checker.model.semantic_model import Module

Status: TypeAlias = Literal["done", "left"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceResult:
    """One place of one file."""

    path: str
    line: int  # of the file as it was, from 1; of the cell in a notebook
    cell: int | None
    code: Code  # the rule whose page speaks of it
    status: Status
    what: str  # "jax.pmap", as the place spells it
    reason: str = ""  # why it was left; or what was done
    by_hand: str = ""  # what to do about it: a sentence, and in the next lines a sketch in Python
    detail: str = ""  # what the reason rests on at this place: "jax.process_count() in line 40"

    @property
    def why(self) -> str:
        """The reason and its detail."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason

    @property
    def remedy(self) -> str:
        """The sentence of `by_hand`."""
        return self.by_hand.partition("\n")[0]

    @property
    def sketch(self) -> str:
        """The Python of `by_hand`; empty where a sentence says it."""
        return self.by_hand.partition("\n")[2].strip("\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Helpers:
    """The helper module that a file imports from."""

    path: str  # absolute
    names: frozenset[str]  # the functions that it must have


@dataclasses.dataclass(frozen=True, slots=True)
class FileMigration:
    """One file before and after; `after` is `before` where nothing was done."""

    path: str
    before: bytes
    after: bytes
    outcomes: tuple[PlaceResult, ...] = ()
    problem: str = ""  # why the file was left whole: it does not parse, say
    helpers: Helpers | None = None
    is_new: bool = False  # a helper module that was not there

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def left_whole(self, left: "Left") -> "FileMigration":
        """The same file with nothing done."""
        outcomes = tuple(
            dataclasses.replace(
                outcome,
                status="left",
                reason=left.reason,
                by_hand=left.by_hand,
                detail=left.detail,
            )
            if outcome.status == "done"
            else outcome
            for outcome in self.outcomes
        )
        return FileMigration(self.path, self.before, self.before, outcomes)


class Left(Exception):  # noqa: N818 - not an error: a place that is left as it is
    """Raised where a place cannot be migrated.

    Args:
      reason: why, in words that are the same at each such place, so that reports can count them.
      by_hand: what to do about it: a sentence, and in the next lines a sketch in Python.
      detail: what the reason rests on at this place.
    """

    def __init__(self, reason: str, by_hand: str = "", detail: str = ""):
        super().__init__(reason, by_hand, detail)
        self.reason: str = reason
        self.by_hand: str = by_hand
        self.detail: str = detail


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPlace:
    """`span`: the bytes it covers."""

    outcome: PlaceResult
    span: tuple[int, int]
    fix: Fix | None = None


def done(
    module: Module, node: ast.expr | ast.alias, code: Code, fix: Fix | None, said: str = ""
) -> PlannedPlace:
    """A place that is migrated, by its own fix or by that of another place."""
    return PlannedPlace(_outcome(module, node, code, "done", said), module.span(node), fix)


def left(module: Module, node: ast.expr | ast.alias, code: Code, why: Left) -> PlannedPlace:
    """A place that stays as it is."""
    outcome = _outcome(module, node, code, "left", why.reason)
    outcome = dataclasses.replace(outcome, by_hand=why.by_hand, detail=why.detail)
    return PlannedPlace(outcome, module.span(node))


def _outcome(
    module: Module, node: ast.expr | ast.alias, code: Code, status: Status, reason: str
) -> PlaceResult:
    start = module.source.position(module.span(node)[0])
    what = module.text(node)
    return PlaceResult(module.source.path, start.line, start.cell, code, status, what, reason)
