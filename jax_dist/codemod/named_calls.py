"""Calls that give a mapped function arguments by name, which jax.shard_map does not take.

Where a run has shown that all calls give the same ones, they are given by position, and the helper
`by_position` gives them their names again.
"""

import ast
import dataclasses
from typing import TYPE_CHECKING

from jax_dist import _codes
from jax_dist.checker.model import pmaps
from jax_dist.checker.model.findings import Edit
from jax_dist.checker.model.pmaps import Site
from jax_dist.codemod.codegen import Texts
from jax_dist.codemod.results import Form, PlannedPlace

if TYPE_CHECKING:
    from jax_dist.codemod.recorded_flow import FileFlow


@dataclasses.dataclass(frozen=True, slots=True)
class NamedCalls:
    """The calls of one place that name arguments; none by default."""

    names: tuple[str, ...] = ()  # of the last arguments, in their order
    calls: tuple[ast.Call, ...] = ()
    group: str = ""  # the name of what changes together
    why_not: str = ""  # why they cannot be given by position


def of(flow: "FileFlow", site: Site) -> NamedCalls:
    """What a run has shown of the calls of a place."""
    record = flow.sites.get(site)
    if record is None:
        return NamedCalls()
    forms = [each for each in flow.forms(record) if "words" in each]
    if not any(each["words"] for each in forms):
        return NamedCalls()
    names, count = tuple(forms[0]["words"]), forms[0]["arguments"]
    seen = {each for each in flow.nodes if record.number in flow.called_sites(each)}
    calls = pmaps.mapped_calls(flow.module, site)
    if len(forms) > 1 or not seen <= {*calls} or not all(_fits(e, count, names) for e in calls):
        return NamedCalls(why_not="a call gives arguments by name")
    group = f"calls of {site.node.lineno}:{site.node.col_offset}"
    return NamedCalls(names, tuple(calls), group)


def _fits(call: ast.Call, count: int, names: tuple[str, ...]) -> bool:
    """Whether a call gives so many arguments by position, and then these by name."""
    is_plain = len(call.args) == count and not any(isinstance(e, ast.Starred) for e in call.args)
    return is_plain and tuple(word.arg for word in call.keywords) == names


def place(texts: Texts, group: str, form: Form) -> PlannedPlace:
    """A call, with all arguments by position; `texts` are those around it."""
    module, call = texts.module, texts.at
    assert isinstance(call, ast.Call)
    spans = [(module.span(word)[0], module.span(word.value)[0]) for word in call.keywords]
    edits = [Edit(start, end, "") for start, end in spans]
    said = "its last arguments are given by position"
    return texts.place(_codes.PMAP_CALL, edits, group, said, form)
