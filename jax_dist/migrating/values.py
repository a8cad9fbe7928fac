"""What is known of a value while a mapped function is run by its text."""

import ast
import enum
from typing import Any, TypeAlias

from jax_dist.checker.model import scopes


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
