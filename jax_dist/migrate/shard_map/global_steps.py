"""Steps over global arrays: which mapped functions can be `jax.jit` with shardings alone.

In such a step a `pmean` or `psum` over the mapped axis gives way to its argument, for that is
computed from the whole batch. Only a run can show whether the numbers stay the same.
"""

import ast
import re
from typing import Any, NamedTuple

from jax_dist.lint.model import functions, traced
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import CannotMigrate
from jax_dist.migrate.shard_map.flow import arguments_of
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Pmapped

_REDUCTIONS = ("jax.lax.pmean", "jax.lax.psum")
_REASONS = {
    "axis_index": "the step asks for its device, as for a key of its own",
    "all_gather": "the step gathers from the other devices",
    "ppermute": "the step sends to another device",
    "pmax": "the step takes a maximum over the devices",
    "pmin": "the step takes a minimum over the devices",
}


class AxisUses(NamedTuple):
    """Uses of the mapped axis in a step, all of which it drops as `jax.jit` alone."""

    # Calls that give way to `x`: `pmean(x, axis)`, `psum(x, axis)`, `fold_in(x, axis_index(axis))`.
    operands: dict[ast.Call, ast.expr]
    keywords: list[ast.keyword]  # `axis_name=axis` of other calls


def find_axis_uses(module: Module, mapped: Pmapped, layouts: Layouts, axis: str) -> AxisUses:
    """Return the uses of pmap's axis that a step drops if it becomes `jax.jit` without shard_map.

    `axis` is the code of the axis's name, such as `"batch"` with its quotes. Raises CannotMigrate
    at other uses of it than those in `AxisUses`, and if results differ from device to device.
    """
    step = functions.innermost(module, mapped.site.fun) or mapped.site.fun
    if not isinstance(step, ast.FunctionDef) or not module.holds(step):
        raise CannotMigrate("its function is no def of this file")
    uses = AxisUses(operands={}, keywords=[])
    dropped: set[ast.AST] = set()  # parts of these uses, which go with them
    nodes = nodes_of(module, mapped)
    for node in nodes:  # a call comes before its arguments
        if node in dropped:
            continue
        if isinstance(node, ast.keyword):
            if node.arg == "axis_name" and _name_text(module, node.value) == axis:
                uses.keywords.append(node)
                dropped.add(node.value)
        elif isinstance(node, ast.Call):
            if _makes_device_key(module, node, axis):
                uses.operands[node] = node.args[0]  # the key: one for all devices
                dropped.update(ast.walk(node.args[1]))
            elif arguments := _reduction_arguments(module, node, axis):
                uses.operands[node], axis_node = arguments  # `x` and `axis` of `pmean(x, axis)`
                dropped.update([axis_node, *node.keywords])
    if any(_name_text(module, node) == axis for node in nodes if node not in dropped):
        raise CannotMigrate("the step hands the name of its axis on, as to batch norm")
    results = (layouts.results[mapped, index] for index in range(mapped.result_count))
    if any(layout is not Layout.REPLICATED for layout in results):
        raise CannotMigrate("a result differs from device to device")
    return uses


def _makes_device_key(module: Module, call: ast.Call, axis: str) -> bool:
    """Return whether a call is `fold_in(key, axis_index(axis))`, a random key for each device."""
    match call.args:
        case [_, ast.Call(func=fun, args=[name])]:
            names = module.qualified_name(call.func), module.qualified_name(fun)
            is_folded = names == ("jax.random.fold_in", "jax.lax.axis_index")
            return is_folded and _name_text(module, name) == axis
    return False


def _reduction_arguments(module: Module, call: ast.Call, axis: str) -> list[ast.expr]:
    """Return `[x, axis]` of `pmean(x, axis)` or psum; [] of what is no collective over the axis."""
    # Raises CannotMigrate at other collectives.
    name, arguments = module.qualified_name(call.func) or "", arguments_of(call)
    takes_axis = axis in (_name_text(module, argument) for argument in arguments)
    if not takes_axis or not name.startswith("jax.lax."):
        return []
    if name not in _REDUCTIONS or len(arguments) != 2:
        last = name.rpartition(".")[2]
        raise CannotMigrate(_REASONS.get(last, f"the step uses {last} over its axis"))
    if isinstance(arguments[0], ast.Constant):  # `psum(1, axis)`
        raise CannotMigrate("the step counts its devices")
    return arguments


def nodes_of(module: Module, mapped: Pmapped) -> list[ast.AST]:
    """Return the nodes of a step and of the functions that it calls, without decorators."""
    step = functions.innermost(module, mapped.site.fun)
    parts = [mapped.site.fun] if step is None else traced.reach(module, step)
    decorators = (decorator for part in parts for decorator in getattr(part, "decorator_list", ()))
    outside = {node for decorator in decorators for node in ast.walk(decorator)}
    nodes = dict.fromkeys(node for part in parts for node in ast.walk(part))
    return [node for node in nodes if node not in outside]


def why_it_differs(module: Module, mapped: Pmapped) -> str:
    """Return the likely reason why a step computes other numbers from the whole batch."""
    nodes = [x for x in nodes_of(module, mapped) if isinstance(x, ast.stmt) and module.holds(x)]
    text = "\n".join(map(module.text, nodes))
    cause = ", likely by batch norm" if re.search("batch_stats|BatchNorm|batch_norm", text) else ""
    return f"it gives something else for the whole batch{cause}"


def _name_text(module: Module, node: Any) -> str:
    """Return the text of a name, attribute or constant of the file; "" for other expressions."""
    is_name = isinstance(node, ast.Name | ast.Attribute | ast.Constant)
    return module.text(node) if is_name and module.holds(node) else ""
