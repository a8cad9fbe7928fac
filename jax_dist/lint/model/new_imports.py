"""Where new imports go and old ones leave, and a file with its fixes made. Nothing else moves.

A new import stands below the statement that first binds jax or flax: all that a program has to do
before it imports jax, such as setting `os.environ`, stays above both.
"""

import ast
import functools
import itertools
import os
import sys
from collections.abc import Collection, Iterable

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
    source = _edited(module.source, [edit for fix in fixes for edit in fix.edits])
    lines = dict.fromkeys(line for fix in fixes for line in fix.imports)
    # One by one, for each may stand beside the one before; those of the project last.
    for line in sorted(lines, key=lambda line: line.split()[1].partition(".")[0] not in KNOWN):
        tree = sources.parse(source.python)
        if line not in map(ast.unparse, filter(_is_import, tree.body)):
            edits = (_joined(source, statement, line) for statement in tree.body)
            edit = next(filter(None, edits), None) or _import_edit(source, tree, line)
            source = _edited(source, [edit])
    return source.code


def with_block(source: Source, text: str) -> Source:
    """Return a file with definitions below its imports; in a notebook, in their cell."""
    head = _head(sources.parse(source.python))
    at, lead = _line_below(source, head[-1]) if head else (0, "")
    rest = source.code[at:].splitlines()
    gap = next((number for number, row in enumerate(rest) if row.strip()), len(rest))
    below = "\n" * max(2 - gap, 0) if source.code[at:].strip() else ""
    return _edited(source, [Edit(at, at, f"{lead}\n\n{text.strip()}\n{below}")])


def without(
    module: Module, statement: ast.Import | ast.ImportFrom, gone: Collection[ast.alias]
) -> list[Edit]:
    """Take some names out of an import, but not all, each with the comma that goes with it."""
    spans = [module.span(alias) for alias in statement.names]
    last = max(place for place, alias in enumerate(statement.names) if alias not in gone)
    edits = [
        Edit(spans[place][0], spans[place + 1][0], "")
        for place, alias in enumerate(statement.names[:last])
        if alias in gone
    ]
    end = spans[-1][1]
    return [*edits, Edit(spans[last][1], end, "")] if spans[last][1] < end else edits


def _edited(source: Source, edits: Iterable[Edit]) -> Source:
    return source.edited(apply_edits(source.code, edits, newline_of(source.code)))


def _joined(source: Source, statement: ast.stmt, line: str) -> Edit | None:
    """Return the edit by which `from a import b`, on one plain line, takes one name more."""
    new = ast.parse(line).body[0]
    if not (isinstance(statement, ast.ImportFrom) and isinstance(new, ast.ImportFrom)):
        return None
    if statement.col_offset or _name(statement) != _name(new):
        return None
    home, names = f"from {_name(statement)} import", [*map(ast.unparse, statement.names)]
    joined = f"{home} {', '.join(sorted({*names, *map(ast.unparse, new.names)}, key=str.lower))}"
    start = source.line_starts[statement.lineno - 1]
    end = start + (statement.end_col_offset or 0)
    is_plain = source.code[start:end].decode() == f"{home} {', '.join(names)}"
    if not is_plain or len(joined) > _WIDTH or _name(statement).startswith("jax."):
        return None
    return Edit(start, end, joined)


def _head(tree: ast.Module) -> list[ast.stmt]:
    """Return the anchor and the imports right below it; else the docstring and those at the top."""
    anchors = [statement for statement in tree.body if _binds_jax(statement)]
    if anchors:  # an `if` only where nothing else is
        first = [min(anchors, key=lambda statement: isinstance(statement, ast.If))]
    else:
        first = [statement for statement in tree.body[:1] if isinstance(statement, ast.Expr)]
    below = tree.body[tree.body.index(first[0]) + 1 :] if first else tree.body
    return [*first, *itertools.takewhile(_is_import, below)]


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, _IMPORTS)


def _binds_jax(statement: ast.stmt) -> bool:
    """Return whether a statement imports jax as the module runs: not for type checkers only."""
    waiting: list[ast.AST] = [statement]
    for node in waiting:
        if isinstance(node, _IMPORTS):
            is_from = isinstance(node, ast.ImportFrom)
            names = [_name(node)] if is_from else [alias.name for alias in node.names]
            if any(name.partition(".")[0] in _HOSTS for name in names):
                return True
        elif not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            waiting += ast.iter_child_nodes(node)
    return False


def _import_edit(source: Source, tree: ast.Module, line: str) -> Edit:
    """Return the edit that puts an import among those of the head, in their order."""
    code, head, wanted = source.code, _head(tree), ast.parse(line).body[0]
    if not head:  # below a licence, `#!`, the encoding
        rows = code.splitlines(keepends=True)
        at = sum(map(len, itertools.takewhile(lambda row: row.startswith(b"#"), rows)))
        return Edit(at, at, f"{line}\n\n")
    root = _name(wanted).partition(".")[0]
    project = "" if root in KNOWN or root in sys.stdlib_module_names else root
    group = functools.partial(_group, project=project, folder=os.path.dirname(source.path))
    above = list(filter(_is_import, tree.body[: tree.body.index(head[0])]))
    at_top = [*above, *filter(_is_import, head)]
    if group(wanted) == 1 and any(group(node) == 1 for node in above):
        head = above  # the standard library may stand above jax
    imports = list(filter(_is_import, head))
    of_group = _first_block(code, [node for node in imports if group(node) == group(wanted)])
    if not of_group:
        earlier = [node for node in head if node not in imports or group(node) < group(wanted)]
        at, lead = _line_below(source, earlier[-1] if earlier else head[0])
        return Edit(at, at, lead + "\n" * bool(earlier) + f"{line}\n")
    block = _first_block(code, [node for node in at_top if group(node) == group(wanted)])
    key = _by_form if sorted(block, key=_by_form) == block else _by_name
    # Nothing is put above the anchor, nor where a comment above would change its owner.
    behind = (node for node in of_group if node is not head[0] and key(node) > key(wanted))
    before = next(behind, None)
    at = source.line_starts[before.lineno - 1] if before is not None else 0
    above = code[:at].splitlines()[-1:]
    if before is None or before.col_offset or above[0].lstrip().startswith(b"#"):
        at, lead = _line_below(source, of_group[-1])
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


def _group(statement: ast.stmt, project: str, folder: str) -> int:
    """Return the group of an import, as sorters tell them apart: future, standard, others, project.

    Args:
      statement: an import.
      project: the root of the project, where the new import is of it.
      folder: of the file: what lies in it is of the project, too.
    """
    name = _name(statement)
    root = name.partition(".")[0]
    if name == "__future__":
        return 0
    is_beside = root == project or (root not in KNOWN and sources.holds_module(folder, root))
    if name.startswith(".") or (project and is_beside):
        return 3
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


def _line_below(source: Source, statement: ast.stmt) -> tuple[int, str]:
    """Return where the next line begins, and a line end where the file lacks it."""
    starts, line = source.line_starts, statement.end_lineno or 0
    at = starts[line] if line < len(starts) else len(source.code)
    return at, "" if source.code[:at].endswith((b"\n", b"\r")) else "\n"
