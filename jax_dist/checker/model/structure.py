"""Whether a value is a tree or an array: what `x[0]` means depends on it."""

import ast
from typing import Any, TypeAlias

from jax_dist.checker.model import functions, pmaps, scopes
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module

# Down into a tree: a place in a tuple, a key of a dict, ".name" of an attribute.
Path: TypeAlias = tuple[int | str, ...]


def result_is_tree(module: Module, site: Site, path: Path) -> bool | None:
    """Whether what a mapped function returns is a tuple or dict there; None: not known."""
    function = mapped_function(module, site)
    is_seen = function is not None and is_plain(module, function)
    results = functions.returned(function) if function is not None and is_seen else None
    if not results:
        return None
    told = {_is_tree(module, result, path, 0) for result in results}
    return told.pop() if len(told) == 1 else None


def mapped_function(module: Module, site: Site) -> scopes.Function | None:
    """The def or lambda that a site maps, seen through `partial`, `vmap` and `jit` around it."""
    return None if site.fun is None else innermost(module, site.fun)


def is_array(module: Module, node: ast.expr) -> bool:
    """Whether an expression surely is one array or number, by the calls that make it."""
    return _is_tree(module, node, (), 0) is False


def innermost(module: Module, fun: Any) -> scopes.Function | None:
    """The def or lambda behind `vmap(partial(f, ...))`, names for it on the way included."""
    for _ in range(8):
        if isinstance(fun, ast.Name):
            values = module.values(fun)
            if values and len(values) == 1 and isinstance(values[0], ast.Call):
                fun = values[0]
        if not (isinstance(fun, ast.Call) and fun.args):
            break
        if module.qualified_name(fun.func) not in _TRANSPARENT:
            return None
        fun = fun.args[0]
    return pmaps.definition(module, fun)


def is_plain(module: Module, function: scopes.Function) -> bool:
    """Whether no decorator changes what a function returns."""
    if isinstance(function, ast.Lambda):
        return True
    return all(_keeps_results(module, each) for each in function.decorator_list)


def _keeps_results(module: Module, decorator: ast.expr) -> bool:
    name = module.qualified_name(decorator)
    if name is None and isinstance(decorator, ast.Call):
        name = module.qualified_name(decorator.func)
        if name in PARTIAL and decorator.args:
            name = module.qualified_name(decorator.args[0])
    return name in _TRANSPARENT or name in pmaps.PMAP or name in _KEEP_RESULTS


_TRANSPARENT = frozenset(("functools.partial", "jax.vmap", "jax.jit", "jax.checkpoint"))
_KEEP_RESULTS = ("jax.remat", "jax.named_call", "functools.wraps", "functools.lru_cache")
_KEEP_RESULTS += ("staticmethod", "chex.assert_max_traces")
# What starts with one of these returns one array.
_ARRAYS = ("jax.numpy.", "jax.lax.", "jax.nn.", "numpy.")
_KEEP_TREES = ("jax.lax.pmean", "jax.lax.psum", "jax.lax.pmax", "jax.lax.pmin")
_KEEP_TREES += ("jax.lax.all_gather", "jax.lax.stop_gradient")
_GIVE_TREES = ("jax.lax.scan", "jax.lax.while_loop", "jax.lax.fori_loop", "jax.lax.cond")
_GIVE_TREES += ("jax.lax.switch", "jax.lax.map", "jax.lax.top_k", "jax.numpy.meshgrid")
# Some of the others give tuples too, or the tree that they are given.
_MAY_GIVE_TREES = frozenset(
    [
        "array_split",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "average",
        "broadcast_arrays",
        "divmod",
        "dsplit",
        "eig",
        "eigh",
        "frexp",
        "gradient",
        "histogram",
        "histogram2d",
        "histogramdd",
        "hsplit",
        "indices",
        "ix_",
        "lstsq",
        "modf",
        "nonzero",
        "polydiv",
        "polyfit",
        "qr",
        "slogdet",
        "split",
        "svd",
        "unique",
        "unique_all",
        "unique_counts",
        "unique_inverse",
        "unstack",
        "vsplit",
        "where",
        "all_to_all",
        "approx_max_k",
        "approx_min_k",
        "associative_scan",
        "custom_linear_solve",
        "custom_root",
        "lu",
        "optimization_barrier",
        "pcast",
        "ppermute",
        "pshuffle",
        "psum_scatter",
        "pswapaxes",
        "pvary",
        "reduce",
        "schur",
        "sort",
        "sort_key_val",
        "load",
        "copy",
    ]
)


def _is_tree(module: Module, node: ast.expr, path: Path, depth: int) -> bool | None:
    if isinstance(node, ast.Tuple | ast.List | ast.Dict):
        if not path:
            return True
        part = part_of(node, path)
        return None if part is None else _is_tree(module, part, path[1:], depth)
    if isinstance(node, ast.Name) and depth < 8:
        values = module.values(node)
        if values and len(values) == 1:
            return _is_tree(module, values[0], path, depth + 1)
    if path:
        return None
    if isinstance(node, ast.BinOp) and any(
        isinstance(side, ast.Tuple | ast.List) for side in (node.left, node.right)
    ):
        return True  # `[x] * 2`
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # of tuples too
        sides = {_is_tree(module, side, path, depth + 1) for side in (node.left, node.right)}
        return True if True in sides else (False if False in sides else None)
    if isinstance(node, ast.BinOp | ast.Compare | ast.UnaryOp):
        return False
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, ast.Call):
        name = module.qualified_name(node.func) or ""
        if name in _KEEP_TREES and node.args:
            return _is_tree(module, node.args[0], path, depth + 1)
        is_array = name.startswith(_ARRAYS) and name not in _GIVE_TREES
        return False if is_array and name.rpartition(".")[2] not in _MAY_GIVE_TREES else None
    return None


def part_of(node: ast.AST, path: Path) -> ast.expr | None:
    """The first step of a path into a literal."""
    if not path:
        return None
    step = path[0]
    if isinstance(node, ast.Tuple | ast.List) and isinstance(step, int):
        if any(isinstance(each, ast.Starred) for each in node.elts):
            return None
        return node.elts[step] if -len(node.elts) <= step < len(node.elts) else None
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == step:
                return value
    return None
