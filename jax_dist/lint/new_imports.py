"""Edits that add and remove imports, and a file with its fixes made.

A new import stands below the statement that first binds jax or flax: all that a program has to do
before it imports jax, such as setting `os.environ`, stays above both.
"""

import ast
import functools
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Sequence

from jax_dist.lint.findings import Edit, Fix, apply_edits
from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.lint.model.sources import Source

_IMPORTS = (ast.Import, ast.ImportFrom)
_WIDTH = 79  # of a line that takes another name
_FUTURE, _STANDARD, _OTHER, _PROJECT = range(4)  # the groups of imports, in isort's order


def place_imports(module: Module, fixes: Iterable[Fix]) -> bytes:
    """Return the code with all fixes made, which must not clash, and their imports added."""
    fixes, source = list(fixes), module.source
    edits = [edit for fix in fixes for edit in fix.edits]
    source = source.edit(apply_edits(source.code, edits))
    lines = dict.fromkeys(line for fix in fixes for line in fix.imports)
    # One by one, since each may join the statement of the one before; the project's own last.
    for line in sorted(lines, key=lambda line: line.split()[1].partition(".")[0] not in KNOWN):
        tree = sources.parse(source.python)
        if line not in map(ast.unparse, filter(_is_import, tree.body)):
            merges = (_merged_import(source, statement, line) for statement in tree.body)
            edit = next(filter(None, merges), None) or _import_edit(source, tree, line)
            source = source.edit(apply_edits(source.code, [edit]))
    return source.code


def add_block(source: Source, text: str) -> Source:
    """Return the file with the definitions `text` below its imports, in their notebook cell."""
    imports = _import_block(sources.parse(source.python))
    start, line_end = _line_below(source, imports[-1]) if imports else (0, "")
    after = source.code[start:]
    blank_lines = len(list(itertools.takewhile(lambda row: not row.strip(), after.splitlines())))
    gap = "\n" * max(2 - blank_lines, 0) if after.strip() else ""  # two blank lines below
    edit = Edit(start, start, f"{line_end}\n\n{text.strip()}\n{gap}")
    return source.edit(apply_edits(source.code, [edit]))


def remove_items(module: Module, items: Sequence[ast.AST], gone: Collection[ast.AST]) -> list[Edit]:
    """Return the edits that remove some items of a row, but not all, and their commas.

    Without `b` and `d`, `import a, b, c, d` is `import a, c`: "b, " and ", d" are removed.
    """
    spans = [module.span(item) for item in items]
    last_kept = max((n for n, item in enumerate(items) if item not in gone), default=0)
    edits = [
        Edit(spans[index][0], spans[index + 1][0], "")
        for index, item in enumerate(items[:last_kept])
        if item in gone
    ]
    start, end = spans[last_kept][1], spans[-1][1]
    return [*edits, Edit(start, end, "")] if start < end else edits


def _merged_import(source: Source, statement: ast.stmt, line: str) -> Edit | None:
    """Return the edit that makes `from a import b` with the line `from a import c` one import.

    None if `statement` is another one, is not written plainly, or would be too wide.
    """
    new = ast.parse(line).body[0]
    if not (isinstance(statement, ast.ImportFrom) and isinstance(new, ast.ImportFrom)):
        return None
    home = _name(statement)
    if statement.col_offset or home != _name(new) or home.startswith("jax."):
        return None
    names = [*map(ast.unparse, statement.names)]
    all_names = sorted({*names, *map(ast.unparse, new.names)}, key=str.lower)
    joined = f"from {home} import {', '.join(all_names)}"
    start = source.line_starts[statement.lineno - 1]
    end = start + (statement.end_col_offset or 0)
    is_plain = source.code[start:end].decode() == f"from {home} import {', '.join(names)}"
    return Edit(start, end, joined) if is_plain and len(joined) <= _WIDTH else None


def _import_block(tree: ast.Module) -> list[ast.stmt]:
    """Return the first import of jax and the imports right below it.

    Without an import of jax: the docstring, if there is one, and the imports below that.
    """
    jax_imports = [statement for statement in tree.body if _binds_jax(statement)]
    if jax_imports:  # one inside of an `if` only where there is no other
        first = [min(jax_imports, key=lambda statement: isinstance(statement, ast.If))]
    else:
        first = [statement for statement in tree.body[:1] if isinstance(statement, ast.Expr)]
    below = tree.body[tree.body.index(first[0]) + 1 :] if first else tree.body
    return [*first, *itertools.takewhile(_is_import, below)]


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, _IMPORTS)


def _binds_jax(statement: ast.stmt) -> bool:
    """Return whether a statement imports jax, flax or jaxlib as the module runs.

    An import inside of a def, or for type checkers only, does not count.
    """
    is_def = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    is_for_types = isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)
    if is_def or is_for_types:
        return False
    imports = [node for node in ast.walk(statement) if isinstance(node, _IMPORTS)]
    aliases = [alias for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names = [*map(_name, imports), *(alias.name for alias in aliases)]
    return any(name.partition(".")[0] in ("jax", "flax", "jaxlib") for name in names)


def _import_edit(source: Source, tree: ast.Module, line: str) -> Edit:
    """Return the edit that adds an import to its group, as a rule below the import of jax."""
    code, block, new = source.code, _import_block(tree), ast.parse(line).body[0]
    if not block:  # below the comments at the top: a licence, `#!`, the encoding
        rows = code.splitlines(keepends=True)
        start = sum(map(len, itertools.takewhile(lambda row: row.startswith(b"#"), rows)))
        return Edit(start, start, f"{line}\n\n")
    root = _name(new).partition(".")[0]
    project = "" if root in KNOWN or root in sys.stdlib_module_names else root
    group = functools.partial(_group, project=project, folder=os.path.dirname(source.path))
    is_of_group = lambda statement: _is_import(statement) and group(statement) == group(new)
    above_block = tree.body[: tree.body.index(block[0])]
    all_of_group = _first_block(code, list(filter(is_of_group, [*above_block, *block])))
    if group(new) == _STANDARD and any(map(is_of_group, above_block)):
        block = list(filter(_is_import, above_block))  # the standard library may stand above jax
    of_group = _first_block(code, list(filter(is_of_group, block)))
    if of_group:
        return _edit_in_group(source, of_group, block[0], line, all_of_group)
    # A new group, behind a blank line.
    earlier = [node for node in block if not _is_import(node) or group(node) < group(new)]
    start, line_end = _line_below(source, earlier[-1] if earlier else block[0])
    blank_line = "\n" if earlier else ""
    return Edit(start, start, f"{line_end}{blank_line}{line}\n")


def _edit_in_group(
    source: Source, group: list[ast.stmt], first: ast.stmt, line: str, order: list[ast.stmt]
) -> Edit:
    """Return the edit that adds an import to its group, as those of `order` are sorted."""
    # The order of isort, `import` before `from`, or that of Google, in which both forms are mixed.
    isort_key = lambda node: (isinstance(node, ast.ImportFrom), _name(node).lower())
    google_key = lambda node: (_name(node).lower(), isinstance(node, ast.ImportFrom))
    key = isort_key if sorted(order, key=isort_key) == order else google_key
    new = ast.parse(line).body[0]
    successor = next((x for x in group if x is not first and key(x) > key(new)), None)
    if successor is not None and not successor.col_offset:
        start = source.line_starts[successor.lineno - 1]
        (line_above,) = source.code[:start].splitlines()[-1:]
        if not line_above.lstrip().startswith(b"#"):  # a comment belongs to what is below it
            return Edit(start, start, f"{line}\n")
    start, line_end = _line_below(source, group[-1])
    return Edit(start, start, f"{line_end}{line}\n")


def _first_block(code: bytes, imports: list[ast.stmt]) -> list[ast.stmt]:
    """Return the first of some imports, up to the first blank line between two of them."""
    lines = code.splitlines()
    for count, (upper, lower) in enumerate(itertools.pairwise(imports), start=1):
        between = lines[upper.end_lineno or upper.lineno : lower.lineno - 1]
        if not all(map(bytes.strip, between)):
            return imports[:count]
    return imports


def _group(statement: ast.stmt, project: str, folder: str) -> int:
    """Return the group in which isort puts an import.

    `project` is the root package of the new import, or "" if that is a known or standard one.
    Modules in `folder`, beside the file, are of the project too.
    """
    name = _name(statement)
    root = name.partition(".")[0]
    if name == "__future__":
        return _FUTURE
    is_beside = root == project or (root not in KNOWN and sources.holds_module(folder, root))
    if name.startswith(".") or (project and is_beside):
        return _PROJECT
    return _STANDARD if root in sys.stdlib_module_names else _OTHER


def _name(statement: ast.stmt) -> str:
    """Return the first module that an import names, such as `".utils"` or `"jax.numpy"`."""
    if isinstance(statement, ast.ImportFrom):
        return "." * statement.level + (statement.module or "")
    return statement.names[0].name  # type: ignore[attr-defined] # an import


def _line_below(source: Source, statement: ast.stmt) -> tuple[int, str]:
    """Return the offset of the line below a statement, and "\\n" if no line end precedes it."""
    starts, line = source.line_starts, statement.end_lineno or 0
    start = starts[line] if line < len(starts) else len(source.code)
    return start, "" if source.code[:start].endswith((b"\n", b"\r")) else "\n"
