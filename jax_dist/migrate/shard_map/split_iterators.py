"""Iterators of batches that a file splits for pmap, such as `map(shard, dataset)`."""

import ast
from typing import Any, NamedTuple

from jax_dist.lint.model import functions, pmaps, scopes, stacking
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import Kind
from jax_dist.migrate.shard_map import flow, mappings


class SplitIterators(NamedTuple):
    """The iterators whose batches one def of the file splits by the number of devices."""

    split: ast.expr  # what the def returns for each array, such as `x.reshape((n, -1))`
    operand: ast.expr  # its `x`
    prefetches: list[ast.Call]  # `prefetch_to_device(it, 2)`
    batches: list[ast.expr]  # `next(it)`, and the target `batch` of `for batch in it`


def find_split_iterators(module: Module) -> list[SplitIterators]:
    """Return the iterators `map(split, dataset)` of each def `split` whose batches are all seen."""
    # From `map`, they are followed through the names, parameters and results that hold them.
    iterators: list[SplitIterators] = []
    for function in module.nodes(ast.FunctionDef):
        split = _find_split(module, function)
        reads = functions.reads(module, function) if split is not None else None
        calls: list[Any] = [module.parent(read) for read in reads or ()]
        if split is not None and {_callee(module, call) for call in calls} == {"map"}:
            new = SplitIterators(*split, [], [])
            iterators += [new] if _find_batches(module, calls, new) else []
    return iterators


def _find_split(module: Module, function: scopes.Function) -> tuple[ast.expr, ast.expr] | None:
    """Return `x.reshape((n, -1))`, and `x`, of a def that returns it for the arrays of a batch."""
    # Also of one that returns `tree.map(f, batch)`, for a def `f` that is used only there.
    match flow.results_of(function):
        case [ast.Call(args=[ast.Name() as leaf, _]) as result] if (
            module.qualified_name(result.func) in stacking.TREE_MAPS
        ):
            inner = pmaps.definition(module, leaf)
            is_used_once = inner is not None and len(functions.reads(module, inner) or ()) == 1
            return _find_split(module, inner) if inner is not None and is_used_once else None
        case [result]:
            change = stacking.read_stacking(module, result)
            if change is not None and change.kind is Kind.SPLIT and change.splits_rows:
                return result, change.operand
    return None


def _find_batches(module: Module, handles: list[ast.expr], iterators: SplitIterators) -> bool:
    """Add the prefetches and batches of iterators that calls make; False if not all are seen."""
    # `handles` are these calls, to which this adds all expressions with one of the iterators.
    for handle in handles:
        outer: Any = module.parent(handle)
        name = _callee(module, outer)
        if name == stacking.PREFETCH:
            iterators.prefetches.append(outer)
            handles.append(outer)
        elif name == "next":
            iterators.batches.append(outer)
        elif (target := _loop_target(module, outer, handle)) is not None:
            iterators.batches.append(target)
        elif (reads := mappings.find_reads(module, handle)) is not None:
            handles += [read for read in reads if read not in handles]
        else:
            return False
    return bool(iterators.batches) and _are_only_these(module, handles)


def _are_only_these(module: Module, handles: list[ast.expr]) -> bool:
    """Return whether what reads or returns these values can have no other value."""
    values: set[Any] = {*handles}
    for handle in handles:
        if isinstance(module.parent(handle), ast.Return):
            values.update(flow.find_calls_returning(module, handle)[0])
            function: Any = module.function(handle)
            if not values.issuperset(flow.results_of(function)):
                return False
    names = [handle for handle in handles if isinstance(handle, ast.Name)]
    bindings = [binding for name in names for binding in module.reaching(name) or ()]
    return all(binding.kind == "parameter" or binding.value in values for binding in bindings)


def _loop_target(module: Module, outer: Any, handle: ast.expr) -> ast.Name | None:
    """Return `x` of `for x in it`, or of `for i, x in enumerate(it)` or `zip(_, it)`; else None."""
    loop, path = outer, ()
    if (name := _callee(module, outer)) in ("enumerate", "zip"):
        loop, path = module.parent(outer), (outer.args.index(handle) + (name == "enumerate"),)
    target = loop.target if isinstance(loop, ast.For) else None
    target = functions.part_of(target, path) if target and path else target
    return target if isinstance(target, ast.Name) else None


def _callee(module: Module, node: Any) -> str | None:
    """Return the name of the function that a call calls, such as "zip"; None for other nodes."""
    if not isinstance(node, ast.Call):
        return None
    return module.builtin(node.func) or module.qualified_name(node.func)
