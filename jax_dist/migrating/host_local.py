"""Whether a file speaks of several processes in a way that `jit(shard_map)` would not keep.

With several processes jax.pmap takes and gives what one process holds; jit(shard_map) takes and
gives global arrays. Asking for the first process, to print or to save, does not matter; a share of
the data that depends on the process does.
"""

import ast

from jax_dist.checker.modules import Module

_COUNTS = ("jax.process_count", "jax.host_count", "jax.process_index", "jax.host_id")
_PER_PROCESS = (
    "jax.distributed.initialize",
    "jax.experimental.multihost_utils.broadcast_one_to_all",
    "jax.experimental.multihost_utils.global_array_to_host_local_array",
    "jax.experimental.multihost_utils.host_local_array_to_global_array",
    "jax.experimental.multihost_utils.process_allgather",
    "jax.make_array_from_process_local_data",
)
_SAYS = ("log", "info", "warning", "print", "error", "debug")


def evidence(module: Module, at: ast.AST) -> tuple[str, int] | None:
    """What shows it, and its line; None where nothing does.

    Args:
      module: the file.
      at: the place; evidence counts within the outermost function or class around it.
    """
    outermost = _outermost(module, at)
    for node in module.uses(*_COUNTS, *_PER_PROCESS):
        if _outermost(module, node) is outermost and _matters(module, node):
            return module.text(node), node.lineno
    return None


def _outermost(module: Module, node: ast.AST) -> ast.AST:
    found: ast.AST = module.tree
    for around in (node, *module.ancestors(node)):
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = around
    return found


def _matters(module: Module, node: ast.expr) -> bool:
    """Comparisons, tests and messages do not change what the mapped functions get."""
    inner: ast.AST = node
    for around in module.ancestors(node):
        match around:
            case ast.Compare() | ast.FormattedValue() | ast.Assert() | ast.Raise() | ast.UnaryOp():
                return False
            case ast.If(test=test) | ast.IfExp(test=test) if test is inner:
                return False
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if inner is not (
                around.func
            ):
                if any(word in name.lower() for word in _SAYS):
                    return False
            case ast.stmt():
                return True
        inner = around
    return True
