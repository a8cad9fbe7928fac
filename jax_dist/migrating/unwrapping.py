"""Taking off what stands around an expression: the call of `unreplicate`, the `[0]` behind it."""

import ast

from jax_dist.checker.model.findings import Edit
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating.texts import Texts


def shell(texts: Texts, whole: ast.expr, inner: ast.expr, start: str, end: str) -> tuple[Edit, ...]:
    """Replaces what stands around `inner`; inside it other edits may be made.

    Args:
      texts: of the file.
      whole: the expression that is left with `inner` alone.
      inner: a part of it.
      start: what comes before that.
      end: what comes after it.
    """
    module = texts.module
    if not start and _is_to_itself(module, whole, inner):
        return (_without_line(module, module.statement(whole)),)
    low, high = module.span(whole)
    first, last = module.span(inner)
    edits = (Edit(low, first, start), Edit(last, high, end))
    return (
        *_comments_above(texts, whole, inner),
        *(edit for edit in edits if edit.start != edit.end or edit.text),
    )


def _comments_above(texts: Texts, whole: ast.expr, inner: ast.expr) -> tuple[Edit, ...]:
    """The comments that would be lost, on lines of their own above the statement."""
    comments = texts.comments(whole, [inner])
    if not comments:
        return ()
    at = texts.module.span(texts.module.statement(whole))[0]
    indent = texts.indent_of(whole)
    return (Edit(at, at, "".join(f"{comment}\n{indent}" for comment in comments)),)


def _is_to_itself(module: Module, whole: ast.expr, inner: ast.expr) -> bool:
    """Whether `x = unreplicate(x)` would become `x = x`, among other statements."""
    statement = module.parent(whole)
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) if (
            isinstance(inner, ast.Name) and not module.scope(whole).is_class
        ):
            block = getattr(module.parent(statement), "body", [])
            others = [each for each in block if not _sets_from_itself(each)]
            return inner.id == name and statement in block and bool(others)
    return False


def _sets_from_itself(statement: ast.stmt) -> bool:
    """Whether it may go too: a block must keep one statement."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(value))
    return False


def _without_line(module: Module, statement: ast.stmt) -> Edit:
    """Takes a statement out, with its line; a comment behind it stays."""
    start, end = module.span(statement)
    code = module.source.code
    line = max(code.rfind(b"\n", 0, start), code.rfind(b"\r", 0, start)) + 1
    rest = code[end:]
    blank = len(rest) - len(rest.lstrip(b" \t"))
    for newline in (b"\r\n", b"\n", b"\r"):
        if rest[blank:].startswith(newline) and not code[line:start].strip():
            return Edit(line, end + blank + len(newline), "")
    if rest[blank:].startswith(b";"):
        more = rest[blank + 1 :]
        return Edit(start, end + blank + 1 + len(more) - len(more.lstrip(b" \t")), "")
    return Edit(start, end, "")


def around(module: Module, whole: ast.expr, inner: ast.expr, *, end: bool = False) -> str:
    """Parentheses, where the inner expression would fall apart without them.

    Args:
      module: the file.
      whole: what it takes the place of.
      inner: what they would stand around.
      end: whether the closing one is asked for.
    """
    tight = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant
    closed = ast.Dict | ast.List | ast.Set | ast.ListComp | ast.SetComp | ast.DictComp
    if isinstance(inner, tight | closed) or _has_brackets(module, inner):
        return ""
    if isinstance(module.parent(whole), ast.Return) and isinstance(inner, ast.Tuple):
        return ""
    return ")" if end else "("


def _has_brackets(module: Module, inner: ast.expr) -> bool:
    """Whether its own text begins and ends with brackets: `ast` counts those of a tuple to it."""
    text = module.text(inner)
    return isinstance(inner, ast.Tuple | ast.GeneratorExp) and text[:1] == "(" and text[-1:] == ")"
