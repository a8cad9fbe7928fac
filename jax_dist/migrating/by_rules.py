"""What the checker's own fixes do for a migration: removed names, and slow idioms around pmap."""

from jax_dist.checker import linter
from jax_dist.checker.findings import Code, Finding, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.registry import Version
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
# `x[0]` of what a mapped function gives; only what is fixed is spoken of.
_FIRSTS: tuple[Code, ...] = ("JXD202", "JXD203")
# Not JXD302: what this writes has a mesh of its own, and a mesh of the file may be meant so.
_IDIOMS: tuple[Code, ...] = ("JXD301",)

CODES = frozenset(_RENAMES + _FIRSTS + _IDIOMS)  # all that is asked for


def places(
    module: Module, target: Version | None, *, to_library: bool, idiomatic: bool
) -> list[Place]:
    """The places of a file that rules find and mend.

    Args:
      module: the file.
      target: the oldest jax that the code must run on; None: the newest.
      to_library: whether jax_dist is there, which has `unreplicate`.
      idiomatic: whether slow idioms go too.
    """
    unsafe = (_FIRSTS if to_library else ()) + (_IDIOMS if idiomatic else ())
    found: list[Place] = []
    for finding in linter.check_module(module, frozenset(_RENAMES + unsafe), target):
        fix = finding.fix if _is_wanted(finding.fix, finding.code, unsafe) else None
        if fix is not None or finding.code not in _FIRSTS:
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
