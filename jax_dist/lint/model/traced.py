"""The functions of a file that JAX traces, and what traces them."""

import ast
from collections.abc import Iterator
from typing import Literal, TypeAlias

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module, once

_By: TypeAlias = Literal["pmap", "shard_map", "jit", "jax_dist.pmap"]

SHARD_MAP = ("jax.shard_map", "jax.smap", "jax.sharding.shard_map")
SHARD_MAP += ("jax.experimental.shard_map.shard_map",)
_NAMES: dict[_By, tuple[str, ...]] = {
    "pmap": pmaps.PMAP,
    "shard_map": SHARD_MAP,
    "jit": ("jax.jit", "jax.experimental.pjit.pjit", "jax.pjit"),
    "jax_dist.pmap": ("jax_dist.pmap",),
}

# Rules on traced functions look at files that say one of these: half of all files say `jit`.
TRIGGERS = (b"pmap", b"shard_map")


@once
def find_traced(module: Module) -> list[tuple[_By, scopes.Function]]:
    """Return `("jit", function)` of every function that the file jits, pmaps or shard_maps.

    They are in order of line. Those of `jax_dist.pmap` are among them: a migrated program can
    still be slow to compile.
    """
    applied: list[tuple[Site, _By, scopes.Function]] = [
        (site, by, function) for by in _NAMES for site, function in bodies(module, by)
    ]
    applied.sort(key=lambda item: scopes.place(item[0].node))
    return [(by, function) for _, by, function in applied]


def bodies(module: Module, by: _By) -> Iterator[tuple[Site, scopes.Function]]:
    """Yield each site of a transformation whose function the file shows, with the function."""
    for site in pmaps.applications(module, _NAMES[by]):
        function = functions.innermost(module, site.fun)
        if function is not None:
            yield site, function


SPECS = ("jax.P", "jax.sharding.PartitionSpec", "jax.experimental.PartitionSpec")
SPECS += ("jax.experimental.pjit.PartitionSpec", "jax.interpreters.pxla.PartitionSpec")


def resolve_name(module: Module, node: ast.expr | None) -> ast.expr | None:
    """Return the value of a name, None if it is not known; any other expression as it is."""
    return module.value(node) if isinstance(node, ast.Name) else node


def reach(module: Module, function: scopes.Function) -> list[scopes.Function]:
    """Return a function and those of the file that it names, directly or through others."""
    reached = {function: None}  # an ordered set
    waiting = [function]
    while waiting:
        for helper in _helpers(module, waiting.pop()):
            if helper not in reached:
                reached[helper] = None
                waiting.append(helper)
    return list(reached)


@once
def _helpers(module: Module, function: scopes.Function) -> list[scopes.Function]:
    """Return the functions of the file that a function's code names."""
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute))
    return list(filter(None, (pmaps.definition(module, name) for name in names)))


def scopes_in(module: Module, function: scopes.Function) -> list[scopes.NameScope]:
    """Return the function's own scope and those in it, at any depth, in order."""
    inside = [module.scopes.of[function]]
    for scope in inside:  # which grows
        inside += module.scopes.children.get(scope, [])
    return inside


# By transformation: the positions of the functions among its arguments.
_FUNCTION_POSITIONS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("jax.jit", "jax.experimental.pjit.pjit"), (0,)),
    **dict.fromkeys(("jax.grad", "jax.value_and_grad", "jax.lax.scan", "jax.lax.map"), (0,)),
    **{"jax.lax.while_loop": (0, 1), "jax.lax.fori_loop": (2,), "jax.lax.cond": (1, 2)},
}


def find_transformation(module: Module, function: ast.AST) -> tuple[str, ast.Call] | None:
    """Return `("jax.jit", call)` of `jit(function)`; None if no tracing call takes `function`."""
    call = module.parent(function)
    if not isinstance(call, ast.Call) or call.func is function:
        return None
    meaning = module.meaning(call.func)
    if meaning is None:
        return None
    # Of `p = partial(lax.cond, True)`, the first argument of `p(...)` has position 1.
    for position, argument in enumerate(call.args, start=len(meaning.args)):
        if argument is function and position in _FUNCTION_POSITIONS.get(meaning.name, ()):
            return meaning.name, call
    return None


def decorators(module: Module, function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield `(name, decorator)` of the transformations that decorate a def, outermost first."""
    for decorator in getattr(function, "decorator_list", ()):
        meaning = module.meaning(decorator)
        if meaning is None and isinstance(decorator, ast.Call):
            meaning = module.meaning(decorator.func)  # @jax.jit(donate_argnums=0)
        if meaning is not None and meaning.name in _FUNCTION_POSITIONS:
            yield meaning.name, decorator


def transformation_around(module: Module, node: ast.AST) -> str | None:
    """Return the name, such as "jax.jit", of what traces the code at a node; None if unknown."""
    child = node
    for ancestor in module.ancestors(node):
        is_in_body = module.scopes.fields.get(child) == "body"  # not a decorator or default
        if isinstance(ancestor, scopes.Function) and is_in_body:
            name = _transformation_of(module, ancestor)
            if name is not None:
                return name
        child = ancestor
    return None


@once
def _transformation_of(module: Module, function: scopes.Function) -> str | None:
    """Return "jax.jit" of `@jit def f` or of `jit(f)`, or another such name; None if none."""
    for name, _ in decorators(module, function):
        return name
    reads = [function] if isinstance(function, ast.Lambda) else functions.reads(module, function)
    transformations = filter(None, (find_transformation(module, read) for read in reads or ()))
    return next((name for name, _call in transformations), None)
