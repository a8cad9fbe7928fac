"""All that one fix changes, for editors and code scanning: its group, its imports, its helpers."""

import difflib
import re
from collections.abc import Iterator, Sequence

from jax_dist.checker import edits, placing
from jax_dist.checker.findings import Edit, Finding, Fix, Safety
from jax_dist.checker.modules import Module, ParseError

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def repair(finding: Finding, findings: Sequence[Finding], module: Module) -> list[Edit]:
    """The edits that mend one finding, and with it those of its group; none where that cannot be.

    Args:
      finding: with a fix.
      findings: all of the file, for a group is mended as a whole.
      module: the file.
    """
    fix = finding.fix
    if fix is None or fix.safety is Safety.DISPLAY:
        return []
    fixes = [other.fix for other in findings if other.fix] if fix.group else [fix]
    fixes = [other for other in fixes if other.group == fix.group]
    if any(other.safety is Safety.DISPLAY for other in fixes):
        return []
    return changes(fixes, module)


def changes(fixes: Sequence[Fix], module: Module) -> list[Edit]:
    """What `fixes` change, without those that clash with earlier ones; none if they spoil the file.

    Args:
      fixes: of one file.
      module: the file.
    """
    applied, _ = edits.choose(fixes)
    if not any(fix.imports or fix.definitions for fix in applied):
        return sorted({edit for fix in applied for edit in fix.edits})
    try:
        return list(between(module.source.code, placing.placed(module, applied)))
    except ParseError:
        return []


def between(old: bytes, new: bytes) -> Iterator[Edit]:
    """Whole lines, for where imports go is known only when the file is put together."""
    before, after = _LINE.findall(old), _LINE.findall(new)
    starts = [0]
    for line in before:
        starts.append(starts[-1] + len(line))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, first, last, new_first, new_last in matcher.get_opcodes():
        if kind != "equal":
            text = b"".join(after[new_first:new_last]).decode()
            yield Edit(starts[first], starts[last], text)
