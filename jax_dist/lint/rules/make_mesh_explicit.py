"""JXD302: `jax.make_mesh` without axis types."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule

_FIRST = ("axis_shapes", "axis_sizes")


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
    triggers=(b"*make_mesh*",),
    needs=(0, 5, 0),
)
def make_mesh_explicit(module: Module) -> Iterator[Found]:
    for call in module.calls("jax.make_mesh"):
        keywords = {keyword.arg: keyword for keyword in call.keywords}
        if None in keywords or any(isinstance(each, ast.Starred) for each in call.args):
            continue
        first = next((keywords[name] for name in _FIRST if name in keywords), None)
        typed = "axis_types" in keywords or len(call.args) > 2
        if not typed:
            fix = _types_fix(module, call, first)
            yield Found(call, "make_mesh without axis_types is Explicit since jax 0.9.0", fix)
        elif first is not None:
            message = f"make_mesh takes {first.arg} under another name on other versions of jax"
            edit = _by_position(module, call, first)
            fix = Fix("pass it by position", Safety.SAFE, (edit,)) if edit else None
            yield Found(first, message, fix)


def _by_position(module: Module, call: ast.Call, first: ast.keyword) -> Edit | None:
    """Drop the keyword, where the argument comes first anyway."""
    if call.args or call.keywords[0] is not first:
        return None
    return Edit(module.span(first)[0], module.span(first.value)[0], "")


def _types_fix(module: Module, call: ast.Call, first: ast.keyword | None) -> Fix | None:
    names = call.args[1] if len(call.args) > 1 else None
    shape = call.args[0] if call.args else first and first.value
    for keyword in call.keywords:
        if keyword.arg == "axis_names":
            names = keyword.value
    if names is None or shape is None:
        return None
    if module.qualified_name(getattr(module.parent(call), "func", call)) == "jax.set_mesh":
        return None  # code that sets the mesh may well mean Explicit
    count = _count(module, names, shape)
    times = "" if count == "1" else f" * {count}"
    auto, imports = module.name_for("jax.sharding.AxisType", call)
    last = max((*call.args, *call.keywords), key=lambda node: module.span(node))
    end = module.span(last)[1]
    if module.source.code[end : end + 1] == b")" and end + 1 != module.span(call)[1]:
        return None  # in parentheses of its own
    edits = [Edit(end, end, f", axis_types=({auto}.Auto,){times}")]
    dropped = _by_position(module, call, first) if first else None
    if dropped:
        edits.append(dropped)
    return Fix("spell out Auto axes", Safety.UNSAFE, tuple(edits), imports)


def _count(module: Module, names: ast.expr, shape: ast.expr) -> str:
    for literal in (names, shape):
        elements = literal.elts if isinstance(literal, ast.Tuple | ast.List) else None
        if elements is not None and not any(isinstance(each, ast.Starred) for each in elements):
            return str(len(elements))
    if isinstance(names, ast.Constant) and isinstance(names.value, str):
        return str(len(names.value))  # 'xy' is two axes
    return f"len({module.text(names)})"
