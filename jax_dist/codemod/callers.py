"""Where a project calls a function or hands it on, and where it does so with what does that."""

import ast
import dataclasses
import os
from collections.abc import Callable, Iterator

from jax_dist.checker.model import pmaps, scopes
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod.results import ProjectContext


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """A place where a function is called, or handed on."""

    module: Module
    node: ast.expr

    def line_of(self, line: int, module: Module) -> str:
        """A line of its file, as a file says it: `line 3`, or `src/a.py:3` of another."""
        if self.module is module:
            return f"line {line}"
        return f"{os.path.relpath(self.module.source.path)}:{line}"


def first(
    module: Module,
    context: ProjectContext,
    held: ast.expr,
    find: Callable[[Module, ProjectContext, ast.expr], tuple[int, str] | None],
) -> tuple[str, str] | None:
    """The first thing that is found at an expression, or at a use of a function that leads to it.

    A method is known by its name alone, and in its own file only.

    Args:
      module: the file of the expression.
      context: the project.
      held: the expression.
      find: says the line and the kind of what it finds at a use; None where nothing is.

    Returns:
      The place of the line, and the kind.
    """
    seen = set[ast.AST]()
    waiting = [Use(module, held)]
    while waiting:
        use = waiting.pop(0)
        if found := _known(use, context, find):
            line, kind = found
            return use.line_of(line, module), kind
        function = use.module.function(use.node)
        if function is not None and function not in seen:
            seen.add(function)
            waiting += _uses_of(use.module, context, function)
    return None


def _known(
    use: Use, context: ProjectContext, find: Callable[..., tuple[int, str] | None]
) -> tuple[int, str] | None:
    known = use.module.memo(find)
    if use.node not in known:
        known[use.node] = find(use.module, context, use.node)
    return known[use.node]


def _uses_of(module: Module, context: ProjectContext, function: scopes.Function) -> list[Use]:
    known = module.memo(_uses_of)
    if function not in known:
        known[function] = [*_uses(module, context, function)]
    return known[function]


def _uses(module: Module, context: ProjectContext, function: scopes.Function) -> Iterator[Use]:
    if isinstance(function, ast.Lambda):
        yield from (Use(module, each) for each in pmaps.reads_of(module, function))
        return
    name, scope = function.name, module.scope(function)
    if isinstance(module.parent(function), ast.ClassDef):
        yield from () if name.startswith("__") else _attributes(module, name)
        return
    yield from (Use(module, each) for each in module.reads(scope, name))
    if scope is module.scopes.module:
        for path in sorted({*context.graph.users(os.path.abspath(module.source.path), name)}):
            other = _module(context, path)
            if other is not None:
                reads = other.reads(other.scopes.module, name)
                yield from (Use(other, each) for each in reads)
                yield from _attributes(other, name)


def _attributes(module: Module, name: str) -> Iterator[Use]:
    for node in module.nodes(ast.Attribute):
        if node.attr == name and isinstance(node.ctx, ast.Load):
            yield Use(module, node)


def _module(context: ProjectContext, path: str) -> Module | None:
    """A file of the project, which all that ask share."""
    known = context.graph.known.setdefault(_module, {})
    if path not in known:
        known[path] = context.module(path)
    return known[path]
