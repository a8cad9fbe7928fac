"""The text of a file whose expressions tell their values while it runs."""

import ast
import collections

from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.verify.recording.flow import NAME

_WATCHED = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.IfExp, ast.ListComp)


def watched_nodes(module: Module) -> list[ast.expr]:
    """The expressions of a file that are watched, in the order of their numbers."""
    found: list[ast.expr] = []

    def walk(node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in _unwatched(node):
                continue
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, ast.JoinedStr) and not _shows_parts(module, each):
                    continue
                if isinstance(each, ast.AST):
                    if isinstance(each, _WATCHED) and _is_watched(name, each):
                        found.append(each)
                    walk(each)

    walk(module.tree)
    return found


def _shows_parts(module: Module, text: ast.JoinedStr) -> bool:
    """Whether the parts of an f-string are where Python says: before 3.12, not always.

    And `f"{x=}"` shows its own text.
    """
    before: ast.expr | None = None
    for part in text.values:
        if isinstance(part, ast.FormattedValue):
            if isinstance(before, ast.Constant) and str(before.value).rstrip().endswith("="):
                return False
            try:
                written = ast.parse(f"({module.text(part.value)})", mode="eval").body
            except (SyntaxError, ValueError):
                return False
            if ast.dump(written) != ast.dump(part.value):
                return False
        before = part
    return True


def _unwatched(node: ast.AST) -> tuple[str, ...]:
    """The fields that hold no values of the run."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ("decorator_list", "returns", "args", "bases", "keywords", "type_params")
    if isinstance(node, ast.Lambda):
        return ("args",)
    return ("annotation", "pattern")


def _is_watched(name: str, node: ast.expr) -> bool:
    is_name_of_function = name == "func" and isinstance(node, ast.Name | ast.Attribute)
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load) and not is_name_of_function


def watched_code(module: Module, first: int) -> bytes:
    """The code of a file, line by line, in which expressions tell their values."""
    opened: dict[int, list[int]] = collections.defaultdict(list)  # by offset: numbers, outer first
    closed: collections.Counter[int] = collections.Counter()
    for number, node in enumerate(watched_nodes(module), first):  # outer ones before inner ones
        start, end = module.span(node)
        opened[start].append(number)
        closed[end] += 1
    code, pieces, at = module.source.code, [], 0
    for offset in sorted({*opened, *closed}):
        pieces += [code[at:offset], b")" * closed[offset]]
        pieces += [f"{NAME}({number}, ".encode() for number in opened[offset]]
        at = offset
    return b"".join((*pieces, code[at:]))
