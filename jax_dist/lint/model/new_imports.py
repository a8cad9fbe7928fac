"""Where new imports go, and a file with its fixes made. Nothing that is there moves.

A new import stands below the statement that first binds jax or flax: all that a program has to do
before it imports jax, such as setting `os.environ`, stays above both.
"""

import ast
import itertools
import os
import sys
from collections.abc import Iterable

from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Edit, Fix, apply_edits, newline_of
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
        source = _edited(source, edit or _import_edit(source, tree, wanted, line))
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


# --- the place of one import


def _import_edit(source: Source, tree: ast.Module, wanted: ast.stmt, line: str) -> Edit:
    """Return the edit that puts an import among those below the anchor, in their order."""
    code = source.code
    run = _run(tree)
    if not run:  # a file that imports neither jax nor flax
        return _at_top(code, tree, line)
    root = _name(wanted).partition(".")[0]
    own = "" if root in KNOWN or root in sys.stdlib_module_names else root
    folder = os.path.dirname(source.path)

    def group(each: ast.stmt) -> int:
        return _group(each, own, folder)

    if group(wanted) == _OF_PROJECT:
        run = _below_path_edits(code, tree, run) or run
    head = [each for each in _preamble(tree) if isinstance(each, _IMPORTS)]
    if group(wanted) == 1 and any(group(each) == 1 for each in head):
        run = head  # the standard library may stand above jax
    imports = [each for each in run if isinstance(each, _IMPORTS)]
    of_group = _first_block(code, [each for each in imports if group(each) == group(wanted)])
    if not of_group:
        earlier = [each for each in run if each not in imports or group(each) < group(wanted)]
        at, lead = _after(code, earlier[-1] if earlier else run[0])
        return Edit(at, at, lead + "\n" * bool(earlier) + f"{line}\n")
    key = _by_form if sorted(of_group, key=_by_form) == of_group else _by_name
    # Nothing is put above the anchor, nor where a comment above would change its owner.
    behind = (each for each in of_group if each is not run[0] and key(each) > key(wanted))
    before = next(behind, None)
    at = _line_start(code, before.lineno) if before is not None else 0
    above = code[:at].splitlines()[-1:]
    if before is None or before.col_offset or above[0].lstrip().startswith(b"#"):
        at, lead = _after(code, of_group[-1])
        return Edit(at, at, f"{lead}{line}\n")
    return Edit(at, at, f"{line}\n")


def _first_block(code: bytes, imports: list[ast.stmt]) -> list[ast.stmt]:
    """Return the imports above the first blank line, below which are those of the project."""
    lines = code.splitlines()
    for number, (one, two) in enumerate(itertools.pairwise(imports), start=1):
        between = lines[one.end_lineno or one.lineno : two.lineno - 1]
        if not all(map(bytes.strip, between)):
            return imports[:number]
    return imports


def _at_top(code: bytes, tree: ast.Module, line: str) -> Edit:
    preamble = _preamble(tree)
    if not preamble:
        at = _first_line(code, tree)
        return Edit(at, at, f"{line}\n\n" if tree.body else f"{line}\n")
    at, lead = _after(code, preamble[-1])
    gap = "" if isinstance(preamble[-1], _IMPORTS) else "\n"
    return Edit(at, at, f"{lead}{gap}{line}\n")


_OF_PROJECT = 3


def _group(statement: ast.stmt, own: str, folder: str) -> int:
    """Return the group of an import, as sorters tell them apart: future, standard, others, project.

    Args:
      statement: an import.
      own: the root of the project, where the new import is of it.
      folder: of the file: what lies in it is of the project, too.
    """
    name = _name(statement)
    root = name.partition(".")[0]
    if name == "__future__":
        return 0
    is_beside = root == own or sources.holds_module(folder, root)
    if name.startswith(".") or (own and is_beside):
        return _OF_PROJECT
    return 1 if root in sys.stdlib_module_names else 2


def _name(statement: ast.stmt) -> str:
    if isinstance(statement, ast.ImportFrom):
        return "." * statement.level + (statement.module or "")
    return statement.names[0].name  # type: ignore[attr-defined] # an import


def _by_name(statement: ast.stmt) -> tuple[str, bool]:
    """Return the key of Google's style, in which both forms are mixed."""
    return _name(statement).lower(), isinstance(statement, ast.ImportFrom)


def _by_form(statement: ast.stmt) -> tuple[bool, str]:
    """Return the key of isort and ruff: `import` before `from`."""
    return isinstance(statement, ast.ImportFrom), _name(statement).lower()


def _below_path_edits(code: bytes, tree: ast.Module, run: list[ast.stmt]) -> list[ast.stmt]:
    """Return the first import below a change of `sys.path`, where the module's level has one."""
    lines = code.splitlines()
    changed = False
    for statement in tree.body[tree.body.index(run[-1]) + 1 :]:
        if isinstance(statement, _IMPORTS) and changed:
            return [statement]
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            break
        text = lines[statement.lineno - 1 : statement.end_lineno]
        changed = changed or any(b"sys.path" in line for line in text)
    return []


# --- lines


def _first_line(code: bytes, tree: ast.Module) -> int:
    """Return the place below the comments at the very top: a licence, `#!`, the encoding."""
    lines = code.splitlines(keepends=True)
    comments = itertools.takewhile(lambda each: each.lstrip().startswith(b"#"), lines)
    return sum(map(len, comments)) if tree.body else len(code)


def _line_start(code: bytes, line: int) -> int:
    return sum(len(each) for each in code.splitlines(keepends=True)[: line - 1])


def _after(code: bytes, statement: ast.stmt) -> tuple[int, str]:
    """Return where the next line begins, and a line end where the file lacks it."""
    assert statement.end_lineno is not None
    at = _line_start(code, statement.end_lineno + 1)
    return at, "" if code[:at].endswith((b"\n", b"\r")) else "\n"
