"""Which parts of `mapped` a place needs that maps by `jax.pmap`.

A part that a place may need is included: what cannot be read from the text needs all of them.
"""

import ast
from collections import Counter
from typing import Any

from jax_dist.lint.model import functions, pmaps
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import PARTIAL, Module
from jax_dist.migrate import imports

_FULL = frozenset(("full",))
PART_OF = {
    "in_axes": "axes",
    "out_axes": "axes",
    "static_broadcasted_argnums": "static",
    "devices": "devices",
    "backend": "devices",
    "axis_size": "devices",
}
IN_CORE = frozenset(("axis_name", "donate_argnums"))
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MAINS = frozenset(("main", "train_and_evaluate"))  # as the programs of flax call them
_DEEPEST = 4  # functions around a place, each called by the next one


def needed(
    module: Module, site: Site, *, several_processes: bool, again: bool = False
) -> frozenset[str]:
    """The parts that one place needs, of `helper_module.PARTS`.

    Args:
      module: the file.
      site: a place of it that is to use `mapped`.
      several_processes: whether the program may run in several.
      again: whether another place maps the same function, which must run the same program.
    """
    if site.form in ("alias", "partial alias") and _is_seen(module, site):
        return frozenset()  # each of its uses is a place, with all options
    is_read = site.is_application and site.fun is not None and not site.unknown
    if _is_handed_on(module, site.reference):
        is_read = False
    if not is_read or site.arguments.keys() - PART_OF.keys() - IN_CORE:
        return _FULL
    parts = {PART_OF[name] for name in site.arguments if name in PART_OF}
    if "devices" in site.arguments and not _shares_devices(module, site):
        parts.add("axes")  # which takes arrays that lie on other devices
    if several_processes:
        parts.add("processes")
    if again or may_map_again(module, site):
        parts.add("again")
    return frozenset(parts)


def donated(site: Site) -> list[int] | None:
    """The numbers of the arguments that a place donates; None where the text does not say it."""
    given = site.arguments.get("donate_argnums", ast.Tuple(elts=[]))
    parts = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
    values = [each.value for each in parts if isinstance(each, ast.Constant)]
    return [e for e in values if isinstance(e, int)] if len(values) == len(parts) else None


def _is_handed_on(module: Module, reference: ast.expr) -> bool:
    """Whether other files may map by the name of this one."""
    if not isinstance(reference, ast.Name):
        return False
    is_global = reference.id in module.scopes.module.bindings
    return is_global and imports.is_used_elsewhere(module, reference.id)


def _is_seen(module: Module, site: Site) -> bool:
    """Whether all uses of an alias are places of this file."""
    statement: Any = module.parent(site.node)  # an assignment, of one of the two kinds
    targets: list[Any] = getattr(statement, "targets", None) or [statement.target]
    places = {each.reference for each in pmaps.sites(module)}
    for target in targets:
        if not isinstance(target, ast.Name):
            return False
        scope = module.scope(target)
        is_outer = scope is module.scopes.module
        if scope.is_class or (is_outer and imports.is_used_elsewhere(module, target.id)):
            return False
        if any(read not in places for read in module.reads(scope, target.id)):
            return False
    return True


def _shares_devices(module: Module, site: Site) -> bool:
    """Whether all that this file maps is for the same devices, by their text."""
    texts = {
        module.text(given) if module.holds(given) else ""
        for each in pmaps.applications(module)
        for given in [each.arguments.get("devices")]
    }
    return len(texts) == 1 and "" not in texts


def may_map_again(module: Module, site: Site) -> bool:
    """Whether a function may be mapped that was mapped before: jax.pmap compiles it once."""
    is_call = site.form == "call" and not _is_new(module, site.fun, site.node)
    return is_call and not _runs_once(module, site.node, _DEEPEST)


def is_mapped_twice(module: Module, site: Site) -> bool:
    """Whether another place of the file maps the same function alike: jax.pmap traces it once."""
    return module.once(_mapped)[_as_mapped(module, site)] > 1


def _mapped(module: Module) -> "Counter[Any]":
    """How often each function is mapped in one way."""
    return Counter(_as_mapped(module, site) for site in pmaps.applications(module))


def _as_mapped(module: Module, site: Site) -> Any:
    if not isinstance(site.fun, ast.Name | ast.Attribute):
        return site
    options = sorted((name, ast.unparse(value)) for name, value in site.arguments.items())
    return pmaps.definition(module, site.fun) or module.text(site.fun), tuple(options)


def _is_new(module: Module, fun: ast.expr | None, at: ast.expr) -> bool:
    """Whether an expression is another function each time that a place is reached."""
    match fun:
        case ast.Lambda():
            return True
        case ast.Call():
            called = module.qualified_name(fun.func) or ""
            maker = pmaps.definition(module, fun.func)
            made = functions.results_of(maker) if maker is not None else None
            is_made = bool(made) and all(_is_new(module, each, each) for each in made or ())
            return is_made or called in PARTIAL or called.startswith("jax.")
        case ast.Name():
            around = _loop(module, at) or module.function(at)
            bindings = module.reaching(fun) or []
            return bool(bindings) and all(
                any(each is around for each in module.ancestors(binding.node))
                and module.function(binding.node) is module.function(at)
                and (binding.kind == "def" or _is_new(module, binding.value, at))
                for binding in bindings
            )
    return False


def _runs_once(module: Module, node: ast.AST, depth: int) -> bool:
    """Whether a place is reached once in a run, as far as this file shows."""
    if _loop(module, node) is not None:
        return False
    function: Any = module.function(node)
    if function is None:
        return True
    if isinstance(function, ast.Lambda) or depth == 0:
        return False
    if isinstance(module.parent(function), ast.ClassDef):
        return False  # any object may call it
    is_top = module.function(function) is None
    if is_top and function.name in _MAINS:
        return True
    if is_top and imports.is_used_elsewhere(module, function.name):
        return False
    calls = functions.callers(module, function)
    return calls is not None and len(calls) == 1 and _runs_once(module, calls[0], depth - 1)


def _loop(module: Module, node: ast.AST) -> ast.AST | None:
    """The innermost loop around a place, in its function or at the module's level."""
    function = module.function(node)
    for around in module.ancestors(node):
        if around is function:
            return None
        if isinstance(around, (*_LOOPS, *_COMPREHENSIONS)):
            return around
    return None
