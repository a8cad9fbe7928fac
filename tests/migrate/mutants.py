"""Wrong migrations: each mutant of a migrated text has one mistake of a named kind."""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Edit = Callable[[Any], ast.AST | None]  # what takes the place of a node; None: it is no such node


class Mutant(NamedTuple):
    kind: str
    line: int
    text: str


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _called(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in names


def _expression(text: str, **parts: ast.AST) -> ast.AST:
    """An expression of text, in which names stand for parts."""

    class Fill(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: N802
            return parts.get(node.id, node)

    return Fill().visit(ast.parse(text, mode="eval").body)


def _function(old: str, new: str) -> Edit:
    def edit(node: Any) -> ast.AST | None:
        if not _called(node, old) or not node.args:
            return None
        if isinstance(node.func, ast.Attribute):
            node.func.attr = new
        else:
            node.func = _expression(f"jax.lax.{new}")
        return node

    return edit


def _first_argument(*names: str) -> Edit:
    return lambda node: node.args[0] if _called(node, *names) and node.args else None


def _wrapped(text: str, *names: str) -> Edit:
    """The first argument, changed."""

    def edit(node: Any) -> ast.AST | None:
        if not _called(node, *names) or not node.args:
            return None
        node.args[0] = _expression(text, ARG=node.args[0])
        return node

    return edit


def _keyword(name: str, change: Callable[[ast.AST], ast.AST | None]) -> Edit:
    def edit(node: Any) -> ast.AST | None:
        if not isinstance(node, ast.Call):
            return None
        for word in node.keywords:
            if word.arg == name and (value := change(word.value)) is not None:
                word.value = value
                return node
        return None

    return edit


def _without(name: str) -> Edit:
    def edit(node: Any) -> ast.AST | None:
        if not isinstance(node, ast.Call) or all(word.arg != name for word in node.keywords):
            return None
        node.keywords = [word for word in node.keywords if word.arg != name]
        return node

    return edit


def _other_axis(value: ast.AST) -> ast.AST | None:
    found = [
        each
        for each in ast.walk(value)
        if isinstance(each, ast.Constant) and (each.value is None or type(each.value) is int)
    ]
    if not found:
        return None
    found[0].value = {0: 1, 1: 0}.get(found[0].value, 0)  # None becomes 0
    return value


def _donating(node: Any) -> ast.AST | None:
    if not _called(node, "mapped", "jit") or any(w.arg == "donate_argnums" for w in node.keywords):
        return None
    node.keywords.append(ast.keyword("donate_argnums", ast.Constant(0)))
    return node


def _constant(node: Any) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or type(node.value) is not float:
        return None
    return ast.Constant(node.value * 1.001 or 1e-3)


def _operator(old: type, new: type) -> Edit:
    def edit(node: Any) -> ast.AST | None:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, old):
            return None
        return ast.BinOp(node.left, new(), node.right)

    return edit


def _last_for_first(node: Any) -> ast.AST | None:
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return None
    is_zero = isinstance(node.slice, ast.Constant) and node.slice.value == 0
    return ast.Subscript(node.value, ast.Constant(-1), ast.Load()) if is_zero else None


def _seed(node: Any) -> ast.AST | None:
    if not _called(node, "PRNGKey", "key", "default_rng") or not node.args:
        return None
    node.args[0] = _expression("ARG + 1", ARG=node.args[0])
    return node


def _swapped(node: Any) -> ast.AST | None:
    """Of a call of what is mapped; its name is all that tells."""
    if not isinstance(node, ast.Call) or len(node.args) < 2 or not _name(node.func):
        return None
    if not any(word in _name(node.func) for word in ("step", "update", "learn", "p_")):
        return None
    node.args[:2] = node.args[1::-1]
    return node


def _whole_spec(node: Any) -> ast.AST | None:
    """`P(...)` that cuts nothing, which leaves the program of each device as it is."""
    if not _called(node, "P", "PartitionSpec") or not node.args:
        return None
    node.args = []
    return node


def _index_zero(node: Any) -> ast.AST | None:
    return _expression("jnp.int32(0)") if _called(node, "axis_index") else None


def _half(node: Any) -> ast.AST | None:
    if not isinstance(node, ast.Attribute) or node.attr != "float32":
        return None
    return ast.Attribute(node.value, "float16", ast.Load())


KINDS: dict[str, Edit] = {
    "psum for pmean": _function("pmean", "psum"),
    "pmean for psum": _function("psum", "pmean"),
    "pmax for psum": _function("psum", "pmax"),
    "pmax for pmean": _function("pmean", "pmax"),
    "pmin for pmax": _function("pmax", "pmin"),
    "no collective": _first_argument("psum", "pmean", "pmax", "pmin"),
    "index of the device is 0": _index_zero,
    "keys are not folded in": _first_argument("fold_in"),
    "another seed": _seed,
    "devices reversed": _wrapped("list(ARG)[::-1]", "Mesh"),
    "devices rotated": _wrapped("(lambda d: d[1:] + d[:1])(list(ARG))", "Mesh"),
    "donation dropped": _without("donate_argnums"),
    "donation added": _donating,
    "in_axes": _keyword("in_axes", _other_axis),
    "out_axes": _keyword("out_axes", _other_axis),
    "static dropped": _without("static_broadcasted_argnums"),
    "check_vma left out": _without("check_vma"),
    "a spec cuts nothing": _whole_spec,
    "axis name dropped": _without("axis_name"),
    "float constant": _constant,
    "minus for plus": _operator(ast.Add, ast.Sub),
    "plus for minus": _operator(ast.Sub, ast.Add),
    "plus for times": _operator(ast.Mult, ast.Add),
    "mean for sum": _function("sum", "mean"),
    "sum for mean": _function("mean", "sum"),
    "float16": _half,
    "last for first": _last_for_first,
    "scaled on placement": _wrapped("jax.tree.map(lambda x: x * 2, ARG)", "device_put_replicated"),
    "batch reversed": _wrapped("jax.tree.map(lambda x: x[::-1], ARG)", "asarray", "array"),
    "squeeze of the last axis": lambda node: (
        _expression("SELF(ARG, -1)", SELF=node.func, ARG=node.args[0])
        if _called(node, "squeeze", "expand_dims") and len(node.args) == 2
        else None
    ),
    "arguments swapped": _swapped,
}


def sites(text: str) -> Iterator[tuple[str, int]]:
    """Where a text can be mutated: kinds, and numbers of nodes."""
    tree = ast.parse(text)
    for kind, edit in KINDS.items():
        for number, node in enumerate([*ast.walk(copy.deepcopy(tree))]):  # which edits change
            if isinstance(node, ast.expr) and edit(node) is not None:
                yield kind, number


def mutant(text: str, kind: str, number: int) -> Mutant:
    """The mutant of one site."""
    tree = ast.parse(text)
    node = list(ast.walk(tree))[number]
    line = node.lineno if isinstance(node, ast.expr) else 0
    return Mutant(kind, line, _mutated(tree, node, KINDS[kind]))


def _mutated(tree: ast.AST, target: ast.AST, edit: Edit) -> str:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return edit(node) or node if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))
