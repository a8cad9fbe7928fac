"""What else a variable, a field or an entry may hold in another run: what the host gives it.

A run that trains reads `best[0]` of what a mapped function gave. One that trains for no epoch reads
what the host has put there before, which still has the axis.
"""

import ast
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax_dist.lint.model import functions, scopes
from jax_dist.lint.model.scopes import last_name
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.recorded_flow import FileFlow, variable
from jax_dist.migrate.results import Left

_ACCESS = (ast.Name, ast.Attribute, ast.Subscript)


class _Given(NamedTuple):
    """What some place gives to a variable, a field or an entry."""

    place: ast.AST
    value: ast.expr
    is_gone_through: bool = False  # each element is given: `for x in value`
    is_unseen: bool = False  # what `with value as x` gives, no expression has held


def check(flow: FileFlow, serials: set[int]) -> None:
    """Raises Left where what held some arrays may hold a value of the host in another run."""
    module = flow.module
    for node in flow.holders(serials):
        around = module.parent(node)
        is_part = isinstance(around, ast.Attribute | ast.Subscript) and around.value is node
        if isinstance(node, _ACCESS) and not (is_part and _holds(flow, around, serials)):
            _check_access(flow, node, serials)


def _check_access(flow: FileFlow, whole: ast.expr, serials: set[int]) -> None:
    """Goes from `self.best["w"]` to `self.best`, and to `self`."""
    module, node, keys = flow.module, whole, list[ast.expr]()
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript):
            keys.insert(0, node.slice)
            _check_given(flow, whole, _to_entries(module, node), serials, keys[1:])
        else:
            _check_given(flow, whole, _to_fields(module, node.attr), serials, keys)
            keys = []
        node = node.value
    if not isinstance(node, ast.Name):
        return
    found = module.reaching(node) or []
    given = [each for binding in found if (each := _by(module, binding)) is not None]
    _check_given(flow, whole, given, serials, keys)
    for each in found:
        function = module.scope(node).around_comprehensions.node
        if each.kind == "parameter" and isinstance(function, scopes.Function):
            pairs = functions.defaults(function.args)
            default = next((value for own, value in pairs if own.arg == node.id), None)
            if default is not None and not _is_of(flow, default, serials):
                raise Left(f"line {default.lineno} gives {node.id} another value by default")


def _is_of(flow: FileFlow, default: ast.expr, serials: set[int]) -> bool:
    """Whether a default value, which no run tells, is no array or one of some."""
    if not isinstance(default, ast.Name):
        return isinstance(default, ast.Constant)
    values = [each.value for each in flow.module.reaching(default) or []]
    return bool(values) and all(
        value is not None and not serials.isdisjoint(flow.bound_by(value)) for value in values
    )


def _check_given(
    flow: FileFlow,
    node: ast.expr,
    given: Sequence[_Given],
    serials: set[int],
    keys: Sequence[ast.expr],
) -> None:
    """Raises Left where a place gives arrays that are none of these, and none below it does."""
    module, blocks, others = flow.module, [], list[_Given]()
    for each in given:
        parts = [*_parts(each.value, keys)]
        is_it = any(not serials.isdisjoint(flow.bound_by(part)) for part in parts)
        if is_it:
            statement = module.statement(each.place)
            blocks.append((module.parent(statement), statement.lineno))
        # Such as the part itself; and what is now one of them, and now another.
        is_of_it = any(not serials.isdisjoint(flow.held_in(part)) for part in parts)
        is_either = any(flow.is_array(part) and flow.has_others(part) for part in parts)
        if is_either or (not is_of_it and any(_gives(flow, each, part) for part in parts)):
            others.append(each)
    for each in others:
        around, line = module.parent(module.statement(each.place)), each.value.lineno
        if not any(around is block and below > line for block, below in blocks):
            raise Left(
                f"line {line} gives {module.text(node)} a value that another run may take a part of"
            )


def _gives(flow: FileFlow, given: _Given, part: ast.AST) -> bool:
    """Whether an expression gave arrays: itself, or what a display or a loop takes of it."""
    if given.is_unseen or flow.has_arrays(part) or flow.has_unmapped(part):
        return True
    if flow.watches(part) and not given.is_gone_through:
        return False
    return any(_gives(flow, given, each) for each in ast.iter_child_nodes(part))


def _holds(flow: FileFlow, node: ast.AST, serials: set[int]) -> bool:
    return not serials.isdisjoint(flow.serials(node))


def _parts(value: ast.expr, keys: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """What lies behind some keys of a value, as far as displays show it; elements may be moved."""
    match value:
        case ast.Dict(keys=names, values=values) if keys:
            for name, each in zip(names, values, strict=True):
                if name is None or _may_be(name, keys[0]):
                    yield from _parts(each, keys[1:])
        case ast.List(elts=elements) | ast.Tuple(elts=elements) if keys:
            for each in elements:
                yield from _parts(each, keys[1:])
        case _:
            yield value


def _may_be(one: ast.expr, other: ast.expr) -> bool:
    """Whether two keys may be equal."""
    match one, other:
        case ast.Constant(value=written), ast.Constant(value=asked):
            return written == asked
    return True


def _elements(value: ast.expr) -> list[ast.expr]:
    """Those of a display, where the text shows how many there are."""
    elements = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    return [] if any(isinstance(each, ast.Starred) for each in elements) else elements


# --- what gives


def _by(module: Module, binding: scopes.Binding) -> _Given | None:
    """What a binding gives to its name, where that is a value."""
    if binding.value is not None:
        return _Given(binding.node, binding.value)
    return _to(module, binding.node)


def _to(module: Module, target: ast.AST) -> _Given | None:
    """What a target gets, also in `a, (b, c) = value`, in a loop, and in `with value as a`."""
    node, path = target, list[tuple[int, int]]()  # indices, and of how many
    around = module.parent(node)
    while isinstance(around, ast.Tuple | ast.List):
        index = next(i for i, each in enumerate(around.elts) if each is node)
        path.insert(0, (index, len(around.elts)))
        node, around = around, module.parent(around)
    match around:
        case ast.Assign(value=value):
            for index, length in path:
                elements = _elements(value)
                if len(elements) != length:
                    break
                value = elements[index]
            return _Given(target, value)
        case ast.AnnAssign(value=ast.expr() as value):
            return _Given(target, value)
        case ast.For(iter=value) | ast.AsyncFor(iter=value) | ast.comprehension(iter=value):
            return _Given(target, value, is_gone_through=True)
        case ast.withitem(context_expr=value):
            return _Given(target, value, is_unseen=True)
    return None


def _to_fields(module: Module, name: str) -> list[_Given]:
    """What fields of that name get: of objects, and of classes."""
    targets = [e for e in module.nodes(ast.Attribute) if isinstance(e.ctx, ast.Store)]
    for statement in module.nodes(ast.Assign, ast.AnnAssign):
        if isinstance(module.parent(statement), ast.ClassDef):
            own = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            targets += [each for each in own if isinstance(each, ast.Name)]
    given = (_to(module, each) for each in targets if last_name(each) == name)
    return [each for each in given if each is not None]


def _to_entries(module: Module, entry: ast.Subscript) -> list[_Given]:
    """What the entry of a variable gets elsewhere: `best["w"] = value`, `best.update(w=value)`."""
    of, found = _place(module, entry.value), list[_Given | None]()
    if of is None:
        return []
    for node in module.nodes(ast.Subscript):
        if isinstance(node.ctx, ast.Store) and _place(module, node.value) == of:
            found += [_to(module, node)] if _may_be(node.slice, entry.slice) else []
    for node in module.nodes(ast.Call):
        match node:
            case ast.Call(
                func=ast.Attribute(value=base, attr="update" | "setdefault"), args=args
            ) if _place(module, base) == of:
                own = [e.value for e in node.keywords if _is_word(e, entry.slice)]
                own += [part for each in args for part in _parts(each, [entry.slice])]
                found += [_Given(node, each) for each in own]
    return [each for each in found if each is not None]


def _place(module: Module, node: ast.expr) -> Any:
    """A variable, or the fields of that name, whatever object has them."""
    return node.attr if isinstance(node, ast.Attribute) else variable(module, node)


def _is_word(keyword: ast.keyword, key: ast.expr) -> bool:
    return keyword.arg is None or _may_be(ast.Constant(keyword.arg), key)
