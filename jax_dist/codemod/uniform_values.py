"""What is known of a value while uniformity is decided, and what collectives make of it."""

import ast
import enum
from typing import Any, TypeAlias

from jax_dist.checker.model import functions, scopes
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module


class Same(enum.IntEnum):
    """Whether a value is the same on each device; the larger one holds for what both make."""

    YES = 0
    UNKNOWN = 1  # a function that is not seen may add it up over the devices
    NO = 2


Value: TypeAlias = "Same | tuple[Value, ...]"
Names: TypeAlias = "dict[str, Value | scopes.Function]"


def joined(value: Value) -> Same:
    """What holds for a value as a whole.

    >>> joined((Same.YES, (Same.NO, Same.UNKNOWN)))
    <Same.NO: 2>
    """
    if isinstance(value, tuple):
        return max((joined(each) for each in value), default=Same.YES)
    return value


def merged(one: Any, two: Any) -> Any:
    """What a name is that may be either."""
    if one is two or one == two:
        return one
    states = [
        Same.YES if isinstance(each, scopes.Function) else joined(each) for each in (one, two)
    ]
    return max(states)


def either(values: list[Value]) -> Value:
    """What one of several `return` gives."""
    if len(values) == 1:
        return values[0]
    if values and all(isinstance(each, tuple) for each in values):
        sizes = {len(each) for each in values}  # type: ignore[arg-type]
        if len(sizes) == 1:
            return tuple(joined(each) for each in zip(*values, strict=True))  # type: ignore[misc]
    return joined(tuple(values))


def root_of(node: ast.AST | None) -> str | None:
    """`x` of `x.y["z"].update`, and of `x.get("y")`."""
    while True:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=node) | ast.Subscript(value=node) | ast.Starred(value=node):
                pass
            case ast.Call(func=ast.Attribute() as node):
                pass
            case _:
                return None


TOGETHER = frozenset(f"jax.lax.{name}" for name in ("pmean", "psum", "pmax", "pmin", "all_gather"))
APART = frozenset(
    f"jax.lax.{name}"
    for name in ("axis_index", "ppermute", "pshuffle", "all_to_all", "psum_scatter")
)
# Their functions use no collectives by themselves.
_KNOWN = ("jax.", "numpy.", "optax.", "contextlib.")
# These do not change what they are given either.
LIBRARIES = (*_KNOWN, "absl.", "chex.", "flax.", "haiku.", "logging.", "math.", "warnings.")
_OF_STATES = ("apply_gradients", "replace", "_replace", "items", "values", "keys", "get")
_OF_ARRAYS = ("astype", "reshape", "squeeze", "transpose", "copy", "ravel", "flatten", "set", "add")
_REDUCING = ("sum", "mean", "max", "min")
_METHODS = frozenset(_OF_STATES + _OF_ARRAYS + _REDUCING)


class MappedAxis:
    """The mapped axis of one site.

    Args:
      module: the file.
      site: what maps.
    """

    def __init__(self, module: Module, site: Site):
        axis = site.arguments.get("axis_name")
        self._is_named = axis is not None
        self._axis = None if axis is None or not module.holds(axis) else axis

    def together(self, call: ast.Call, value: Value) -> Value:
        """What a collective gives; over another axis than the mapped one it changes nothing."""
        axes = [*call.args[1:2], *(each.value for each in call.keywords if each.arg == "axis_name")]
        grouped = any(each.arg == "axis_index_groups" for each in call.keywords)
        if not self._is_named:
            return joined(value)
        if not axes or grouped:
            return min(joined(value), Same.UNKNOWN)
        mine = self._axis
        given = axes[0].elts if isinstance(axes[0], ast.Tuple | ast.List) else [axes[0]]
        if mine is None or any(ast.dump(each) == ast.dump(mine) for each in given):
            return Same.YES
        literal = all(isinstance(each, ast.Constant) for each in (mine, *given))
        return joined(value) if literal else min(joined(value), Same.UNKNOWN)

    def in_unseen(self, call: ast.Call, name: str) -> Same:
        """What a call that is not followed gives of equal arguments: with the axis, any number."""
        if self._axis is None or is_transparent(call, name):
            return Same.YES
        mine = ast.dump(self._axis)
        given = (*call.args, *(each.value for each in call.keywords))
        return Same.UNKNOWN if any(ast.dump(each) == mine for each in given) else Same.YES


def is_transparent(call: ast.Call, name: str) -> bool:
    """Whether a call that is not followed surely uses no collective of its own."""
    if name:
        return name.startswith(_KNOWN)
    return isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS


def changes_arguments(function: Any) -> bool:
    """Whether a function sets parts of its parameters, or calls methods for what they change."""
    names = {each.arg for each in scopes.parameters(function.args)}
    for node in functions.all_nodes(function):
        match node:
            case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store()):
                if root_of(node) in names:
                    return True
            case ast.Expr(value=ast.Call(func=ast.Attribute() as called)):
                if root_of(called) in names:
                    return True
    return False
