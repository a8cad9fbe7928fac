"""JXD302: `jax.make_mesh` without axis types."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_PARAMETERS: tuple[str | None, ...] = ("axis_shapes", "axis_names", "axis_types")


@Rule(
    "JXD302",
    what="`jax.make_mesh` without `axis_types`.",
    why="The default changed from Auto to Explicit in jax 0.9.0: a `shard_map` whose `in_specs` "
    "differ from the sharding of its argument raises a ValueError (jax 0.10.2), where it "
    "resharded before. The fix is unsafe: newer code may mean Explicit.",
    instead="mesh = jax.make_mesh((8,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))",
    triggers=(b"make_mesh",),
)
def make_mesh_explicit(module: Module) -> Findings:
    for call in module.calls("jax.make_mesh"):
        arguments = dict(zip(_PARAMETERS, call.args, strict=False))
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        if None in arguments or any(isinstance(argument, ast.Starred) for argument in call.args):
            continue
        if "axis_types" not in arguments:
            names, shape = arguments.get("axis_names"), arguments.get("axis_shapes")
            fix = _fix(module, call, names, shape) if names and shape else None
            message = "make_mesh without axis_types is Explicit since jax 0.9.0"
            yield Found(call, message, fix, needs=(0, 5, 0))


def _fix(module: Module, call: ast.Call, names: ast.expr, shape: ast.expr) -> Fix | None:
    """Return the fix that adds `axis_types=(AxisType.Auto,) * n` to a call of make_mesh."""
    outer = module.parent(call)
    if isinstance(outer, ast.Call) and module.qualified_name(outer.func) == "jax.set_mesh":
        return None  # code that sets the mesh may well mean Explicit
    end = max(module.span(argument)[1] for argument in (*call.args, *call.keywords))
    count = _count(module, names, shape)
    times = "" if count == "1" else f" * {count}"
    auto, imports = module.name_for("jax.sharding.AxisType", call)
    edit = Edit(end, end, f", axis_types=({auto}.Auto,){times}")
    return Fix("spell out Auto axes", Safety.UNSAFE, (edit,), imports)


def _count(module: Module, names: ast.expr, shape: ast.expr) -> str:
    """Return the code of the number of axes: "2", or "len(names)"."""
    for literal in (names, shape):
        items = literal.elts if isinstance(literal, ast.Tuple | ast.List) else None
        if items is not None and not any(isinstance(item, ast.Starred) for item in items):
            return str(len(items))
    return f"len({module.text(names)})"
