"""JXD302: `jax.make_mesh` without axis types."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule


@rule(
    "JXD302",
    "make-mesh-explicit",
    what="`jax.make_mesh` without `axis_types`, or with its first argument passed by keyword.",
    why="The default of `axis_types` changed from Auto to Explicit in jax 0.9.0: a "
    "`shard_map` whose `in_specs` differ from the sharding of its argument raises a "
    "ValueError (jax 0.10.2), where it resharded before. The keyword `axis_shapes` is a"
    " TypeError on 0.12.0.1, and its new name `axis_sizes` is one before. The fix is "
    "unsafe: newer code may mean Explicit.",
    instead="mesh = jax.make_mesh((8,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))",
    fix="unsafe",
    triggers=(b"make_mesh",),
    needs=(0, 5, 0),
)
def make_mesh_explicit(module: Module) -> Iterator[Found]:
    for call in module.calls("jax.make_mesh"):
        keywords = {keyword.arg: keyword for keyword in call.keywords}
        if None in keywords or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        first = keywords.get("axis_shapes") or keywords.get("axis_sizes")
        if "axis_types" not in keywords and len(call.args) <= 2:
            fix = _types_fix(module, call, first)
            yield Found(call, "make_mesh without axis_types is Explicit since jax 0.9.0", fix)
        elif first is not None:
            message = f"make_mesh takes {first.arg} under another name on other versions of jax"
            edits = _by_position(module, call, first)
            fix = Fix("pass it by position", Safety.SAFE, edits) if edits else None
            yield Found(first, message, fix)


def _by_position(module: Module, call: ast.Call, first: ast.keyword | None) -> tuple[Edit, ...]:
    """Drop the keyword, where the argument comes first anyway."""
    if first is None or call.args or call.keywords[0] is not first:
        return ()
    return (Edit(module.span(first)[0], module.span(first.value)[0], ""),)


def _types_fix(module: Module, call: ast.Call, first: ast.keyword | None) -> Fix | None:
    by_name = [keyword.value for keyword in call.keywords if keyword.arg == "axis_names"]
    names = [*call.args[1:2], *by_name]
    shapes = [*call.args[:1], *([first.value] if first else [])]
    outer = module.parent(call)
    is_set = isinstance(outer, ast.Call) and module.qualified_name(outer.func) == "jax.set_mesh"
    if not names or not shapes or is_set:  # code that sets the mesh may well mean Explicit
        return None
    end = max(module.span(each)[1] for each in (*call.args, *call.keywords))
    if module.source.code[end : end + 1] == b")" and end + 1 != module.span(call)[1]:
        return None  # in parentheses of its own
    count = _count(module, names[0], shapes[0])
    times = "" if count == "1" else f" * {count}"
    auto, imports = module.name_for("jax.sharding.AxisType", call)
    edits = (
        *_by_position(module, call, first),
        Edit(end, end, f", axis_types=({auto}.Auto,){times}"),
    )
    return Fix("spell out Auto axes", Safety.UNSAFE, edits, imports)


def _count(module: Module, names: ast.expr, shape: ast.expr) -> str:
    """Return the code of the number of axes."""
    for literal in (names, shape):
        elements = literal.elts if isinstance(literal, ast.Tuple | ast.List) else None
        if elements is not None and not any(isinstance(each, ast.Starred) for each in elements):
            return str(len(elements))
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return str(len(names.value))  # 'xy' is two axes
    return f"len({module.text(names)})"
