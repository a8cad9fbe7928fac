"""JXD104: options of pmap that left jax."""

import ast
from collections.abc import Iterator

from jax_dist.lint.model.findings import Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, _renames, rule

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


_TRIGGERS = tuple(word.encode() for flag in _GONE for word in (flag, flag.upper()))


@rule(
    "JXD104",
    "removed-pmap-config",
    what="`jax_pmap_shmap_merge`, `jax_pmap_no_rank_reduction` and other removed options for"
    " pmap and sharding, also as environment variables.",
    why="Setting or reading the option raises `AttributeError: Unrecognized config option` "
    "(jax 0.10.2); the environment variable is silently ignored. pmap is "
    "`jit(shard_map)`, whatever they say.",
    instead="Nothing: leave the statement out.",
    fix="safe",
    triggers=_TRIGGERS,
)
def removed_pmap_config(module: Module) -> Iterator[Found]:
    # The whole tree: the names are rare, and stand in strings.
    for node in ast.walk(module.tree):
        flag = _flag(module, node)
        if flag is None or _renames.is_guarded(module, node):
            continue
        yield Found(node, f"{flag} was removed in jax {_GONE[flag]}", _fix(module, node))


def _flag(module: Module, node: ast.AST) -> str | None:
    """Return the flag that an option's name, a variable's name or an attribute of the config is."""
    if isinstance(node, ast.Attribute):
        about = node.attr in _GONE and module.qualified_name(node.value) == "jax.config"
        return node.attr if about else None
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    around = module.parent(node)
    if node.value in _GONE and isinstance(around, ast.Call):
        name = module.qualified_name(around.func) or ""
        return node.value if name.startswith("jax.config.") else None
    if node.value.isupper() and node.value.lower() in _GONE:
        return node.value.lower() if isinstance(around, ast.Call | ast.Subscript) else None
    return None


def _fix(module: Module, node: ast.AST) -> Fix | None:
    """Take out the statement that sets the flag, if it does no more."""
    match module.parent(node):
        case ast.Call(func=function, args=[ast.Constant(), value], keywords=[]) as call:
            name = module.qualified_name(function)
            sets = name in ("jax.config.update", "os.environ.setdefault", "os.putenv")
            statement = module.parent(call)
            if not (sets and isinstance(statement, ast.Expr)):
                return None
        case ast.Subscript(value=mapping, ctx=ast.Store()) as target:
            statement = module.parent(target)
            if module.qualified_name(mapping) != "os.environ":
                return None
            if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
                return None
            value = statement.value
        case _:
            return None
    if not isinstance(value, ast.Constant):
        return None  # computing it may do something
    return Fix("leave it out", Safety.SAFE, (_renames.removal(module, statement),))
