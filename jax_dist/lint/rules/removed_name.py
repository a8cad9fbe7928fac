"""JXD108: other names that left jax, or moved."""

import ast

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _renames
from jax_dist.lint.rules._old_names import NAMES

_may_name_one = _renames.mentions(NAMES)
_OLD_ATTRIBUTES = {
    "device_buffer": "{}.addressable_data(0)",
    "device_buffers": "[shard.data for shard in {}.addressable_shards]",
}
_CLIP_KEYWORDS = {"a_min": "min", "a_max": "max"}
_OPTIONS = {
    "jax_pmap_shmap_merge": "0.10.0",
    "jax_pmap_no_rank_reduction": "0.9.0",
    "jax_eager_pmap": "0.6.0",
}
_WORDS = frozenset(map(str.encode, (*_OLD_ATTRIBUTES, *_CLIP_KEYWORDS, *_OPTIONS)))


@Rule(
    "JXD108",
    what="Names and modules that jax has removed or renamed: `jax.tree_map`, "
    "`jax.lib.xla_bridge`, `jax.experimental.host_callback`, `jax.core.Primitive`, "
    "`jax.random.KeyArray`, `PmapSharding`, `pvary`, `xla_pmap_p` and others; `a_min` and `a_max` "
    "of `jax.numpy.clip`; options such as `jax_pmap_shmap_merge`; `flax.optim`.",
    why="An AttributeError or ImportError; the message names the version. There is no fix for "
    "array types outside annotations: `isinstance(x, jax.Array)` is true of more than before.",
    instead="y = jax.tree.map(lambda x: 2 * x, {'w': 1.0})",
    triggers=lambda words: words.hold(*_WORDS) or _may_name_one(words),
)
def removed_name(module: Module) -> Findings:
    yield from _renames.find_renamed(module, NAMES)
    for node in module.nodes(ast.Attribute):
        if node.attr in _OLD_ATTRIBUTES:  # which no other library's arrays have
            text = _OLD_ATTRIBUTES[node.attr].format(module.text(node.value))
            yield Found(node, f".{node.attr} was removed in jax 0.4.27: use {text}")
    for call in module.calls("jax.numpy.clip"):
        for keyword in call.keywords:
            new = _CLIP_KEYWORDS.get(keyword.arg or "")
            if new is not None and not _renames.is_guarded(module, keyword):
                start = module.span(keyword)[0]
                edit = Edit(start, start + len(keyword.arg or ""), new)
                message = f"jax.numpy.clip has no {keyword.arg} any more: it is {new}"
                yield Found(keyword, message, Fix(f"use {new}", Safety.SAFE, (edit,)), (0, 4, 27))
    for call in module.calls("jax.config.update"):
        option = getattr(call.args[0], "value", None) if call.args else None
        if option in _OPTIONS and not _renames.is_guarded(module, call):
            yield Found(call.args[0], f"{option} was removed in jax {_OPTIONS[option]}")
