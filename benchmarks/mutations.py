"""Mistakes in Python texts, one at a time, and texts that say which of their statements run.

`benchmarks/mutants.py` tries them.
"""

import ast
import collections
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

_OTHER: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_OTHER_NAME = {
    **{"any": "all", "all": "any", "min": "max", "max": "min", "union": "intersection"},
    **{"intersection": "union", "startswith": "endswith", "endswith": "startswith"},
}
_EMPTY = {"bool": ("True", "False"), "list": ("[]",), "tuple": ("()",), "dict": ("{}",)}
_SAID = ("print", "warn", "warning", "info", "debug", "TypeVar")  # calls that only say something
_LOCK = threading.Lock()
_KEYWORDS = ("strict", "daemon", "name")


@dataclasses.dataclass(eq=False)
class Mutant:
    """One mistake in one file."""

    file: str
    line: int
    statement: int | None  # its number; None: it runs when the file is imported
    name: str  # the function, what was there, what is there now
    _source: tuple[ast.AST, ast.AST, str, int | None, ast.AST]  # tree, parent, field, place, new

    @property
    def before(self) -> str:
        """The whole file without the mistake."""
        with _LOCK:
            return ast.unparse(self._source[0])

    @property
    def text(self) -> str:
        """The whole file."""
        tree, parent, field, place, new = self._source
        holder: Any = vars(parent) if place is None else getattr(parent, field)
        key: Any = field if place is None else place
        with _LOCK:  # all mutants of a file share its tree
            holder[key], old = new, holder[key]
            text = ast.unparse(ast.fix_missing_locations(tree))
            holder[key] = old
        return text


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All of a file, in the order of its text."""
    tree = ast.parse(source)
    numbers = _statements(tree)
    found: list[Mutant] = []
    times: collections.Counter[str] = collections.Counter()

    def walk(node: ast.AST, around: str, statement: int | None, returns: str) -> None:
        if isinstance(node, ast.FunctionDef):
            returns = ast.unparse(node.returns) if node.returns else ""
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            around = f"{around}.{node.name}" if around else node.name
        for child, field, place in _mutable(node):
            within = numbers.get(child, statement)
            if field == "test" and isinstance(child, ast.Compare) and len(child.ops) == 1:
                walk(child, around, within, returns)  # the whole condition becomes True and False
                continue
            for new in _edits(child, returns, at_import=within is None):
                name = f"{around}: {_short(child)} -> {_short(new)}"
                times[name] += 1
                name += f" ({times[name]})" if times[name] > 1 else ""
                line = getattr(child, "lineno", getattr(node, "lineno", 0))
                found.append(Mutant(file, line, within, name, (tree, node, field, place, new)))
            walk(child, around, within, returns)

    walk(tree, "", None, "")
    return sorted(found, key=lambda mutant: mutant.line)


def _statements(tree: ast.AST) -> dict[ast.AST, int]:
    """The statements inside functions, and their numbers."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {child for each in functions for node in each.body for child in ast.walk(node)}
    order = [node for node in ast.walk(tree) if node in inside and isinstance(node, ast.stmt)]
    return {node: number for number, node in enumerate(order)}


def _mutable(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """The parts of a node in which a mistake would count, and where they stand in it."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.arg():
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.keyword(arg=name) if name in _KEYWORDS:
            return
        case ast.AnnAssign(annotation=ast.Name("TypeAlias")) | ast.MatchValue():
            return
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name)) if name in _SAID:
            return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "ctx", "op", "ops", "type_params"):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            text = child.value if isinstance(child, ast.Expr) else None
            if isinstance(child, ast.AST) and not isinstance(text, ast.Constant):
                yield child, field, place


def _edits(node: Any, returns: str, *, at_import: bool) -> Iterator[ast.AST]:
    """What may stand in place of a node."""

    def new(**fields: Any) -> ast.AST:
        return type(node)(**{**dict(ast.iter_fields(node)), **fields})

    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield new(ops=[*ops[:place], _OTHER[type(op)](), *ops[place + 1 :]])
        case ast.BoolOp(values=values):  # `or` for `and` is caught by what catches one of these
            for rest in _one_less(values):
                yield rest[0] if len(rest) == 1 else new(values=rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op) if type(op) in _OTHER and not isinstance(left, ast.List):
            yield new(op=_OTHER[type(op)]())
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Call(func=func, args=args):
            if isinstance(func, ast.Name) and func.id in _OTHER_NAME:
                yield new(func=ast.Name(_OTHER_NAME[func.id]))
            if isinstance(func, ast.Attribute) and func.attr in _OTHER_NAME:
                yield new(func=ast.Attribute(func.value, _OTHER_NAME[func.attr]))
            if len(args) > 1 and _alike(*args[:2]):
                yield new(args=[args[1], args[0], *args[2:]])
        case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            is_table = all(isinstance(part, ast.Constant) for part in parts) or at_import
            if isinstance(node, ast.Set) or (is_table and isinstance(node.ctx, ast.Load)):
                yield from (new(elts=rest) for rest in _one_less(parts) if rest)
        case ast.Dict(keys=keys, values=values) if at_import:
            for left, rest in zip(_one_less(keys), _one_less(values), strict=True):
                yield new(keys=left, values=rest)
        case ast.comprehension(ifs=conditions):
            yield from (new(ifs=rest) for rest in _one_less(conditions))
        case ast.Slice(lower=lower, upper=upper):
            for field, bound in (("lower", lower), ("upper", upper)):
                if bound is not None and not isinstance(bound, ast.Constant):
                    yield new(**{field: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
        case ast.If(test=test):
            if not isinstance(test, ast.Constant) and ast.unparse(test) != "TYPE_CHECKING":
                yield from (new(test=ast.Constant(value)) for value in (False, True))
        case ast.Return(value=value) if value is not None:
            kind = returns.partition("[")[0]
            for text in _EMPTY.get(kind, ("None",)):
                if ast.unparse(value) != text and not (
                    isinstance(value, ast.Constant) and type(value.value) is bool
                ):
                    yield ast.Return(ast.parse(text, mode="eval").body)
        case ast.Expr(value=ast.Call(func=ast.Name(name) | ast.Attribute(attr=name))):
            if name not in _SAID:
                yield ast.Pass()
        case ast.Expr() | ast.Raise():
            yield ast.Pass()
        case ast.AugAssign(op=op):
            yield ast.Pass()
            if type(op) in _OTHER:
                yield new(op=_OTHER[type(op)]())
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case ast.match_case():
            yield new(guard=ast.Constant(value=False))


def _alike(one: ast.AST, other: ast.AST) -> bool:
    """Whether two arguments may be swapped without an error of Python, as far as we see."""
    match one, other:
        case ast.Attribute(attr=first), ast.Attribute(attr=second):
            return first == second
        case ast.Subscript(slice=first), ast.Subscript(slice=second):
            return type(first) is type(second)
        case ast.Call(func=first), ast.Call(func=second):
            return ast.dump(first) == ast.dump(second)
    return type(one) is type(other) and isinstance(one, ast.BinOp | ast.ListComp)


def _one_less(parts: list) -> list[list]:
    return [[*parts[:place], *parts[place + 1 :]] for place in range(len(parts))]


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.comprehension):
        return " ".join(["for ...", *(f"if {ast.unparse(each)}" for each in node.ifs)])
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.match_case):
        guard = f" if {ast.unparse(node.guard)}" if node.guard else ""
        return f"case {ast.unparse(node.pattern)}{guard}"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]} ... {text[-25:]}"


_PROBE = """
def _seen_here(number, _known=set(), _open={{}}):
    import os
    path = os.environ.get({variable!r})
    if path and (path, number) not in _known:
        _known.add((path, number))
        if path not in _open:
            for file in _open.values():
                os.close(file)
            _open.clear()
            _open[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(_open[path], b"%s %d\\n" % ({file!r}, number))

_seen_here(-1)
"""


def with_probes(file: str, source: str, variable: str) -> str:
    """A text whose functions write down which of their statements run; -1 as it is imported.

    The file is opened then: later, a program may not let them.

    Args:
      file: how the text is called there.
      source: the text without that.
      variable: of the environment, which names the file to write to, if there is one.
    """
    tree = ast.parse(source)
    numbers = _statements(tree)
    for node in list(ast.walk(tree)):
        for _, body in ast.iter_fields(node):
            for each in list(body) if isinstance(body, list) else []:
                is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                if each in numbers and not is_text:
                    probe = ast.parse(f"_seen_here({numbers[each]})").body[0]
                    body.insert(body.index(each), probe)
    last = [n for n, s in enumerate(tree.body[:4]) if isinstance(s, ast.Expr | ast.ImportFrom)]
    place = last[-1] + 1 if last else 0
    tree.body[place:place] = ast.parse(_PROBE.format(variable=variable, file=file.encode())).body
    return ast.unparse(ast.fix_missing_locations(tree))
