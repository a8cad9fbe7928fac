"""What the checker's own fixes do for a migration: removed names, and slow idioms around pmap.

`x[0]` of what a mapped function gives stays, for the first shard (JXD202, JXD203) is another place,
and nothing at all inside a trace.
"""

from jax_dist.checker.engine import linter
from jax_dist.checker.model.findings import Code, Finding, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Version
from jax_dist.migrating.outcomes import Outcome, Status
from jax_dist.migrating.places import Place

_RENAMES: tuple[Code, ...] = (
    "JXD103",
    "JXD104",
    "JXD105",
    "JXD106",
    "JXD107",
    "JXD108",
    "JXD207",
)
# Not JXD302: what this writes has a mesh of its own, and a mesh of the file may be meant so.
_IDIOMS: tuple[Code, ...] = ("JXD301",)

CODES = frozenset(_RENAMES + _IDIOMS)  # all that is asked for


def places(module: Module, target: Version | None, *, idiomatic: bool) -> list[Place]:
    """The places of a file that rules find and mend.

    Args:
      module: the file.
      target: the oldest jax that the code must run on; None: the newest.
      idiomatic: whether slow idioms go too.
    """
    unsafe = _IDIOMS if idiomatic else ()
    found: list[Place] = []
    for finding in linter.check_module(module, frozenset(_RENAMES + unsafe), target):
        fix = finding.fix if _is_wanted(finding.fix, finding.code, unsafe) else None
        found.append(Place(_outcome(finding, fix), finding.span, fix))
    return found


def _is_wanted(fix: Fix | None, code: Code, unsafe: tuple[Code, ...]) -> bool:
    if fix is None:
        return False
    return fix.safety is Safety.SAFE or (fix.safety is Safety.UNSAFE and code in unsafe)


def _outcome(finding: Finding, fix: Fix | None) -> Outcome:
    status: Status = "left" if fix is None else "done"
    by_hand = "" if fix is not None or finding.fix is None else finding.fix.title
    place, what = finding.start, finding.line_text.strip()
    return Outcome(
        finding.path,
        place.line,
        place.cell,
        finding.code,
        status,
        what,
        finding.message,
        by_hand,
    )
