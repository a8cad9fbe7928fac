"""Results of mapped functions: the values of a file with one slice for each device.

A value is followed back through names, unpacked tuples, items and attributes. Each of its possible
origins must be a call of a mapped function, or of Flax's `replicate`; else nothing is known of it.
"""

import ast
import dataclasses
from typing import TypeAlias

from jax_dist.lint.model import functions, pmaps, stacking
from jax_dist.lint.model.functions import Path
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module, once
from jax_dist.primitives import functions_of

_MOST_STEPS = 300  # for one value: in some files everything flows everywhere
_LONGEST_PATH = 8  # `node = node.next` in a loop would make it longer without end

_OF_ANY_ARRAY = {"shape", "dtype", "ndim", "size", "sharding", "aval", "nbytes", "at", "T"}


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """One call that may have made a value."""

    call: ast.Call
    site: Site | None  # what mapped the function; None: it is Flax's `replicate`
    path: Path  # from the result of the call down to the value

    @property
    def is_sliced(self) -> bool:
        """True if every leaf surely has a leading dimension with one slice for each device."""
        if self.site is None:
            return len(self.call.args) + len(self.call.keywords) == 1
        return "out_axes" not in self.site.arguments and not self.site.unknown


_Part: TypeAlias = tuple[ast.expr, Path]  # of `f()[0]["w"]`, the `f()` and (0, "w")


@once
def mapped_calls(module: Module) -> dict[ast.Call, Site]:
    """Return the calls of pmapped functions in this file, each with the pmap that mapped it."""
    sites = pmaps.applications(module)
    return {call: site for site in sites for call in pmaps.mapped_calls(module, site)}


def origins(module: Module, node: ast.expr) -> list[Origin]:
    """Return all calls of mapped functions that may have made a value; [] if not all are known.

    After `params, _ = step(x)`, of `params["w"]` that is the call `step(x)` with the path (0, "w").
    """
    origins: list[Origin] = []
    seen: set[_Part] = set()
    waiting: list[_Part] = [(node, ())]
    while waiting:
        value, path = waiting.pop()
        if (value, path) in seen:
            continue  # a loop, such as `state = step(state)`
        seen.add((value, path))
        if len(seen) > _MOST_STEPS or len(path) > _LONGEST_PATH:
            return []
        if isinstance(value, ast.Call):
            site = mapped_calls(module).get(value)
            if site is None and module.qualified_name(value.func) != stacking.REPLICATE:
                return []
            origins.append(Origin(value, site, path))
            continue
        previous = _go_back(module, value, path)
        if previous is None:
            return []
        waiting += previous
    return origins


def _go_back(module: Module, node: ast.expr, path: Path) -> list[_Part] | None:
    """Return the parts of expressions that the part of a node at `path` may be; None if unknown.

    For `params["w"]` and () it is `params` and ("w",); for `params` and ("w",), after
    `params, _ = f()`, it is `f()` and (0, "w").
    """
    if isinstance(node, ast.Attribute) and node.attr not in _OF_ANY_ARRAY:
        return [(node.value, (f".{node.attr}", *path))]
    if isinstance(node, ast.Subscript):
        key = getattr(node.slice, "value", None)  # of a literal
        return [(node.value, (key, *path))] if isinstance(key, str) else None
    if not isinstance(node, ast.Name):
        return None
    parts: list[_Part] = []
    for binding in module.reaching(node) or ():
        if binding.kind == "assign" and binding.value:
            parts.append((binding.value, path))
            continue
        if not isinstance(binding.node, ast.Name):
            return None  # a parameter, an import
        unpacked = functions.unpack_target(module, binding.node)
        if unpacked is not None:
            value, path_in_value = unpacked
            parts.append((value, (*path_in_value, *path)))
        elif not isinstance(binding.node.ctx, ast.Del):  # `del params` is no value
            return None
    return parts or None


_RETURN_SAME_TREE = (*functions_of("sum", "max", "min", "gather"), "jax.lax.stop_gradient")
_NAMES = """
abs all any arange argmax argmin array asarray clip concatenate cos cumsum dot einsum exp full log
matmul max maximum mean median min minimum ones power prod ravel reshape round sin sqrt square stack
std sum tanh transpose var vdot zeros zeros_like ones_like
"""
_RETURN_ARRAY = frozenset(_NAMES.split())  # of NumPy and jax.numpy


def is_array(module: Module, origin: Origin) -> bool:
    """Return whether a result is surely one array, and no tree of several."""
    function = functions.innermost(module, origin.site.fun) if origin.site else None
    results = functions.returned_values(function) if function else []
    return bool(results) and all(_is_array(module, value, origin.path) for value in results)


def _is_array(module: Module, node: ast.expr, path: Path, depth: int = 0) -> bool:
    """Return whether the part of an expression at `path` is surely one array.

    Of `(jnp.sum(x), state)` the part at (0,) is; of `state` nothing is known.
    """
    value = module.value(node) if isinstance(node, ast.Name) and depth < 8 else None
    if value is not None:
        return _is_array(module, value, path, depth + 1)
    if isinstance(node, ast.Tuple | ast.List | ast.Dict):
        item = functions.part_of(node, path)  # at the first step of the path
        return item is not None and _is_array(module, item, path[1:], depth + 1)
    if path:
        return False
    if isinstance(node, ast.BinOp):  # not if it may be of tuples: `a + b`, `[x] * 2`
        is_of_literal = any(isinstance(n, ast.Tuple | ast.List) for n in (node.left, node.right))
        return not is_of_literal and not isinstance(node.op, ast.Add)
    if isinstance(node, ast.Call) and node.args:
        library, _, last = (module.qualified_name(node.func) or "").rpartition(".")
        if f"{library}.{last}" in _RETURN_SAME_TREE:
            return _is_array(module, node.args[0], (), depth + 1)
        return library in ("jax.numpy", "numpy") and last in _RETURN_ARRAY
    return isinstance(node, ast.Compare | ast.UnaryOp | ast.Constant)
