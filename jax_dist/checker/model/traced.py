"""The functions of a file that JAX traces, and what traces them."""

import ast
import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from jax_dist.checker.model import functions, pmaps, scopes
from jax_dist.checker.model.semantic_model import PARTIAL, Module

_By: TypeAlias = Literal["pmap", "shard_map", "jit", "jax_dist.pmap"]

_SHARD_MAP = (
    "jax.shard_map",
    "jax.smap",
    "jax.experimental.shard_map.shard_map",
    "jax.sharding.shard_map",
)
_JIT = ("jax.jit", "jax.experimental.pjit.pjit", "jax.pjit")

# Rules on traced functions look at files that say one of these: half of all files say `jit`.
TRIGGERS = (b"*pmap*", b"*shard_map*")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Application:
    """One place where a transformation is given a function."""

    by: _By
    node: ast.expr  # the call, or the decorator
    fun: Any  # the expression that is transformed, or the decorated def
    keywords: dict[str, ast.expr]
    is_known: bool = True  # False: `**kwargs` may hold more keywords


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Traced:
    """A def or lambda that is traced."""

    by: _By
    node: ast.expr  # the call or decorator that does it
    function: scopes.Function


def traced(module: Module) -> list[_Traced]:
    """Every function of the file that it gives to pmap, shard_map or jit, in order of place.

    Those of `jax_dist.pmap` too: a migrated program can still be slow to compile.
    """
    return module.once(_traced)


def _traced(module: Module) -> list[_Traced]:
    found: list[_Traced] = []
    for site in pmaps.sites(module):
        function = functions.mapped_function(module, site) if site.is_application else None
        if function is not None:
            found.append(_Traced("pmap", site.node, function))
    ours = _applied(module, "jax_dist.pmap", ("jax_dist.pmap",))
    for each in (*applications(module, "shard_map"), *applications(module, "jit"), *ours):
        function = functions.innermost(module, each.fun)
        if function is not None:
            found.append(_Traced(each.by, each.node, function))
    return sorted(found, key=lambda each: scopes.place(each.node))


def applications(module: Module, by: Literal["shard_map", "jit"]) -> Iterator[Application]:
    """Calls and decorators, through `partial` too, of shard_map or jit."""
    return _applied(module, by, _SHARD_MAP if by == "shard_map" else _JIT)


def applied(module: Module, names: Iterable[str]) -> Iterator[Application]:
    """Calls and decorators, through `partial` too, of any function that takes one first."""
    return _applied(module, "jit", names)


def _applied(module: Module, by: _By, names: Iterable[str]) -> Iterator[Application]:
    for node in module.uses(*names):
        around: Any = module.parent(node)
        if pmaps.decorates(around, node):
            yield Application(by, node, around, {})
        elif isinstance(around, ast.Call) and around.func is node:
            yield from _of_call(module, by, around, around.args)
        elif _is_partial(module, around) and around.args[:1] == [node]:
            yield from _of_call(module, by, around, around.args[1:])


def _of_call(
    module: Module, by: _By, call: ast.Call, arguments: list[ast.expr]
) -> Iterator[Application]:
    keywords = {each.arg: each.value for each in call.keywords if each.arg is not None}
    is_known = len(keywords) == len(call.keywords)
    around = module.parent(call)
    fun = arguments[0] if arguments else keywords.get("f") or keywords.get("fun")
    if fun is not None:
        yield Application(by, call, fun, keywords, is_known)
    elif pmaps.decorates(around, call):
        yield Application(by, call, around, keywords, is_known)
    elif isinstance(around, ast.Call) and around.func is call and around.args:
        yield Application(by, call, around.args[0], keywords, is_known)


def _is_partial(module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and module.qualified_name(node.func) in PARTIAL


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
    for load in sorted(loads, key=scopes.place):
        call = module.parent(load)
        if isinstance(call, ast.Call) and call.func is load:
            yield call


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
    """The transformation that an expression is handed to right where it stands."""
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
    """`(name, decorator)` of the transformations that decorate a def, outermost first."""
    for decorator in getattr(function, "decorator_list", ()):
        meaning = module.meaning(decorator)
        if meaning is None and isinstance(decorator, ast.Call):
            meaning = module.meaning(decorator.func)  # @jax.jit(donate_argnums=0)
        if meaning is not None and meaning.name in _OUTER:
            yield meaning.name, decorator


def around(module: Module, node: ast.AST) -> str | None:
    """What traces the code at a place; None where this file does not show it."""
    for each in module.ancestors(node):
        if isinstance(each, scopes.Function):
            found = _tracing(module, each)
            if found is not None and not _is_outside(module, node, each):
                return found
    return None


def _tracing(module: Module, function: scopes.Function) -> str | None:
    found = module.memo(_tracing)
    if function not in found:
        given = (given_to(module, read) for read in _reads(module, function))
        named = itertools.chain(decorators(module, function), filter(None, given))
        found[function] = next((name for name, _ in named), None)
    return found[function]


def _reads(module: Module, function: scopes.Function) -> list[ast.expr]:
    if isinstance(function, ast.Lambda):
        return [function]
    owner = module.parent(function)
    if isinstance(owner, ast.ClassDef):
        if f"self.{function.name}".encode() not in module.source.python:
            return []  # most methods; looking for attributes walks over all classes
        return list(module.once(functions.self_reads)[owner].get(function.name, []))
    scope = module.scope(function)
    if len(scope.bindings.get(function.name, ())) != 1:
        return []
    return list(module.reads(scope, function.name))


def _is_outside(module: Module, node: ast.AST, function: scopes.Function) -> bool:
    """Whether the node is a decorator, default or annotation of the function: not in its body."""
    chain = {id(node), *map(id, module.ancestors(node))}
    return not any(id(each) in chain for each in functions.body_of(function))
