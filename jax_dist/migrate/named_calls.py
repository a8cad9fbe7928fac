"""Calls that give a mapped function arguments by name, which jax.shard_map does not take.

Where a run has shown that all calls give the same ones, they are given by position, and the helper
`by_position` gives them their names again.
"""

import ast
import dataclasses
from typing import TYPE_CHECKING

from jax_dist import _codes
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import PARTIAL, Module
from jax_dist.migrate import site_parts
from jax_dist.migrate.codegen import Texts
from jax_dist.migrate.results import Form, PlannedPlace

if TYPE_CHECKING:
    from jax_dist.migrate.recorded_flow import FileFlow


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
    is_known = seen <= {*calls} and all(_fits(e, count, names) for e in calls)
    if len(forms) > 1 or not is_known or not _mean_the_same(flow.module, site, count, names):
        return NamedCalls(why_not="a call gives arguments by name")
    group = f"calls of {site.node.lineno}:{site.node.col_offset}"
    return NamedCalls(names, tuple(calls), group)


def _mean_the_same(module: Module, site: Site, count: int, names: tuple[str, ...]) -> bool:
    """Whether a call by position that was not seen gets what it did, or raises an error.

    Args:
      module: the file.
      site: the place that maps.
      count: of the arguments that are given by position.
      names: of those behind them.
    """
    numbers = site_parts.donated(site)
    # pmap donates none that is given by name.
    if numbers is None or not all(each in range(count) for each in numbers):
        return False
    function, bound, first = site.fun, set[str | None](), 0
    while isinstance(function, ast.Call) and module.qualified_name(function.func) in PARTIAL:
        first += len(function.args) - 1
        bound |= {word.arg for word in function.keywords}
        function = function.args[0]
    definition = pmaps.definition(module, function)
    if definition is None or isinstance(function, ast.Attribute) or None in bound:
        return False
    given = definition.args
    own = [each.arg for each in (*given.posonlyargs, *given.args)][first + count :]
    others = [each for each, name in zip(own, names, strict=False) if each != name]
    return bound.issuperset(others) and (given.vararg is None or len(own) >= len(names))


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
