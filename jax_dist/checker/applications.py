"""How a file applies a function that takes a function: calls, decorators, partials."""

import ast
import dataclasses
from collections.abc import Sequence

from jax_dist.checker.modules import PARTIAL, Module


@dataclasses.dataclass(frozen=True, slots=True)
class Application:
    """`t(f, a, k=b)`, `@t`, `@partial(t, k=b)` or `partial(t, k=b)(f)`."""

    node: ast.expr  # all of it
    args: Sequence[ast.expr]  # after the function
    keywords: Sequence[ast.keyword]
    fun: ast.AST | None  # the function, or the decorated def; None: by keyword, or not given


def application(module: Module, transform: ast.expr) -> Application | None:
    """How the transform is applied where it stands; None where it is only passed on."""
    around = module.parent(transform)
    if decorates(around, transform):
        return Application(transform, (), (), around)
    if not isinstance(around, ast.Call):
        return None
    if around.func is transform:
        outside = module.parent(around)
        if not around.args and decorates(outside, around):
            return Application(around, (), around.keywords, outside)
        fun = around.args[0] if around.args else None
        return Application(around, around.args[1:], around.keywords, fun)
    if around.args[:1] != [transform] or len(around.args) != 1:
        return None
    if module.qualified_name(around.func) not in PARTIAL:
        return None
    return _of_partial(module, around)


def _of_partial(module: Module, partial: ast.Call) -> Application | None:
    outside = module.parent(partial)
    if decorates(outside, partial):
        return Application(partial, (), partial.keywords, outside)
    if isinstance(outside, ast.Call) and outside.func is partial and outside.args:
        keywords = (*partial.keywords, *outside.keywords)
        return Application(outside, outside.args[1:], keywords, outside.args[0])
    return None


def decorates(around: ast.AST, node: ast.AST) -> bool:
    if not isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return any(each is node for each in around.decorator_list)
