"""Which expressions are the number of devices, or a list of them."""

import ast
import re

from jax_dist.checker.modules import Module

_COUNTS = frozenset(("jax.device_count", "jax.local_device_count"))
LISTS = frozenset(("jax.devices", "jax.local_devices"))
# Parameters and settings that say by their name that they count devices.
_COUNT_NAME = re.compile(r"(n|num|number_of)_(local_)?devices?|(local_)?device_count|n_?dev")


def counts_devices(module: Module, node: ast.expr, *, by_name: bool = True) -> bool:
    """Whether an expression is the number of devices.

    Args:
      module: its file.
      node: the expression.
      by_name: whether `num_devices` counts where nothing shows its value.
    """
    return _counts(module, node, frozenset(), by_name=by_name)


def _counts(module: Module, node: ast.expr, seen: frozenset[ast.expr], *, by_name: bool) -> bool:
    if node in seen:
        return False
    seen |= {node}
    if isinstance(node, ast.Call):
        if module.qualified_name(node.func) in _COUNTS:
            return True
        is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1
        return is_len and lists_devices(module, node.args[0], seen)
    if isinstance(node, ast.Name):
        values = module.values(node)
    elif isinstance(node, ast.Attribute):
        values = module.attribute_values(node)
    else:
        return False
    if values:
        return all(_counts(module, value, seen, by_name=by_name) for value in values)
    last = node.id if isinstance(node, ast.Name) else node.attr
    return by_name and _COUNT_NAME.fullmatch(last.lower()) is not None


def lists_devices(module: Module, node: ast.expr, seen: frozenset[ast.expr] = frozenset()) -> bool:
    """Whether an expression is a list of devices."""
    if node in seen:
        return False
    if isinstance(node, ast.Call):
        return module.qualified_name(node.func) in LISTS
    if isinstance(node, ast.Name):
        values = module.values(node) or []
    elif isinstance(node, ast.Attribute):
        values = module.attribute_values(node)
    else:
        return False
    return bool(values) and all(lists_devices(module, each, seen | {node}) for each in values)
