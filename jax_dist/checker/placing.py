"""Where new imports and definitions go, and a file with its fixes made."""

import ast
from collections.abc import Iterable

from jax_dist.checker import edits, modules
from jax_dist.checker.findings import Edit, Fix
from jax_dist.checker.modules import Module


def placed(module: Module, fixes: Iterable[Fix]) -> bytes:
    """The code with all fixes made: their edits, and once each what they import and define.

    Args:
      module: the file as it is.
      fixes: fixes that do not clash, as `edits.choose` gives them.
    """
    fixes = list(fixes)
    imports = list(dict.fromkeys(line for fix in fixes for line in fix.imports))
    definitions = list(dict.fromkeys(text for fix in fixes for text in fix.definitions))
    made = [edit for fix in fixes for edit in fix.edits]
    code = module.source.code
    newline = edits.newline_of(code)
    code = edits.apply(code, made, newline)
    if not (imports or definitions):
        return code
    # Asked of the new text: an edit may have changed the imports themselves.
    tree = modules.parse(code)
    return edits.apply(code, [_insertion(code, tree, imports, definitions)], newline)


def _insertion(code: bytes, tree: ast.Module, imports: list[str], definitions: list[str]) -> Edit:
    present = {ast.unparse(node) for node in tree.body if isinstance(node, _IMPORTS)}
    imports = sorted(line for line in imports if line not in present)
    definitions = [text for text in definitions if not _defines(tree, text)]
    after = _last_import(tree)
    starts = [0, *_line_ends(code)]
    if after is None:
        at, before = (0, "") if not tree.body else (starts[tree.body[0].lineno - 1], "")
    else:
        at = starts[after.end_lineno] if after.end_lineno < len(starts) else len(code)  # type: ignore[operator,index]
        before = "" if code[:at].endswith((b"\n", b"\r")) else "\n"
    text = "".join(f"{line}\n" for line in imports)
    if definitions:
        text += "".join(f"\n\n{each.strip()}\n" for each in definitions)
        if not _blank_follows(code, at):
            text += "\n\n"
    return Edit(at, at, before + text if text else "")


_IMPORTS = (ast.Import, ast.ImportFrom)


def _last_import(tree: ast.Module) -> ast.stmt | None:
    """The last statement of the first run of imports; of the docstring where there is none.

    Imports after other code may come late for a reason.
    """
    last: ast.stmt | None = None
    for statement in tree.body:
        if isinstance(statement, _IMPORTS):
            last = statement
        elif last is None and isinstance(statement, ast.Expr):
            if isinstance(statement.value, ast.Constant):  # the docstring
                last = statement
        else:
            break
    return last


def _defines(tree: ast.Module, text: str) -> bool:
    name = ast.parse(text).body[0].name  # type: ignore[attr-defined] # a def
    return any(getattr(statement, "name", None) == name for statement in tree.body)


def _line_ends(code: bytes) -> list[int]:
    ends: list[int] = []
    for line in code.splitlines(keepends=True):
        ends.append((ends[-1] if ends else 0) + len(line))
    return ends


def _blank_follows(code: bytes, at: int) -> bool:
    return code[at:].replace(b"\r", b"").startswith(b"\n") or not code[at:].strip()
