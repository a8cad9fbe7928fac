"""`in_axes`, `out_axes` and positions, as the text of a file gives them."""

import ast

from jax_dist.migrating.outcomes import Left


def spec_text(axes: ast.expr | None, axis: str, spec: str, parameter: str) -> str:
    """The PartitionSpecs that say the same as `axes`.

    Args:
      axes: what the file gives for `in_axes` or `out_axes`; None: not given, which means 0.
      axis: the text of the mesh axis, such as `"'batch'"`.
      spec: how the file calls `jax.sharding.PartitionSpec`.
      parameter: "in_axes" or "out_axes", for messages.

    Raises:
      Left: the axes are no literals that count from the front.
    """
    if axes is None:
        return f"{spec}({axis})"
    match axes:
        case ast.Constant(value=None):
            return f"{spec}()"
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return f"{spec}({'None, ' * number}{axis})"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            texts = [spec_text(part, axis, spec, parameter) for part in parts]
            if isinstance(axes, ast.Tuple):
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            return f"[{', '.join(texts)}]"
        case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
            pairs = zip(keys, values, strict=True)
            texts = [
                f"{ast.unparse(key)}: {spec_text(value, axis, spec, parameter)}"  # type: ignore[arg-type]
                for key, value in pairs
            ]
            return f"{{{', '.join(texts)}}}"
    raise Left(f"{parameter} is no literal that counts from the front")


def integers(node: ast.expr | None, parameter: str) -> tuple[int, ...]:
    """The literal integers of `donate_argnums`; () if not given. Raises Left."""
    match node:
        case None | ast.Constant(value=None):
            return ()
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return (number,)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
            if len(numbers) == len(parts) and all(type(number) is int for number in numbers):
                return tuple(numbers)  # type: ignore[arg-type]
    raise Left(f"{parameter} is no literal that counts from the front")


def is_default(axes: ast.expr | None) -> bool:
    """Whether every part is axis 0."""
    match axes:
        case None:
            return True
        case ast.Constant(value=0) if axes.value is not False:
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(is_default, parts))
        case ast.Dict(values=values):
            return all(map(is_default, values))
    return False
