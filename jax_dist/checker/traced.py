"""The functions of a file that JAX traces, and what traces them."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from jax_dist.checker import order, pmaps, scopes, structure
from jax_dist.checker.modules import PARTIAL, Module

By: TypeAlias = Literal["pmap", "shard_map", "jit", "jax_dist.pmap"]

SHARD_MAP = (
    "jax.shard_map",
    "jax.smap",
    "jax.experimental.shard_map.shard_map",
    "jax.sharding.shard_map",
)
JIT = ("jax.jit", "jax.experimental.pjit.pjit", "jax.pjit")

# Rules on traced functions look at files that say one of these: half of all files say `jit`.
TRIGGERS = (b"*pmap*", b"*shard_map*")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Application:
    """One place where a transformation is given a function."""

    by: By
    node: ast.expr  # the call, or the decorator
    fun: Any  # the expression that is transformed, or the decorated def
    keywords: dict[str, ast.expr]
    is_known: bool = True  # False: `**kwargs` may hold more keywords


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A def or lambda that is traced."""

    by: By
    node: ast.expr  # the call or decorator that does it
    function: scopes.Function


def traced(module: Module) -> list[Traced]:
    """Every function of the file that it gives to pmap, shard_map or jit, in order of place.

    Those of `jax_dist.pmap` too: a migrated program can still be slow to compile.
    """
    return module.once(_traced)


def _traced(module: Module) -> list[Traced]:
    found: list[Traced] = []
    for site in pmaps.sites(module):
        function = structure.mapped_function(module, site) if site.is_application else None
        if function is not None:
            found.append(Traced("pmap", site.node, function))
    ours = _applied(module, "jax_dist.pmap", ("jax_dist.pmap",))
    for each in (*applications(module, "shard_map"), *applications(module, "jit"), *ours):
        function = structure.innermost(module, each.fun)
        if function is not None:
            found.append(Traced(each.by, each.node, function))
    return sorted(found, key=lambda each: order.place(each.node))


def applications(module: Module, by: Literal["shard_map", "jit"]) -> Iterator[Application]:
    """Calls and decorators, through `partial` too, of shard_map or jit."""
    return _applied(module, by, SHARD_MAP if by == "shard_map" else JIT)


def applied(module: Module, names: Iterable[str]) -> Iterator[Application]:
    """Calls and decorators, through `partial` too, of any function that takes one first."""
    return _applied(module, "jit", names)


def _applied(module: Module, by: By, names: Iterable[str]) -> Iterator[Application]:
    for node in module.uses(*names):
        around: Any = module.parent(node)
        if _decorates(around, node):
            yield Application(by, node, around, {})
        elif isinstance(around, ast.Call) and around.func is node:
            yield from _of_call(module, by, around, around.args)
        elif _is_partial(module, around) and around.args[:1] == [node]:
            yield from _of_call(module, by, around, around.args[1:])


def _of_call(
    module: Module, by: By, call: ast.Call, arguments: list[ast.expr]
) -> Iterator[Application]:
    keywords = {each.arg: each.value for each in call.keywords if each.arg is not None}
    is_known = len(keywords) == len(call.keywords)
    around = module.parent(call)
    fun = arguments[0] if arguments else keywords.get("f") or keywords.get("fun")
    if fun is not None:
        yield Application(by, call, fun, keywords, is_known)
    elif _decorates(around, call):
        yield Application(by, call, around, keywords, is_known)
    elif isinstance(around, ast.Call) and around.func is call and around.args:
        yield Application(by, call, around.args[0], keywords, is_known)


def _is_partial(module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and module.qualified_name(node.func) in PARTIAL


def _decorates(around: ast.AST, node: ast.AST) -> bool:
    if not isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return any(each is node for each in around.decorator_list)


def is_inside(module: Module, node: ast.AST, function: scopes.Function) -> bool:
    """Whether a node stands in a function, at any depth."""
    return any(around is function for around in module.ancestors(node))


def calls_of_builtins(module: Module, names: Iterable[str]) -> Iterator[ast.Call]:
    """Calls of builtins that the file does not hide, in order of place."""
    loads = [
        load
        for scope in module.scopes.all
        for name in names
        if name in scope.loads and scope.lookup(name) is None
        for load in scope.loads[name]
    ]
    for load in sorted(loads, key=order.place):
        call = module.parent(load)
        if isinstance(call, ast.Call) and call.func is load:
            yield call
