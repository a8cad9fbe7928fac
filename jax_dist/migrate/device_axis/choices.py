"""Where a value is one of several that differ, chosen by what only the run knows.

A run shows which one it was. In another run it may be another one, that has another form.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

from jax_dist.lint.model import pmaps
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.device_axis import flow_uses
from jax_dist.migrate.recorded_flow import FileFlow, variable
from jax_dist.migrate.results import Left

# What these hand on, they hand on in each run.
_LIBRARIES = frozenset(("jax", "flax", "haiku", "numpy", "optax", "chex", "itertools", "copy"))
# Of these, those that hand on their argument only where there is no file to read.
_READING = re.compile(r"(^|_)(restore|loads?|read|from_bytes)(_|$)")


def check(flow: FileFlow, node: ast.expr, serials: set[int]) -> None:
    """Raises Left where an expression takes, by a value of the run, one of several that differ."""
    match node:
        case ast.Subscript(value=whole, slice=index) if not isinstance(index, ast.Constant):
            found = flow.serials(whole)
            is_other = bool(found) and _has_others(flow, serials, whole)
        case ast.Call(func=ast.Name(id="getattr"), args=[_, name, *_]):
            is_other = not isinstance(name, ast.Constant)
        case _:
            is_other = False
    if is_other or _is_chosen(flow, node, serials):
        text = " ".join(flow.module.text(node).split())
        raise Left(f"in another run, {text} of line {node.lineno} may be another value")


# What these give of a container depends on the run, but for the entry of a name that is written.
_TAKING = frozenset(("get", "pop", "popitem", "popleft", "setdefault", "items", "values"))


def check_elements(flow: FileFlow, node: ast.expr, serials: set[int]) -> None:
    """Raises Left where parts of a container are taken as the run says, and no array was in them.

    In another run one may be: `metrics[name]`, `for name, value in metrics.items()`.
    """
    module, around = flow.module, flow.module.parent(node)
    if flow.is_array(node):
        return
    taken: ast.expr | None = None
    match around:
        case ast.Subscript(value=value, slice=index, ctx=ast.Load()) if value is node:
            taken = None if _is_written(index) else around
        case ast.Attribute(attr=name) if name in _TAKING:
            call = module.call_of(around)
            taken = None if call is None or any(map(_is_written, call.args[:1])) else call
        case ast.For() | ast.comprehension() if around.iter is node and not flow.is_mapping(node):
            _check_targets(flow, around, serials)
    if taken is not None and serials.isdisjoint(flow.serials(taken)):
        text = " ".join(module.text(taken).split())
        raise Left(f"in another run, {text} of line {taken.lineno} may be it")


def _check_targets(flow: FileFlow, loop: ast.For | ast.comprehension, serials: set[int]) -> None:
    """Raises Left where a name of a loop held none of the arrays that are in what it goes through.

    In a tuple, such as that of a name and a value, one of them may be what always holds them.
    """
    module = flow.module
    whole = loop if isinstance(loop, ast.For) else module.parent(loop)
    unlike: ast.expr | None = None
    for target in ast.walk(loop.target):
        found = module.scope(target).lookup(target.id) if isinstance(target, ast.Name) else None
        if found is None or not isinstance(target, ast.Name):
            continue
        reads = [e for e in module.reads(found[0], target.id) if whole in module.ancestors(e)]
        others = [each for each in reads if serials.isdisjoint(flow.serials(each))]
        if reads and not others:
            return
        unlike = next(iter(others), unlike)
        if len(others) < len(reads):
            break
    if unlike is not None:
        text = module.text(unlike)
        raise Left(f"in another run, {text} of line {unlike.lineno} may be it")


def _is_written(index: ast.expr) -> bool:
    """Whether an index or a name is the same in each run, by the text."""
    return not any(isinstance(e, ast.Name | ast.Attribute | ast.Call) for e in ast.walk(index))


def _is_chosen(flow: FileFlow, node: ast.expr, serials: set[int]) -> bool:
    """Whether an expression hands on some of the arrays, and not others that are in it.

    As `saved.get(name, state)` does. What a function of the file does is seen in it, and an entry
    by its name, or of a tuple that is written down, is the same in each run.
    """
    passed, has_others = serials & flow.serials(node), functools.partial(_has_others, flow, serials)
    if not passed or has_others(node) or flow.called_sites(node):
        return False
    match node:
        case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault")) if node.args[1:]:
            return True  # a default is given
        case ast.Call(func=ast.Attribute(attr="copy"), args=[_, *_]):
            return True  # `FrozenDict.copy(others)`
        case ast.Call(func=ast.Name(id="next"), args=[_, _]):
            return True
        case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
            return True
        case ast.Call(keywords=words) if any(word.arg is None for word in words):
            return _is_opaque(flow, node)  # `state.replace(**more)`
        case ast.Subscript(value=ast.List(elts=parts) | ast.Tuple(elts=parts)):
            return any(isinstance(each, ast.Starred) for each in parts)
        case ast.Subscript(value=whole, slice=ast.Constant()):
            return _is_opaque(flow, whole) and has_others(whole)
        case ast.Call() | ast.Subscript() | ast.ListComp():
            inside = [*_inside(flow, node, passed)] if _is_opaque(flow, node) else []
            passes = any(not passed.isdisjoint(flow.serials(each)) for each in inside)
            return passes and (any(map(has_others, inside)) or _is_of_program(flow, node))
    return False


def _is_of_program(flow: FileFlow, node: ast.expr) -> bool:
    """Whether a call is one of a function of another file, which may give what it reads."""
    if not isinstance(node, ast.Call):
        return False
    module, function = flow.module, node.func
    name = module.qualified_name(function)
    if name is None and isinstance(function, ast.Attribute):  # `store.restore(state)`
        is_of_tree = flow.has_arrays(function.value) or function.attr in flow_uses.KEEPING
        return not (is_of_tree or function.attr in {e.name for e in module.nodes(ast.FunctionDef)})
    if name is None:
        return False
    last = name.rpartition(".")[2]
    is_library = name.split(".")[0] in _LIBRARIES and not _READING.search(last)
    return not is_library and not last[:1].isupper()


def _has_others(flow: FileFlow, serials: set[int], node: ast.AST) -> bool:
    """Whether an expression held arrays that are none of these."""
    return flow.has_unmapped(node) or not flow.serials(node) <= serials


def _is_opaque(flow: FileFlow, node: ast.expr) -> bool:
    """Whether what an expression does is not seen in the file."""
    if isinstance(node, ast.Call):
        return pmaps.definition(flow.module, node.func) is None
    return isinstance(node, ast.Subscript | ast.ListComp)


def _inside(flow: FileFlow, node: ast.AST, given: set[int]) -> Iterator[ast.expr]:
    """What an expression is made of, but not what the arrays are made of."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, ast.expr) and flow.watches(each):
            yield each
        if not isinstance(each, ast.Lambda) and given.isdisjoint(flow.born_at(each)):
            yield from _inside(flow, each, given)


def check_kept_with_others(flow: FileFlow, serials: set[int]) -> None:
    """Raises Left where something is given some of the arrays to keep, and perhaps others, too."""
    own: set[Any] = set()
    others: dict[Any, int] = {}
    for node in flow.holders(serials):
        if (place := variable(flow.module, node)) is not None:
            own.add(place)
    for node in ast.walk(flow.module.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=kept, attr=name)) if name in flow_uses.KEEPING:
                if flow.type_of(kept) == "module":  # `np.append(losses, loss)`
                    continue
                place = variable(flow.module, kept)
                if any(not serials.isdisjoint(flow.bound_by(each)) for each in node.args):
                    own.add(place)
                    if flow.module.qualified_name(kept) is not None:
                        raise Left(f"line {node.lineno} keeps it for other files")
                elif not all(isinstance(each, ast.Constant | ast.Dict) for each in node.args):
                    others[place] = node.lineno
            case ast.Attribute(value=kept, attr=name) if name in flow_uses.KEEPING:
                if flow.module.call_of(node) is None:  # `map(queue.put, more)`
                    others[variable(flow.module, kept)] = node.lineno
    for place in own & others.keys():
        raise Left(f"line {others[place]} adds others to what keeps it")


def check_merged(flow: FileFlow, serials: set[int]) -> None:
    """Raises Left where an expression gave some of the arrays, and perhaps gives others, too.

    `{**state, **overrides}`, `restored or state` and `for each in (restored, state)` may give in
    another run what was empty in this one.
    """
    for node in ast.walk(flow.module.tree):
        beside = [each for each in _merged(node) if serials.isdisjoint(flow.held_in(each))]
        others = [*filter(_may_be_filled, beside)]
        whole = node.iter if isinstance(node, ast.For | ast.comprehension) else node
        if others and not serials.isdisjoint(flow.held_in(whole)):
            raise Left(f"line {others[0].lineno} puts others beside it")


def _merged(node: ast.AST) -> Iterator[ast.expr]:
    """What an expression may give as it is, or the elements of, as a run has it."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            yield from (each for each in parts if isinstance(each, ast.Starred))
        case ast.Dict(keys=keys, values=values):
            yield from (each for key, each in zip(keys, values, strict=True) if key is None)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from (left, right)
        case ast.BoolOp(op=ast.Or(), values=parts):
            yield from parts
        case ast.For(iter=ast.List(elts=parts) | ast.Tuple(elts=parts)):
            yield from parts
        case ast.comprehension(iter=ast.List(elts=parts) | ast.Tuple(elts=parts)):
            yield from parts


def _may_be_filled(part: ast.expr) -> bool:
    """Whether an expression may be another value in another run."""
    while isinstance(part, ast.Starred):
        part = part.value
    return isinstance(part, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.BoolOp)


def check_returns(flow: FileFlow, serials: set[int]) -> None:
    """Raises Left where a function that gives some of the arrays may give something else, too."""
    own: set[Any] = set()
    others: dict[Any, int] = {}
    for node in ast.walk(flow.module.tree):
        if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
            function = flow.module.function(node)
            if not serials.isdisjoint(flow.held_in(node.value)):
                own.add(function)
            elif not isinstance(node.value, ast.Constant):
                others[function] = node.lineno
    for function in own & others.keys():
        raise Left(f"line {others[function]} gives something else in another run")


def sets_chosen_entry(module: Module, node: ast.expr) -> bool:
    """Whether an entry of what an expression holds is set, and the text does not show which."""
    match module.parent(node):
        case ast.Subscript(value=value, slice=index, ctx=ast.Store()) if value is node:
            return not isinstance(index, ast.Constant)
        case ast.Attribute(attr="update" | "setdefault") as method:
            call = module.call_of(method)
            return call is not None and not all(map(_has_written_keys, call.args[:1]))
    return False


def _has_written_keys(given: ast.expr) -> bool:
    """Whether the text shows what a dictionary is updated with, or which entry is set."""
    if isinstance(given, ast.Dict):
        return all(isinstance(key, ast.Constant) for key in given.keys)
    return isinstance(given, ast.Constant)
