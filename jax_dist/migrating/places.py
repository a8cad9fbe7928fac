"""One place of a file: what becomes of it, and the fix that does it."""

import ast
import dataclasses

from jax_dist.checker.model.findings import Code, Fix
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating.outcomes import Left, Outcome, Status


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """`span`: the bytes it covers."""

    outcome: Outcome
    span: tuple[int, int]
    fix: Fix | None = None


def done(
    module: Module, node: ast.expr | ast.alias, code: Code, fix: Fix | None, said: str = ""
) -> Place:
    """A place that is migrated, by its own fix or by that of another place."""
    return Place(_outcome(module, node, code, "done", said), module.span(node), fix)


def left(module: Module, node: ast.expr | ast.alias, code: Code, why: Left) -> Place:
    """A place that stays as it is."""
    outcome = _outcome(module, node, code, "left", why.reason)
    outcome = dataclasses.replace(outcome, by_hand=why.by_hand, detail=why.detail)
    return Place(outcome, module.span(node))


def _outcome(
    module: Module, node: ast.expr | ast.alias, code: Code, status: Status, reason: str
) -> Outcome:
    start = module.source.position(module.span(node)[0])
    what = module.text(node)
    return Outcome(module.source.path, start.line, start.cell, code, status, what, reason)
