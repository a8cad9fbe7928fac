"""The functions of a file that JAX traces, and what traces them."""

import ast
import itertools
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module, once

_By: TypeAlias = Literal["pmap", "shard_map", "jit", "jax_dist.pmap"]

SHARD_MAP = (
    "jax.shard_map",
    "jax.smap",
    "jax.experimental.shard_map.shard_map",
    "jax.sharding.shard_map",
)
_NAMES: dict[_By, tuple[str, ...]] = {
    "pmap": pmaps.PMAP,
    "shard_map": SHARD_MAP,
    "jit": ("jax.jit", "jax.experimental.pjit.pjit", "jax.pjit"),
    "jax_dist.pmap": ("jax_dist.pmap",),
}

# Rules on traced functions look at files that say one of these: half of all files say `jit`.
TRIGGERS = (b"pmap", b"shard_map")


@once
def traced(module: Module) -> list[tuple[_By, scopes.Function]]:
    """Return every function of the file that it gives to pmap, shard_map or jit, in order of place.

    Those of `jax_dist.pmap` too: a migrated program can still be slow to compile.
    """
    applied: list[tuple[Site, _By, scopes.Function]] = [
        (site, by, function) for by in _NAMES for site, function in bodies(module, by)
    ]
    applied.sort(key=lambda item: scopes.place(item[0].node))
    return [(by, function) for _, by, function in applied]


def bodies(module: Module, by: _By) -> Iterator[tuple[Site, scopes.Function]]:
    """Yield the applications whose function the file shows, with that."""
    for site in pmaps.applications(module, _NAMES[by]):
        function = functions.innermost(module, site.fun)
        if function is not None:
            yield site, function


SPECS = ("jax.P", "jax.sharding.PartitionSpec", "jax.experimental.PartitionSpec")
SPECS += ("jax.experimental.pjit.PartitionSpec", "jax.interpreters.pxla.PartitionSpec")


def followed(module: Module, node: ast.expr | None) -> ast.expr | None:
    """Return the one value of a name; of what is no name, itself."""
    return module.value(node) if isinstance(node, ast.Name) else node


def reached(module: Module, function: scopes.Function) -> list[scopes.Function]:
    """Return a function, and those of the file that it calls or hands on, and so on."""
    found = {function: None}
    waiting = [function]
    while waiting:
        for helper in _helpers(module, waiting.pop()):
            if helper not in found:
                found[helper] = None
                waiting.append(helper)
    return list(found)


@once
def _helpers(module: Module, function: scopes.Function) -> list[scopes.Function]:
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute))
    return list(filter(None, (pmaps.definition(module, name) for name in names)))


def scopes_in(module: Module, function: scopes.Function) -> list[scopes.NameScope]:
    """Return the function's own scope and those in it, in order."""
    children = _children(module)
    inside = [module.scopes.of[function]]
    for scope in inside:
        inside += children.get(scope, [])
    return inside


@once
def _children(module: Module) -> dict[scopes.NameScope, list[scopes.NameScope]]:
    found: dict[scopes.NameScope, list[scopes.NameScope]] = {}
    for scope in module.scopes.all:
        if scope.parent is not None:
            found.setdefault(scope.parent, []).append(scope)
    return found


# By name: which positional arguments are traced.
_OUTER: dict[str, tuple[int, ...]] = {
    "jax.jit": (0,),
    "jax.experimental.pjit.pjit": (0,),
    "jax.grad": (0,),
    "jax.value_and_grad": (0,),
    "jax.lax.scan": (0,),
    "jax.lax.while_loop": (0, 1),
    "jax.lax.fori_loop": (2,),
    "jax.lax.cond": (1, 2),
    "jax.lax.map": (0,),
}


def given_to(module: Module, function: ast.AST) -> tuple[str, ast.Call] | None:
    """Return the transformation that an expression is handed to right where it stands."""
    call = module.parent(function)
    if not isinstance(call, ast.Call) or call.func is function:
        return None
    meaning = module.meaning(call.func)
    if meaning is None:
        return None
    for position, argument in enumerate(call.args, start=len(meaning.args)):
        if argument is function and position in _OUTER.get(meaning.name, ()):
            return meaning.name, call
    return None


def decorators(module: Module, function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield `(name, decorator)` of the transformations that decorate a def, outermost first."""
    for decorator in getattr(function, "decorator_list", ()):
        meaning = module.meaning(decorator)
        if meaning is None and isinstance(decorator, ast.Call):
            meaning = module.meaning(decorator.func)  # @jax.jit(donate_argnums=0)
        if meaning is not None and meaning.name in _OUTER:
            yield meaning.name, decorator


def around(module: Module, node: ast.AST) -> str | None:
    """Return what traces the code at a place; None where this file does not show it."""
    for each in module.ancestors(node):
        if isinstance(each, scopes.Function) and functions.is_in_body(module, each, node):
            name = _tracing(module, each)
            if name is not None:
                return name
        node = each
    return None


@once
def _tracing(module: Module, function: scopes.Function) -> str | None:
    is_lambda = isinstance(function, ast.Lambda)
    reads = [function] if is_lambda else functions.reads(module, function) or ()
    given = (given_to(module, read) for read in reads)
    named = itertools.chain(decorators(module, function), filter(None, given))
    return next((name for name, _ in named), None)
