"""What stands in the place of removed calls and attributes that have no namesake: shown only."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from jax_dist.checker import nodes
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.registry import Found

_UPDATES = {
    "jax.ops.index_update": "set",
    "jax.ops.index_add": "add",
    "jax.ops.index_mul": "multiply",
    "jax.ops.index_min": "min",
    "jax.ops.index_max": "max",
}
_BUFFERS = {
    "device_buffer": "{}.addressable_data(0)",
    "device_buffers": "[shard.data for shard in {}.addressable_shards]",
}
_BUFFER = re.compile(rb"\.device_buffer")
_SIMPLE = ast.Name | ast.Attribute | ast.Call | ast.Subscript


def sketched(module: Module, found: Found) -> Found:
    """The finding of `jax.ops.index_update` and its like with `x.at[index].set(y)` as its fix."""
    call = module.parent(found.node)
    if found.fix is not None or not isinstance(call, ast.Call) or call.func is not found.node:
        return found
    method = _UPDATES.get(module.qualified_name(found.node) or "")
    if method is None or len(call.args) != 3 or call.keywords:
        return found
    array, index, value = call.args
    text = module.text(array) if isinstance(array, _SIMPLE) else f"({module.text(array)})"
    text += f".at[{_index(module, index)}].{method}({module.text(value)})"
    fix = Fix(f"use .at[...].{method}", Safety.DISPLAY, (Edit(*module.span(call), text),))
    return dataclasses.replace(found, fix=fix)


def _index(module: Module, index: ast.expr) -> str:
    """`jax.ops.index[a, b]` was a way to write `a, b` with slices."""
    is_index = isinstance(index, ast.Subscript)
    if is_index and module.qualified_name(index.value) == "jax.ops.index":
        return module.text(index.slice)
    return module.text(index)


def buffers(module: Module) -> Iterator[Found]:
    """`.device_buffer` and `.device_buffers`, which no other library's arrays have."""
    for node in nodes.of_kind(module, ast.Attribute, _BUFFER):
        if node.attr in _BUFFERS:
            text = _BUFFERS[node.attr].format(module.text(node.value))
            fix = Fix(f"use {text}", Safety.DISPLAY, (Edit(*module.span(node), text),))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}", fix)
