"""Whether the results of a mapped function are the same on each device, as its text shows.

What is computed from the same values is the same; so is what a collective over the mapped axis
gives. What is computed from a device's own slice, or from its number, is not.
"""

import ast
from collections.abc import Collection
from typing import Any

from jax_dist.checker.model import functions, pmaps, scopes, structure
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.migrating.same_runs import Run
from jax_dist.migrating.values import Same, Value, joined


def of_results(
    module: Module,
    site: Site,
    shared: list[bool],
    by_name: Collection[str | None],
    arity: int | None,
) -> list[Same]:
    """One answer for each result, or one for all where `arity` is None.

    Args:
      module: the file.
      site: what maps the function.
      shared: by position, whether an argument is the same on each device.
      by_name: the arguments that calls give by name, each device its own; None: `**kwargs`.
      arity: how many results there are.
    """
    count = 1 if arity is None else arity
    function = structure.mapped_function(module, site) or _made(module, site.fun)
    if function is None or not structure.is_plain(module, function):
        return [Same.UNKNOWN] * count
    given: list[Value] = [Same.YES] * _bound(module, site.fun)
    given += [Same.YES if each else Same.NO for each in shared]
    names = [each.arg for each in scopes.parameters(function.args)] if None in by_name else []
    named: dict[str, Value] = dict.fromkeys((*names[len(given) :], *filter(None, by_name)), Same.NO)
    found = Run(module, site).call(function, given, named, {}, 0)
    if arity is None:
        return [joined(found)]
    if isinstance(found, tuple) and len(found) == arity:
        return [joined(each) for each in found]
    return [min(joined(found), Same.UNKNOWN)] * count  # not told apart


def _made(module: Module, fun: Any) -> scopes.Function | None:
    """The inner function that a function of this file makes: `make_step(rate)`."""
    maker = pmaps.definition(module, fun.func) if isinstance(fun, ast.Call) else None
    results = None if maker is None else functions.results_of(maker)
    if not results or len(results) != 1 or not isinstance(results[0], ast.Name):
        return None
    made = pmaps.definition(module, results[0])
    return made if made is not None and module.function(made) is maker else None


def _bound(module: Module, fun: Any) -> int:
    """How many positional arguments partials around the function give."""
    count = 0
    if _made(module, fun) is not None:
        return count
    while isinstance(fun, ast.Call) and fun.args:
        if module.qualified_name(fun.func) in PARTIAL:
            count += len(fun.args) - 1
        fun = fun.args[0]
    return count
