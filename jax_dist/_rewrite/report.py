"""Report of a rewriting: what was done with a function, and what that changed.

The key of the persistent cache is a hash of the program's text, so what differs in that text
between two processes, differs in the key. Some of it shows in a single process: addresses of Python
objects, and captured arrays. Some does not: an order taken from a set, random names.
"""

import collections
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import jax
import numpy as np
import rich.console
import rich.padding
import rich.text
from jax.extend.core import JaxprEqn, Var

from jax_dist import _codes, _compat
from jax_dist._cache.explain import Cause
from jax_dist._hlo import ProgramCost
from jax_dist._passes import Outcome, PassFinding, interpreter
from jax_dist._passes.constants import Capture
from jax_dist._passes.interpreter import record_of
from jax_dist._usage import counted, human_bytes, make_table, render

if TYPE_CHECKING:
    from jax_dist.plan import Plan


def find_key_causes(lowered: jax.stages.Lowered, captured: Sequence[str]) -> tuple[Cause, ...]:
    """Return the visible reasons why a fresh process would not find a program in the cache.

    `captured` are the names of the arrays that are part of the program.
    """
    text, causes = lowered.as_text(), []
    if "@CustomSPMDPartitioning(" in text:
        causes.append(Cause("custom-partitioning", ()))
    has_callback = re.search(r"stablehlo\.custom_call @\w*python\w*callback\(", text)
    if has_callback and not _compat.CACHES_HOST_CALLBACKS:
        causes.append(Cause("host-callback", ()))
    if captured:
        causes.append(Cause("captured-array", tuple(captured)))
    return tuple(causes)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class RewriteReport:
    """Report of the rewriting of a function. Printed, it fits a terminal of 80 columns."""

    name: str  # of the function
    before: ProgramCost
    after: ProgramCost
    cache_before: tuple[Cause, ...] | None  # of another key in each process; None: not compiled
    cache_after: tuple[Cause, ...]
    findings: tuple[PassFinding, ...] = ()
    captured: tuple[Capture, ...] = ()
    plan: "Plan | None" = None  # the strategies on a machine; None if not asked for

    @property
    def summary(self) -> str:
        """Return what was done, and the bytes moved between devices before and after."""
        outcomes = collections.Counter(finding.outcome for finding in self.findings)
        actions = collections.Counter(array.action for array in self.captured)
        counts = [f"{outcomes[kind]} {kind}" for kind in get_args(Outcome) if kind in outcomes]
        counts += [f"{counted(count, 'array')} {action}" for action, count in actions.items()]
        before, after = map(human_bytes, (self.before.moved_bytes, self.after.moved_bytes))
        change = f"{before} -> {after} moved per step"
        if round(self.before.moved_bytes) == round(self.after.moved_bytes):
            is_zero = round(self.after.moved_bytes) == 0
            change = "nothing moved between devices" if is_zero else f"{after} moved per step"
        return f"{', '.join(counts) or 'nothing to rewrite'}; {change}"

    def to_dict(self) -> dict[str, object]:
        """Return the report as dicts, lists, strings, numbers and None only, for JSON."""
        moved = {"before": self.before.moved_bytes, "after": self.after.moved_bytes}
        fields = dataclasses.asdict(dataclasses.replace(self, plan=None, captured=()))
        names = ("name", "shape", "dtype", "bytes", "captured_at", "used_at", "action")
        fields["captured"] = [{key: getattr(one, key) for key in names} for one in self.captured]
        fields |= {"summary": self.summary, "moved_bytes": moved}
        fields["plan"] = self.plan.to_dict() if self.plan else None
        return json.loads(json.dumps(fields))

    def __repr__(self) -> str:  # also of `str`
        return render(*_sections(self))


def _sections(report: RewriteReport) -> Iterator[Any]:
    """Yield the renderables to print; a section without rows is left out."""
    yield rich.text.Text(f"{report.name}: {report.summary}")
    has_findings = bool((*report.findings, *report.captured))
    for outcome in get_args(Outcome):
        if rows := [_finding_row(f) for f in report.findings if f.outcome == outcome]:
            yield _add_title(outcome.capitalize(), ("code", "finding"), rows, header=False)
    if report.captured:
        columns = ("name", "type", "captured", "used", "now", "bytes")
        yield _add_title("Captured arrays", columns, map(_captured_row, report.captured), numbers=1)
    if report.before.collectives or report.after.collectives:
        columns = ("", "kind", "axes", "devices", "count", "result", "moved")
        title = "Collectives, per step on one device"
        yield _add_title(title, columns, _collective_rows(report), numbers=4)
    if has_findings:
        columns = ("", "before", "after")
        yield _add_title("Program, on one device", columns, _program_rows(report), numbers=2)
    if has_findings or report.cache_after:
        yield _add_title("Key in the persistent cache", ("", ""), _cache_rows(report), header=False)
    if report.plan:
        yield rich.text.Text(f"\nWays to run it\n\n{report.plan}")


def _add_title(title: str, *table: Any, **options: Any) -> rich.console.Group:
    """Return a title and an indented table; the arguments are those of `make_table`."""
    indented = rich.padding.Padding(make_table(*table, **options), (0, 0, 0, 2))
    return rich.console.Group(rich.text.Text(f"\n{title}"), indented)


def _finding_row(finding: PassFinding) -> tuple[str, str]:
    because = f"because {finding.why}" if finding.why else ""
    return finding.code, "\n".join(filter(None, (finding.what, because, finding.where)))


def _captured_row(array: Capture) -> tuple[str, ...]:
    lines = (array.captured_at, array.used_at)
    return array.name, array.type, *lines, array.action, human_bytes(array.bytes)


def _collective_rows(report: RewriteReport) -> Iterator[tuple[str, ...]]:
    for label, entries in _before_and_after(report.before.collectives, report.after.collectives):
        for entry in entries:
            axes = ", ".join(entry.axes) or "none of the mesh"
            kind = entry.kind if entry.runs == "always" else f"{entry.kind}\n{entry.runs}"
            sizes = (entry.result_bytes, entry.count * entry.moved_bytes)
            numbers = (str(entry.size), str(entry.count), *map(human_bytes, sizes))
            yield label, kind, axes, *numbers


def _before_and_after(before: Any, after: Any) -> list[tuple[str, Any]]:
    """Return both with their labels, or one without where they are the same."""
    return [("", after)] if before == after else [("before", before), ("after", after)]


def _program_rows(report: RewriteReport) -> Iterator[tuple[str, ...]]:
    for what, field in {
        "StableHLO text": "stablehlo_bytes",
        "constants in it": "constants_bytes",
        "arguments": "argument_bytes",
        "results": "output_bytes",
        "peak of temporary memory": "temp_bytes",
    }.items():
        sizes = [getattr(program, field) for program in (report.before, report.after)]
        yield what, *["unknown" if n is None else human_bytes(n) for n in sizes]


def _cache_rows(report: RewriteReport) -> Iterator[tuple[str, str]]:
    for label, causes in _before_and_after(report.cache_before, report.cache_after):
        text = "the same in every process, as far as the program shows"
        if causes:
            text = "\n".join(["another one in each process, or never written:", *map(str, causes)])
        yield label, "not compiled" if causes is None else text


# Under `check_vma=True` (the default of `jax.shard_map`), the gradient by a value that is
# replicated is summed over devices: JAX transposes its broadcast (`pvary`) to a psum. The loss of
# one device then has a gradient that is N times too large, and a pmean afterwards changes nothing.

_REMATERIALIZED = "rematted_computation"  # JAX's name for the forward part of a checkpoint
_WHY_SUMMED = (
    "under check_vma=True, JAX sums it over all devices, so for the loss of one device it is N "
    "times too large, also after a pmean; give shard_map check_vma=False, take lax.pmean of the "
    "loss before the gradient, or see that it is divided by lax.axis_size"
)


def find_gradient_sums(jaxpr: Any) -> tuple[PassFinding, ...]:
    """Return a finding for each gradient that JAX sums over the devices of a shard_map.

    There is none where the loss is reduced over devices in the shard_map: such a gradient is to be
    summed, and the psum of the loss shows in the backward pass as a `pvary`.
    """
    findings = []
    for eqn in interpreter.equations(jaxpr):
        # With check_vma=False, JAX does not know which values are replicated, and sums nothing.
        if _compat.name_of(eqn) != "shard_map" or not eqn.params["check_vma"]:
            continue
        line = interpreter.source_line(eqn)
        backward = list(_find_backward_equations(eqn.params["jaxpr"], line))
        if any(_is_transposed_psum(inner) for inner, _ in backward):
            continue
        for inner, line in backward:
            if record_of(inner).collective == "sum":
                axes = ", ".join(repr(str(axis)) for axis in inner.params["axes"])
                what = f"the gradient by a replicated value is summed over {axes}"
                code = _codes.GRADIENT_OF_REPLICATED
                findings.append(PassFinding(code, "noted", what, _WHY_SUMMED, line))
    return tuple(dict.fromkeys(findings))


def _find_backward_equations(
    body: Any, line_around: str, *, is_inside: bool = False
) -> Iterator[tuple[JaxprEqn, str]]:
    """Yield the equations of the backward pass in a body, at any depth, each with the user's line.

    JAX marks them by their name stack, such as "transpose(jvp())". In the body of a marked equation
    (`is_inside`) name stacks start anew: all in it is of the backward pass, but for the forward
    pass that a `jax.checkpoint` repeats there. `line_around` serves equations without a line.
    """
    for eqn in interpreter.open_jaxpr(body).eqns:
        line = interpreter.source_line(eqn) or line_around
        names = str(eqn.source_info.name_stack)
        is_backward = "transpose(" in names or (is_inside and _REMATERIALIZED not in names)
        if is_backward:
            yield eqn, line
        for inner in interpreter.bodies(eqn):
            yield from _find_backward_equations(inner, line, is_inside=is_backward)


def _is_transposed_psum(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a transposed psum: pvary of a variable or of the seed 1.0."""
    if _compat.name_of(eqn) != "pvary":
        return False
    atom: Any = eqn.invars[0]
    return isinstance(atom, Var) or (np.ndim(atom.val) == 0 and float(atom.val) == 1.0)
