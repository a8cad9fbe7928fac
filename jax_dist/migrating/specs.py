"""`in_axes` and `out_axes`, as the file writes them, as text of PartitionSpecs."""

import ast
from collections.abc import Callable
from typing import Any

from jax_dist.migrating.outcomes import Left


def spec_text(
    text: Callable[[Any], str], axes: ast.expr | None, axis: str, spec: str, parameter: str
) -> str:
    """The specs that say the same as `axes`.

    Args:
      text: gives the text of a node.
      axes: what the file gives for `in_axes` or `out_axes`; None: not given, which means 0.
      axis: the text of the mesh axis, such as `"'batch'"`.
      spec: how the file calls `jax.sharding.PartitionSpec`.
      parameter: "in_axes" or "out_axes", for messages.

    Raises:
      Left: the axes are not literal, or count from the end.
    """
    if axes is None:
        return f"{spec}({axis})"
    match axes:
        case ast.Constant(value=None):
            return f"{spec}()"
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return f"{spec}({'None, ' * number}{axis})"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            texts = [spec_text(text, part, axis, spec, parameter) for part in parts]
            if isinstance(axes, ast.Tuple):
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            return f"[{', '.join(texts)}]"
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            texts = [
                f"{text(key)}: {spec_text(text, value, axis, spec, parameter)}"
                for key, value in pairs
            ]
            return f"{{{', '.join(texts)}}}"
        case ast.UnaryOp(op=ast.USub()):
            why = f"{parameter} counts from the end, and a PartitionSpec from the front"
            raise Left(why, f"Give {parameter} without a minus; the rank of the array says which.")
    raise Left(
        f"{parameter} is not a literal, so the specs cannot be written",
        f"Write {parameter} out at the call and migrate again, or write the specs by hand.\n"
        "in_specs=(P(), P(axis), P(None, axis)),  # for in_axes=(None, 0, 1)",
    )


def without(axes: ast.expr | None, positions: tuple[int, ...], parameter: str) -> ast.expr | None:
    """The axes of the arguments that are no static ones."""
    if not isinstance(axes, ast.Tuple | ast.List) or not positions:
        return axes
    kept = [each for number, each in enumerate(axes.elts) if number not in positions]
    if not kept:
        raise Left(
            f"{parameter} maps static arguments only",
            "Call the function itself: no argument differs between the devices.",
        )
    return ast.Tuple(elts=kept, ctx=ast.Load())


def axes_text(text: Callable[[Any], str], axes: ast.expr) -> str:
    """The axes as the file writes them; of a tuple made by `without`, of its parts."""
    if hasattr(axes, "lineno") or not isinstance(axes, ast.Tuple):
        return text(axes)
    parts = [text(part) for part in axes.elts]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def integers(node: ast.expr | None, parameter: str) -> tuple[int, ...]:
    """The literal integers of `donate_argnums` or `static_broadcasted_argnums`; () if not given."""
    match node:
        case None | ast.Constant(value=None):
            return ()
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return (number,)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
            if len(numbers) == len(parts) and all(type(number) is int for number in numbers):
                return tuple(numbers)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.USub()):
            raise Left(f"{parameter} counts from the end", "Count from the front.")
    raise Left(
        f"{parameter} is not a literal",
        f"Write the positions of {parameter} out, then migrate again.",
    )


def is_default(axes: ast.expr | None) -> bool:
    """Whether every part is axis 0, so that the plain helper serves."""
    match axes:
        case None:
            return True
        case ast.Constant(value=0) if axes.value is not False:
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(is_default(part) for part in parts)
        case ast.Dict(values=values):
            return all(is_default(value) for value in values)
    return False
