"""JXD104: options of pmap that left jax."""

import ast

from jax_dist.lint.rules import Findings, Found, Module, Rule, _renames

_GONE = {
    "jax_pmap_shmap_merge": "0.10.0",
    "jax_pmap_no_rank_reduction": "0.9.0",
    "jax_eager_pmap": "0.6.0",
    "jax_collectives_common_channel_id": "0.9.0",
    "jax_cpu_enable_gloo_collectives": "0.8.0",
    "jax_jit_pjit_api_merge": "0.4.14",
    "jax_parallel_functions_output_gda": "0.4.7",
    "experimental_xmap_spmd_lowering": "0.4.31",
}


@Rule(
    "JXD104",
    "removed-pmap-config",
    what="`jax_pmap_shmap_merge`, `jax_pmap_no_rank_reduction` and other removed options for "
    "pmap and sharding, also as environment variables.",
    why="The option raises `AttributeError: Unrecognized config option` (jax 0.10.2), and the "
    "environment variable is silently ignored.",
    instead="Nothing: leave the statement out.",
    triggers=tuple(word.encode() for flag in _GONE for word in (flag, flag.upper())),
)
def removed_pmap_config(module: Module) -> Findings:
    # The whole tree: the names are rare, and stand in strings.
    for node in ast.walk(module.tree):
        word = node.value if isinstance(node, ast.Constant) else None
        if not (isinstance(word, str) and word.lower() in _GONE):
            continue
        flag, around = word.lower(), module.parent(node)
        name = module.qualified_name(around.func) if isinstance(around, ast.Call) else None
        is_option = word == flag and (name or "").startswith("jax.config.")
        is_variable = word.isupper() and isinstance(around, ast.Call | ast.Subscript)
        if (is_option or is_variable) and not _renames.is_guarded(module, node):
            yield Found(node, f"{flag} was removed in jax {_GONE[flag]}")
