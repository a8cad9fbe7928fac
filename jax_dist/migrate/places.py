"""Results of a migration: places, the uses of pmap and its like, and files before and after."""

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from jax_dist import _codes
from jax_dist.lint.findings import Code, Fix
from jax_dist.lint.model.semantic_model import Module

Target: TypeAlias = Literal["jax_dist", "vendored", "shard_map", "jit"]
TARGETS: tuple[Target, ...] = get_args(Target)
# The target to migrate a place to after a run showed a difference (None: leave it), and why.
Fallback: TypeAlias = tuple[Target | None, str]
Status: TypeAlias = Literal["done", "left"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One use of pmap or of a related name in a file, and whether it was migrated."""

    path: str
    line: int  # of the file before, from 1; of the cell in a notebook
    cell: int | None
    code: Code  # of the lint rule about it
    status: Status
    what: str  # "jax.pmap", as the place spells it
    reason: str = ""  # why it was left; or a remark on what was done
    by_hand: str = ""  # one sentence: what to do about a place that was left
    form: str = ""  # the target that it was migrated to: "jax_dist", "shard_map", ...
    is_mapped: bool = False  # it maps a function: it is no import, alias or placement of arrays

    @classmethod
    def make(
        cls, module: Module, node: ast.AST, code: Code, status: Status = "done", **fields: Any
    ) -> "Place":
        """Return the place of an AST node; `fields` are more of it, as `form="shard_map"`."""
        path, position = module.source.path, module.source.position(module.span(node)[0])
        return cls(path, position.line, position.cell, code, status, module.text(node), **fields)

    @property
    def where(self) -> str:
        """`a.py:12`, or `a.ipynb:cell 3:12`."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}"


@dataclasses.dataclass(frozen=True, slots=True)
class FileMigration:
    """One file before and after; `after` is `before` if nothing was done."""

    path: str
    before: bytes
    after: bytes
    places: tuple[Place, ...] = ()
    problem: str = ""  # why the file was left whole
    needs_module: str = ""  # the absolute path of the vendored module that it imports
    is_new: bool = False  # it did not exist
    # By line of the text before: the bytes of expressions that read a value whose shape changes.
    changed_reads: Mapping[int, Sequence[tuple[int, int]]] = dataclasses.field(default_factory=dict)

    @property
    def changed(self) -> bool:
        return self.before != self.after


@dataclasses.dataclass(eq=False)
class CannotMigrate(Exception):
    """Raised where a use of pmap cannot be migrated."""

    reason: str  # the same words each time: reports group places by it
    by_hand: str = ""  # what the user can do


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A place with the fix that migrates it; None: it stays, or the fix of another place does."""

    place: Place
    fix: Fix | None = None

    @classmethod
    def leave(cls, module: Module, node: ast.expr, error: CannotMigrate) -> "PlannedPlace":
        """Return the place of a pmap that stays as it is, with the reason that `error` gives."""
        fields = {"reason": error.reason, "by_hand": error.by_hand, "is_mapped": True}
        return cls(Place.make(module, node, _codes.PMAP_CALL, "left", **fields))
