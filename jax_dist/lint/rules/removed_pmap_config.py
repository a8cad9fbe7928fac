"""JXD104: options of pmap that left jax."""

import ast

from jax_dist.lint.rules import Findings, Fix, Found, Module, Rule, Safety, _renames

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
    fix="safe",
    triggers=tuple(word.encode() for flag in _GONE for word in (flag, flag.upper())),
)
def removed_pmap_config(module: Module) -> Findings:
    # The whole tree: the names are rare, and stand in strings.
    for node in ast.walk(module.tree):
        flag = _flag(module, node)
        if flag is not None and not _renames.is_guarded(module, node):
            yield Found(node, f"{flag} was removed in jax {_GONE[flag]}", _fix(module, node))


def _flag(module: Module, node: ast.AST) -> str | None:
    """Return the flag that an option's name, a variable's name or an attribute of the config is."""
    match node:
        case ast.Attribute(value=owner, attr=flag) if flag in _GONE:
            return flag if module.qualified_name(owner) == "jax.config" else None
        case ast.Constant(value=str() as flag) if flag in _GONE:
            call = module.parent(node)
            name = module.qualified_name(call.func) if isinstance(call, ast.Call) else None
            return flag if name is not None and name.startswith("jax.config.") else None
        case ast.Constant(value=str() as variable) if variable.isupper():
            is_used = isinstance(module.parent(node), ast.Call | ast.Subscript)
            return variable.lower() if variable.lower() in _GONE and is_used else None
    return None


def _fix(module: Module, node: ast.AST) -> Fix | None:
    """Take out the statement that sets the flag, if it does no more."""
    around = module.parent(node)
    match around, module.parent(around):
        case ast.Call(func=owner, args=[_, ast.Constant()], keywords=[]), ast.Expr() as statement:
            pass
        case ast.Subscript(value=owner), ast.Assign(targets=[_], value=ast.Constant()) as statement:
            pass
        case _:
            return None
    if module.qualified_name(owner) not in ("jax.config.update", "os.environ"):
        return None
    return Fix("leave it out", Safety.SAFE, (_renames.removal(module, statement),))
