"""Whether code stands where it is only reached if jax has a name: fallbacks for old versions."""

import ast

from jax_dist.checker.modules import Module

_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})
_ASKED = ("hasattr(", "version", "TYPE_CHECKING")


def is_guarded(module: Module, node: ast.AST) -> bool:
    """Whether the code around `node` is ready for the name to be missing.

    It is in a `try` that catches the error, or in its handlers, or in a branch that asks for the
    name or for jax's version.
    """
    below = node
    for around in module.ancestors(node):
        if isinstance(around, ast.Try) and any(_catches(each) for each in around.handlers):
            if below not in around.finalbody:
                return True
        elif isinstance(around, ast.If | ast.IfExp) and _asks(module, around.test):
            return True
        below = around
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _asks(module: Module, test: ast.expr) -> bool:
    text = module.text(test)
    return any(word in text for word in _ASKED)
