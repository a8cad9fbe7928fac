"""Where new imports and definitions go, and a file with its fixes made."""

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax_dist.checker import edits, parsing
from jax_dist.checker.findings import Edit, Fix
from jax_dist.checker.modules import Module
from jax_dist.checker.sources import Source


def placed(module: Module, fixes: Iterable[Fix]) -> bytes:
    """The code with all fixes made: their edits, and once each what they import and define.

    Args:
      module: the file as it is.
      fixes: fixes that do not clash, as `edits.choose` gives them.
    """
    fixes = list(fixes)
    imports = dict.fromkeys(line for fix in fixes for line in fix.imports)
    definitions = dict.fromkeys(text for fix in fixes for text in fix.definitions)
    source = _edited(module.source, [edit for fix in fixes for edit in fix.edits])
    if definitions:
        source = _edited(source, _defined(source, list(definitions)))
    for line in imports:  # one by one: each may stand beside the one before
        source = _edited(source, _imported(source, line))
    return source.code


def _edited(source: Source, made: Sequence[Edit]) -> Source:
    return source.edited(edits.apply(source.code, made, edits.newline_of(source.code)))


# --- imports


def _imported(source: Source, line: str) -> list[Edit]:
    """One import, in the group of its kind, before the first that sorts after it."""
    code, tree = source.code, parsing.parse(source.python)
    present = {ast.unparse(node) for node in tree.body if isinstance(node, _IMPORTS)}
    if line in present:
        return []
    head = _head(tree)
    wanted = ast.parse(line).body[0]
    group = [each for each in head if _group(each) == _group(wanted)]
    if not group:
        return [_new_group(code, head, _group(wanted), line, tree)]
    key = _key_of(code, head)
    before = next((each for each in group if key(each) > key(wanted)), None)
    if before is not None and _stands_alone(code, before):
        at = _line_start(code, before.lineno)
        return [Edit(at, at, f"{line}\n")]
    at, lead = _after(code, group[-1])
    return [Edit(at, at, f"{lead}{line}\n")]


_IMPORTS = (ast.Import, ast.ImportFrom)


def _head(tree: ast.Module) -> list[ast.stmt]:
    """The first run of imports; those after other code may come late for a reason."""
    head: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, _IMPORTS):
            head.append(statement)
        elif head or not _is_docstring(statement):
            break
    return head


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _name(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ImportFrom):
        return "." * statement.level + (statement.module or "")
    return statement.names[0].name  # type: ignore[attr-defined] # an import


def _group(statement: ast.stmt) -> int:
    name = _name(statement)
    if name == "__future__":
        return 0
    if name.startswith("."):
        return 3
    return 1 if name.partition(".")[0] in sys.stdlib_module_names else 2


def _by_name(statement: ast.stmt) -> tuple[int, str, bool]:
    """As Google's style guide orders: `import` and `from` mixed."""
    is_from = isinstance(statement, ast.ImportFrom)
    return (_group(statement), _name(statement).lower(), is_from)


def _by_form(statement: ast.stmt) -> tuple[int, bool, str]:
    """As isort and ruff order: `import` before `from`."""
    is_from = isinstance(statement, ast.ImportFrom)
    return (_group(statement), is_from, _name(statement).lower())


def _key_of(code: bytes, head: Sequence[ast.stmt]) -> Callable[[ast.stmt], Any]:
    """The order that the imports are in; where they show none, by the indentation."""
    fits = [key for key in (_by_name, _by_form) if sorted(head, key=key) == list(head)]
    if len(fits) == 1:
        return fits[0]
    return _by_name if edits.indentation_of(code.decode("utf-8", "replace")) == "  " else _by_form


def _new_group(
    code: bytes, head: Sequence[ast.stmt], group: int, line: str, tree: ast.Module
) -> Edit:
    """The first import of its kind: with a blank line between it and its neighbours."""
    earlier = [each for each in head if _group(each) < group]
    if earlier:
        at, lead = _after(code, earlier[-1])
        return Edit(at, at, f"{lead}\n{line}\n")
    if head:
        at = _line_start(code, head[0].lineno)
        return Edit(at, at, f"{line}\n\n")
    docstring = [each for each in tree.body[:1] if _is_docstring(each)]
    if docstring:
        at, lead = _after(code, docstring[0])
        return Edit(at, at, f"{lead}\n{line}\n")
    at = _first_line(code, tree)
    return Edit(at, at, f"{line}\n\n" if tree.body else f"{line}\n")


def _first_line(code: bytes, tree: ast.Module) -> int:
    """Above the first statement, and above its decorators and the comments that belong to it."""
    if not tree.body:
        return len(code)
    first = tree.body[0]
    decorators = getattr(first, "decorator_list", [])
    line = min([first.lineno, *(each.lineno for each in decorators)])
    lines = code.splitlines()
    while (
        line > 2 and lines[line - 2].lstrip().startswith(b"#") and not _is_banner(lines, line - 2)
    ):
        line -= 1
    return _line_start(code, line)


def _is_banner(lines: Sequence[bytes], number: int) -> bool:
    """Whether a comment belongs to the block at the very top: a licence, `#!`, the encoding."""
    return all(each.lstrip().startswith(b"#") for each in lines[: number + 1])


# --- definitions


def _defined(source: Source, definitions: Sequence[str]) -> list[Edit]:
    """Functions below the imports, two blank lines apart."""
    code, tree = source.code, parsing.parse(source.python)
    new = [text for text in definitions if not _defines(tree, text)]
    if not new:
        return []
    head = _head(tree) or [each for each in tree.body[:1] if _is_docstring(each)]
    body = "\n\n\n".join(text.strip() for text in new)
    if not head:
        at = _first_line(code, tree)
        return [Edit(at, at, f"{body}\n\n\n")]
    at, lead = _after(code, head[-1])
    gap = _blank_lines(code, at)
    return [Edit(at, at, f"{lead}\n\n{body}\n" + "\n" * max(2 - gap, 0) * bool(code[at:].strip()))]


def _defines(tree: ast.Module, text: str) -> bool:
    name = ast.parse(text).body[0].name  # type: ignore[attr-defined] # a def
    return any(getattr(statement, "name", None) == name for statement in tree.body)


def _blank_lines(code: bytes, at: int) -> int:
    """How many blank lines follow."""
    rest = code[at:].splitlines()
    return next((number for number, line in enumerate(rest) if line.strip()), len(rest))


# --- lines


def _line_start(code: bytes, line: int) -> int:
    return sum(len(each) for each in code.splitlines(keepends=True)[: line - 1])


def _after(code: bytes, statement: ast.stmt) -> tuple[int, str]:
    """Where the next line begins, and a line end where the file lacks it."""
    assert statement.end_lineno is not None
    at = _line_start(code, statement.end_lineno + 1)
    return at, "" if code[:at].endswith((b"\n", b"\r")) else "\n"


def _stands_alone(code: bytes, statement: ast.stmt) -> bool:
    """Whether nothing else is on its first line, nor a comment above that would change owner."""
    start = _line_start(code, statement.lineno)
    lines = code[:start].splitlines()
    commented = bool(lines) and lines[-1].lstrip().startswith(b"#")
    return statement.col_offset == 0 and not commented
