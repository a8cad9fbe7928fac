"""Where new imports go, and a file with its fixes made. Nothing that is there moves.

A new import stands below the statement that first binds jax or flax: all that a program has to do
before it imports jax, such as setting `os.environ`, stays above both.
"""

import ast
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Edit, Fix, apply_edits, indentation_of, newline_of
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.lint.model.sources import Source

_IMPORTS = (ast.Import, ast.ImportFrom)
_WIDTH = 79  # of a line that takes another name
_HOSTS = ("jax", "flax", "jaxlib")  # what a file must have imported before it needs a fix of ours


def placed(module: Module, fixes: Iterable[Fix]) -> bytes:
    """Return the code with all fixes made, which do not clash; what they import is there once."""
    fixes = list(fixes)
    source = module.source
    made = [edit for fix in fixes for edit in fix.edits]
    source = source.edited(apply_edits(source.code, made, newline_of(source.code)))
    lines = dict.fromkeys(line for fix in fixes for line in fix.imports)
    # One by one, for each may stand beside the one before; those of the project last.
    for line in sorted(lines, key=lambda line: line.split()[1].partition(".")[0] not in KNOWN):
        tree = sources.parse(source.python)
        wanted = ast.parse(line).body[0]
        if isinstance(wanted, ast.ImportFrom):
            froms = (node for node in tree.body if isinstance(node, ast.ImportFrom))
            joined = (_joined(source, node, wanted) for node in froms)
            edit = next(filter(None, joined), None)
        elif any(isinstance(node, _IMPORTS) and ast.unparse(node) == line for node in tree.body):
            continue  # it has it
        else:
            edit = None
        source = _edited(source, edit or _import_edit(source.path, source.code, tree, wanted, line))
    return source.code


def _joined(source: Source, node: ast.ImportFrom, wanted: ast.ImportFrom) -> Edit | None:
    """Return `from a import b` takes one name more, where it is a statement of one plain line."""
    if (node.level, node.module) != (wanted.level, wanted.module) or node.col_offset:
        return None
    names = [ast.unparse(each) for each in node.names]
    new = [name for each in wanted.names if (name := ast.unparse(each)) not in names]
    line = _line_start(source.code, node.lineno)
    if not new:
        return Edit(line, line, "")
    start, end = line, line + (node.end_col_offset or 0)
    text = source.code[start:end].decode()
    home = f"from {'.' * node.level}{node.module or ''} import"
    joined = f"{home} {', '.join(sorted((*names, *new), key=str.lower))}"
    fits = text == f"{home} {', '.join(names)}" and len(joined) <= _WIDTH
    if not fits or node.end_lineno != node.lineno or (node.module or "").startswith("jax."):
        return None
    return Edit(start, end, joined)


def with_block(source: Source, text: str) -> Source:
    """Return a file with definitions below its imports; in a notebook, in their cell."""
    code, tree = source.code, sources.parse(source.python)
    head = _run(tree) or _preamble(tree)
    at, lead = _after(code, head[-1]) if head else (0, "")
    rest = code[at:].splitlines()
    gap = next((number for number, row in enumerate(rest) if row.strip()), len(rest))
    below = "\n" * max(2 - gap, 0) if code[at:].strip() else ""
    return _edited(source, Edit(at, at, f"{lead}\n\n{text.strip()}\n{below}"))


def _edited(source: Source, edit: Edit) -> Source:
    return source.edited(apply_edits(source.code, [edit], newline_of(source.code)))


def anchor(tree: ast.Module) -> ast.stmt | None:
    """Return the module's statement that first binds jax or flax; else the first import *.

    It may be a whole `try` with such an import in it; an `if` only where nothing else is.
    """
    sure: list[ast.stmt] = []
    maybe: list[ast.stmt] = []
    stars: list[ast.stmt] = []
    for statement in tree.body:
        for node in _imports_in(statement):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [] if node.level else [node.module or ""]
            if any(name.partition(".")[0] in _HOSTS for name in names):
                (maybe if isinstance(statement, ast.If) else sure).append(statement)
            elif any(alias.name == "*" for alias in node.names):
                stars.append(statement)
    return next(iter((*sure, *maybe, *stars)), None)


def _imports_in(statement: ast.stmt) -> Iterable[ast.Import | ast.ImportFrom]:
    """Yield imports that run with the module: not in functions, or for type checkers only."""
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, _IMPORTS):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)


def _run(tree: ast.Module) -> list[ast.stmt]:
    """Return the anchor and the imports right below it."""
    first = anchor(tree)
    if first is None:
        return []
    return [first, *_imports_on(tree.body[tree.body.index(first) + 1 :])]


def _preamble(tree: ast.Module) -> list[ast.stmt]:
    """Return what must stay at the top of a file without an anchor: docstring, imports."""
    docstring = [each for each in tree.body[:1] if isinstance(each, ast.Expr)]
    return [*docstring, *_imports_on(tree.body[len(docstring) :])]


def _imports_on(statements: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Return the imports with which they begin."""
    return itertools.takewhile(lambda each: isinstance(each, _IMPORTS), statements)


# --- imports


def _import_edit(path: str, code: bytes, tree: ast.Module, wanted: ast.stmt, line: str) -> Edit:
    kind = _Kind(wanted, os.path.dirname(path))
    late = _below_path_edits(code, tree, wanted, kind)
    run = [late] if late is not None else _run(tree)
    if not run:  # a file that imports neither jax nor flax
        preamble = _preamble(tree)
        if not preamble:
            at = _first_line(code, tree)
            return Edit(at, at, f"{line}\n\n" if tree.body else f"{line}\n")
        at, lead = _after(code, preamble[-1])
        gap = "" if isinstance(preamble[-1], _IMPORTS) else "\n"
        return Edit(at, at, f"{lead}{gap}{line}\n")
    group = [each for each in run if isinstance(each, _IMPORTS) and kind.of(each) == kind.wanted]
    if group:
        key = _key_of(code, run, kind)
        behind = run[1:]  # nothing is put above the anchor
        before = next((each for each in group if each in behind and key(each) > key(wanted)), None)
        at = _line_start(code, before.lineno) if before is not None else 0
        above = code[:at].splitlines()
        # Nor where a comment above would change its owner.
        is_alone = not above or not above[-1].lstrip().startswith(b"#")
        if before is not None and before.col_offset == 0 and is_alone:
            return Edit(at, at, f"{line}\n")
        at, lead = _after(code, group[-1])
        return Edit(at, at, f"{lead}{line}\n")
    earlier = [
        each for each in run if not isinstance(each, _IMPORTS) or kind.of(each) < kind.wanted
    ]
    at, lead = _after(code, earlier[-1] if earlier else run[0])
    gap = "\n" if earlier else ""
    return Edit(at, at, f"{lead}{gap}{line}\n")


class _Kind:
    """The group that an import belongs to, as sorters of imports tell them apart.

    Args:
      wanted: the import that is to be placed: what has its root is of the same project.
      folder: of the file: what lies in it is, too.
    """

    def __init__(self, wanted: ast.stmt, folder: str):
        root = _name(wanted).partition(".")[0]
        self._own = "" if root in KNOWN or root in sys.stdlib_module_names else root
        self._folder = folder
        self.wanted = self.of(wanted)

    def of(self, statement: ast.stmt) -> int:
        name = _name(statement)
        root = name.partition(".")[0]
        if name == "__future__":
            return 0
        is_beside = root == self._own or sources.holds_module(self._folder, root)
        if name.startswith(".") or (self._own and is_beside):
            return 3
        return 1 if root in sys.stdlib_module_names else 2


def _name(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ImportFrom):
        return "." * statement.level + (statement.module or "")
    return statement.names[0].name  # type: ignore[attr-defined] # an import


def _below_path_edits(
    code: bytes, tree: ast.Module, wanted: ast.stmt, kind: _Kind
) -> ast.stmt | None:
    """Return the first import of the project below a change of `sys.path`."""
    run = _run(tree)
    if kind.wanted != 3 or not run or _name(wanted).startswith("."):
        return None
    changed = False
    for statement in tree.body[tree.body.index(run[-1]) + 1 :]:
        if isinstance(statement, _IMPORTS):
            if changed:
                return statement
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return None
        else:
            first, last = statement.lineno, statement.end_lineno or statement.lineno
            text = b"\n".join(code.splitlines()[first - 1 : last])
            changed = changed or b"sys.path" in text
    return None


def _key_of(code: bytes, run: Sequence[ast.stmt], kind: _Kind) -> Callable[[ast.stmt], Any]:
    """Return the order that the imports are in; where they show none, by the indentation."""

    def by_name(each: ast.stmt) -> tuple[int, str, bool]:  # Google's style: both forms mixed
        return kind.of(each), _name(each).lower(), isinstance(each, ast.ImportFrom)

    def by_form(each: ast.stmt) -> tuple[int, bool, str]:  # isort and ruff: `import` before `from`
        return kind.of(each), isinstance(each, ast.ImportFrom), _name(each).lower()

    imports = [each for each in run if isinstance(each, _IMPORTS)]
    fits = [key for key in (by_name, by_form) if sorted(imports, key=key) == imports]
    if len(fits) == 1:
        return fits[0]
    is_google = indentation_of(code.decode("utf-8", "replace")) == "  "
    return by_name if is_google else by_form


def _first_line(code: bytes, tree: ast.Module) -> int:
    """Return the place above the first statement, its decorators and its comments."""
    if not tree.body:
        return len(code)
    first = tree.body[0]
    decorators = getattr(first, "decorator_list", [])
    line = min([first.lineno, *(each.lineno for each in decorators)])
    is_comment = [each.lstrip().startswith(b"#") for each in code.splitlines()]
    # Those of the block at the very top stay there: a licence, `#!`, the encoding.
    while line > 2 and is_comment[line - 2] and not all(is_comment[: line - 1]):
        line -= 1
    return _line_start(code, line)


# --- lines


def _line_start(code: bytes, line: int) -> int:
    return sum(len(each) for each in code.splitlines(keepends=True)[: line - 1])


def _after(code: bytes, statement: ast.stmt) -> tuple[int, str]:
    """Return where the next line begins, and a line end where the file lacks it."""
    assert statement.end_lineno is not None
    at = _line_start(code, statement.end_lineno + 1)
    return at, "" if code[:at].endswith((b"\n", b"\r")) else "\n"
