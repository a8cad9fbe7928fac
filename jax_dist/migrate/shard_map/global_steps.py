"""Steps over global arrays: which mapped functions can be `jax.jit` with shardings alone.

In such a step a `pmean` or `psum` over the mapped axis gives way to its argument, for that is
computed from the whole batch. Only a run can show whether the numbers stay the same.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from jax_dist.lint.model import functions, traced
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import Left
from jax_dist.migrate.shard_map.layouts import Layout, Layouts
from jax_dist.migrate.shard_map.mappings import Mapped

_REDUCTIONS = ("jax.lax.pmean", "jax.lax.psum")
_REASONS = {
    "axis_index": "the step asks for its device, as for a key of its own",
    "all_gather": "the step gathers from the other devices",
    "ppermute": "the step sends to another device",
    "pmax": "the step takes a maximum over the devices",
    "pmin": "the step takes a minimum over the devices",
}


def reductions(
    module: Module, mapped: Mapped, layouts: Layouts, axis: str, keys: Sequence[str]
) -> list[tuple[ast.Call, ast.expr]]:
    """Return the calls of pmean and psum that a jitted step drops, each with its operand.

    Raises Left if the step needs shard_map. `axis` is the code of the axis's name, such as
    `"batch"` with its quotes; `keys` are the parameters that get a key for each device.
    """
    if keys:
        raise Left("keys per device")
    step = functions.innermost(module, mapped.site.fun) or mapped.site.fun
    if not isinstance(step, ast.FunctionDef) or not module.holds(step):
        raise Left("its function is no def of this file")
    nodes = nodes_of(module, mapped)
    edits = [edit for node in nodes for edit in _reduction(module, node, axis)]
    # Of each reduction, all that is not its array names the axis, and goes with it.
    axes = {
        operand
        for call, array in edits
        for operand in (*call.args, *(word.value for word in call.keywords))
        if operand is not array
    }
    if any(_text(module, node) == axis for node in nodes if node not in axes):
        raise Left("the step hands the name of its axis on, as to batch norm")
    if any(layouts.results[mapped, i] is not Layout.WHOLE for i in range(mapped.results or 1)):
        raise Left("a result differs from device to device")
    return edits


def nodes_of(module: Module, mapped: Mapped) -> list[ast.AST]:
    """Return the nodes of a step and of the functions that it names, without decorators."""
    step = functions.innermost(module, mapped.site.fun)
    parts = [mapped.site.fun] if step is None else traced.reach(module, step)
    decorators = (decorator for part in parts for decorator in getattr(part, "decorator_list", ()))
    outside = {node for decorator in decorators for node in ast.walk(decorator)}
    nodes = dict.fromkeys(node for part in parts for node in ast.walk(part))
    return [node for node in nodes if node not in outside]


def why_it_differs(module: Module, mapped: Mapped) -> str:
    """Return the likely reason why a step computes other numbers from the whole batch."""
    nodes = [node for node in nodes_of(module, mapped) if module.holds(node)]
    text = "\n".join(module.text(node) for node in nodes if isinstance(node, ast.stmt))
    if re.search(r"\b(batch_stats|BatchNorm|batch_norm)\b", text):
        return "batch norm sees the whole batch"
    names = (module.qualified_name(node) for node in nodes if isinstance(node, ast.Attribute))
    if re.search(r"\brngs\b", text) or any(name and "jax.random." in name for name in names):
        return "its random numbers are drawn for the whole batch"
    return "it gives something else for the whole batch"


def _reduction(module: Module, node: ast.AST, axis: str) -> list[tuple[ast.Call, ast.expr]]:
    """Return `[(node, x)]` of `pmean(x, axis)` or `psum(x, axis)`; raise Left at `pmax`, ..."""
    if not isinstance(node, ast.Call):
        return []
    name = module.qualified_name(node.func) or ""
    operands = [*node.args, *(word.value for word in node.keywords)]
    if not name.startswith("jax.lax.") or axis not in (
        _text(module, operand) for operand in operands
    ):
        return []
    if name not in _REDUCTIONS or len(operands) != 2:
        last = name.rpartition(".")[2]
        raise Left(_REASONS.get(last, f"the step uses {last} over its axis"))
    if isinstance(operands[0], ast.Constant):
        raise Left("the step counts its devices")
    return [(node, operands[0])]


def _text(module: Module, node: Any) -> str:
    """Return the text of a name, field or constant of the file; "" for all else."""
    is_name = isinstance(node, ast.Name | ast.Attribute | ast.Constant)
    return module.text(node) if is_name and module.holds(node) else ""
