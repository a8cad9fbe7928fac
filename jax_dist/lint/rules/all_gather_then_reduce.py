"""JXD301: an `all_gather` whose result is only reduced."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_REDUCTIONS = {"mean": "pmean", "sum": "psum", "max": "pmax", "min": "pmin"}
_DEFAULTS = {"axis": "0", "tiled": "False", "axis_index_groups": "None"}


@Rule(
    "JXD301",
    "all-gather-then-reduce",
    what="`jax.lax.all_gather(x, axis)` whose result is only reduced, over its new leading "
    "dimension or over all dimensions, by mean, sum, max or min.",
    why="Every device receives and keeps the blocks of all others, only to add them up: 2 MiB "
    "of temporary memory on each where the reduction needs none (f32[1,256,256] blocks, 8 "
    "simulated devices, jax 0.10.2). The fix is unsafe: the last digits may change.",
    instead="mean = jax.lax.pmean(x, 'i')",
    fix="unsafe",
    triggers=(b"*all_gather",),
)
def all_gather_then_reduce(module: Module) -> Findings:
    for gather in module.calls("jax.lax.all_gather"):
        if not _stacks_in_front(module, gather):
            continue
        value = _only_read(module, gather)
        reduction = _reduction(module, value)
        if reduction is None:
            continue
        call, name, over_all = reduction
        over = "all dimensions" if over_all else "the gathered dimension"
        message = f"all_gather, then {name} over {over}, is {_REDUCTIONS[name]}"
        if over_all:
            message += f" before {name}"
        fix = _fix(module, gather, call, name, over_all=over_all) if value is gather else None
        yield Found(call, message, fix)


def _stacks_in_front(module: Module, gather: ast.Call) -> bool:
    """Return whether one block of each device stands along a new dimension 0."""
    if len(gather.args) > 2 or any(isinstance(each, ast.Starred) for each in gather.args):
        return False
    options = (each for each in gather.keywords if each.arg not in ("x", "axis_name"))
    return all(module.text(each.value) == _DEFAULTS.get(each.arg or "") for each in options)


def _only_read(module: Module, gather: ast.Call) -> ast.expr:
    """Return the gather itself, or the one read of the one name that it is given."""
    match around := module.parent(gather):
        case ast.Assign(targets=[ast.Name(id=name)]):
            reads = module.reads(module.scope(around), name)
            if len(reads) == 1 and module.values(reads[0]) == [gather]:
                return reads[0]
    return gather


def _reduction(module: Module, value: ast.expr) -> tuple[ast.Call, str, bool] | None:
    """Return `(call, "mean", over all dimensions)` where a value is reduced and no more."""
    match module.parent(value):
        case ast.Attribute(attr=name) as around:
            call = module.call_of(around)
            axes = call.args if call else []
        case ast.Call(args=[first, *axes]) as call if first is value:
            root, _, name = (module.qualified_name(call.func) or "").rpartition(".")
            name = name if root == "jax.numpy" else ""
        case _:
            return None
    if call is None or name not in _REDUCTIONS:
        return None
    keywords = [keyword.value for keyword in call.keywords if keyword.arg == "axis"]
    axes = [*axes, *keywords]
    if len(keywords) != len(call.keywords) or len(axes) > 1:
        return None
    if axes and ast.unparse(axes[0]) != "0":
        return None
    return call, name, not axes


def _fix(
    module: Module, gather: ast.Call, call: ast.Call, name: str, *, over_all: bool
) -> Fix | None:
    """Rename the gather, and take away what stands around it; a reduction over all stays."""
    if len(gather.args) + len(gather.keywords) != 2:
        return None
    reduction = f"jax.lax.{_REDUCTIONS[name]}"
    reduced, imports = module.name_for(reduction, call)
    edits = [Edit(*module.span(gather.func), reduced)]
    if not over_all:
        (start, end), (inner_start, inner_end) = module.span(call), module.span(gather)
        is_method = isinstance(call.func, ast.Attribute) and call.func.value is gather
        if is_method and inner_start > start:
            return None  # a parenthesis around the gather
        edits.append(Edit(inner_end, end, ""))
        if inner_start > start:
            edits.append(Edit(start, inner_start, ""))
    return Fix(f"use {reduction}", Safety.UNSAFE, tuple(sorted(edits)), imports)
