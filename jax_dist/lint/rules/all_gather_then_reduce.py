"""JXD301: an `all_gather` whose result is only reduced."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety

_REDUCTIONS = {"mean": "pmean", "sum": "psum", "max": "pmax", "min": "pmin"}


@Rule(
    "JXD301",
    what="`jax.lax.all_gather(x, axis)` whose result is only reduced, over its new leading "
    "dimension, by mean, sum, max or min.",
    why="Every device receives and keeps the blocks of all others, only to add them up: 2 MiB "
    "of temporary memory on each where the reduction needs none (f32[1,256,256] blocks, 8 "
    "simulated devices, jax 0.10.2). The fix is unsafe: the last digits may change.",
    instead="mean = jax.lax.pmean(x, 'i')",
    triggers=(b"all_gather",),
)
def all_gather_then_reduce(module: Module) -> Findings:
    for gather in module.calls("jax.lax.all_gather"):
        # Only of `all_gather(x, axis_name)` do the blocks stand along a new dimension 0.
        is_starred = any(isinstance(argument, ast.Starred) for argument in gather.args)
        names = [keyword.arg for keyword in gather.keywords]
        has_two = len(gather.args) + len(names) == 2
        if is_starred or not has_two or not {"x", "axis_name"}.issuperset(names):
            continue
        reduction = _reduction(module, gather)
        if reduction is not None:
            call, name = reduction
            message = f"all_gather, then {name} over the gathered dimension, is {_REDUCTIONS[name]}"
            yield Found(call, message, _fix(module, gather, call, name))


def _reduction(module: Module, gather: ast.Call) -> tuple[ast.Call, str] | None:
    """Return `(call, "mean")` of `gather(...).mean(0)` and of `jnp.mean(gather(...), axis=0)`.

    None if there is no such reduction around the gather, or it has other arguments.
    """
    parent = module.parent(gather)
    if isinstance(parent, ast.Attribute):
        call, name = module.call_of(parent), parent.attr
        axes = call.args if call else []
    elif isinstance(parent, ast.Call) and parent.args[:1] == [gather]:
        call, axes = parent, parent.args[1:]
        library, _, name = (module.qualified_name(call.func) or "").rpartition(".")
        name = name if library == "jax.numpy" else ""
    else:
        return None
    if call is None or name not in _REDUCTIONS:
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "axis"]
    axes = [ast.unparse(axis) for axis in (*axes, *named)]
    return (call, name) if axes == ["0"] and len(named) == len(call.keywords) else None


def _fix(module: Module, gather: ast.Call, call: ast.Call, name: str) -> Fix | None:
    """Return the fix that makes the gather a psum or the like, without the reduction around it.

    None if parentheses are in the way.
    """
    reduction = f"jax.lax.{_REDUCTIONS[name]}"
    reduced, imports = module.name_for(reduction, call)
    (start, end), (inner_start, inner_end) = module.span(call), module.span(gather)
    is_method = isinstance(call.func, ast.Attribute) and call.func.value is gather
    if is_method and inner_start > start:
        return None  # a parenthesis around the gather
    edits = [Edit(*module.span(gather.func), reduced), Edit(inner_end, end, "")]
    if inner_start > start:
        edits.append(Edit(start, inner_start, ""))
    return Fix(f"use {reduction}", Safety.UNSAFE, tuple(sorted(edits)), imports)
