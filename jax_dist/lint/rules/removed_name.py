"""JXD108: other names that left jax, or moved."""

import ast
import dataclasses

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, Words, _renames
from jax_dist.lint.rules._old_names import NAMES

_may_name_one = _renames.mentions(NAMES)
_BUFFERS = {
    "device_buffer": "{}.addressable_data(0)",
    "device_buffers": "[shard.data for shard in {}.addressable_shards]",
}
_BOUNDS = {"a_min": "min", "a_max": "max"}
_UPDATES = {
    "jax.ops.index_update": "set",
    "jax.ops.index_add": "add",
    "jax.ops.index_mul": "multiply",
    "jax.ops.index_min": "min",
    "jax.ops.index_max": "max",
}
_SIMPLE = ast.Name | ast.Attribute | ast.Call | ast.Subscript


def _may_match(words: Words) -> bool:
    others = (b"device_buffer", b"device_buffers", b"a_min", b"a_max")
    return any(map(words.hold, others)) or _may_name_one(words)


@Rule(
    "JXD108",
    "removed-name",
    what="Names and modules that jax has removed or renamed: `jax.tree_map`, "
    "`jax.lib.xla_bridge`, `jax.experimental.host_callback`, `jax.core.Primitive`, "
    "`jax.random.KeyArray`, `xla_pmap_p` and others; `a_min` and `a_max` of `jax.numpy.clip`; "
    "`flax.optim`.",
    why="An AttributeError or ImportError; the message names the version. The fix is unsafe for "
    "array types outside annotations, since `isinstance(x, jax.Array)` is true of more than "
    "before.",
    instead="y = jax.tree.map(lambda x: 2 * x, {'w': 1.0})",
    fix="safe",
    triggers=_may_match,
)
def removed_name(module: Module) -> Findings:
    for found in _renames.renamed(module, NAMES):
        yield _sketched(module, found)
    for node in module.nodes(ast.Attribute):
        if node.attr in _BUFFERS:  # which no other library's arrays have
            text = _BUFFERS[node.attr].format(module.text(node.value))
            fix = Fix(f"use {text}", Safety.DISPLAY, (Edit(*module.span(node), text),))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}", fix)
    for call in module.calls("jax.numpy.clip"):
        for keyword in call.keywords:
            new = _BOUNDS.get(keyword.arg or "")
            if new is not None and not _renames.is_guarded(module, keyword):
                start = module.span(keyword)[0]
                edit = Edit(start, start + len("a_min"), new)
                message = f"jax.numpy.clip has no {keyword.arg} any more: it is {new}"
                yield Found(keyword, message, Fix(f"use {new}", Safety.SAFE, (edit,)), (0, 4, 27))


def _sketched(module: Module, found: Found) -> Found:
    """Return the finding of `jax.ops.index_update` with `x.at[index].set(y)` as its fix."""
    call = module.call_of(found.node)
    if found.fix is not None or call is None or len(call.args) != 3 or call.keywords:
        return found
    method = _UPDATES.get(module.qualified_name(found.node) or "")
    if method is None:
        return found
    array, index, value = call.args
    if isinstance(index, ast.Subscript) and module.qualified_name(index.value) == "jax.ops.index":
        index = index.slice  # `jax.ops.index[a, b]` was a way to write `a, b` with slices
    text = module.text(array) if isinstance(array, _SIMPLE) else f"({module.text(array)})"
    text += f".at[{module.text(index)}].{method}({module.text(value)})"
    fix = Fix(f"use .at[...].{method}", Safety.DISPLAY, (Edit(*module.span(call), text),))
    return dataclasses.replace(found, fix=fix)
