"""Removal of the imports and definitions that nothing in a migrated file uses any more."""

import ast
import os
import re
from collections.abc import Iterator

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model import sources
from jax_dist.lint.model.scopes import NameScope
from jax_dist.lint.model.semantic_model import KNOWN, Module, once
from jax_dist.lint.new_imports import remove_names
from jax_dist.migrate.renames import is_vendored

# Calls without effects, whose results a migration may leave unread.
_PURE = ("jax.devices", "jax.local_devices", "jax.sharding.Mesh", "jax.NamedSharding")
_PURE += ("jax.sharding.NamedSharding", "jax.P", "jax.sharding.PartitionSpec", "numpy.array")


def tidy(before: Module, after: Module) -> bytes:
    """Return the code of `after` without the imports and definitions that only `before` reads."""
    if os.path.basename(before.source.path) == "__init__.py":
        return after.source.code
    edits: list[Edit] = []
    for statement in after.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [x for x in statement.names if not _is_of_project(statement, x)]
            names = [x for x in names if x.asname != x.name]  # `import a as a` is a re-export
            unused = [x for x in names if _is_read(before, x) and not _is_read(after, x)]
            edits += _import_edits(after, statement, unused, edits[-1] if edits else None)
    edits += _unused_definitions(before, after)
    return apply_edits(after.source.code, edits)


def _unused_definitions(before: Module, after: Module) -> Iterator[Edit]:
    """Yield the removals of local and `_private` definitions that only `before` reads."""
    read_before = {
        (_qualified_scope(before, scope), name)
        for scope in before.scopes.all
        for name in scope.bindings
        if before.reads(scope, name)
    }
    for scope in after.scopes.all:
        for name, bindings in scope.bindings.items():
            was_read = (_qualified_scope(after, scope), name) in read_before
            is_public = scope is after.scopes.module and not name.startswith("_")
            if is_public or not was_read or after.reads(scope, name):
                continue
            if [binding.kind for binding in bindings] not in (["def"], ["assign"]):
                continue
            statement = after.statement(bindings[0].node)
            is_only_one = len(getattr(after.parent(statement), "body", ())) == 1
            shares_line = any(map(str.strip, after.margins(statement)))
            if _has_no_effects(after, statement) and not is_only_one and not shares_line:
                yield _remove_with_blank_lines(after, statement)


def _remove_with_blank_lines(module: Module, statement: ast.stmt) -> Edit:
    """Return the removal of a statement, with the blank lines that set it apart."""
    edit, code = module.line_edit(statement), module.source.code
    above = code[: edit.start].rstrip(b"\n \t")
    if above.endswith(b":"):  # it is the first of a body: with those below it
        return Edit(edit.start, len(code) - len(code[edit.end :].lstrip(b"\n")), "")
    is_def = isinstance(statement, ast.FunctionDef)
    return Edit(len(above) + 1, edit.end, "") if is_def and above else edit


def _qualified_scope(module: Module, scope: NameScope) -> tuple[str, ...]:
    """Return the names of a scope and of those around it: ("step", "Trainer") of its method."""
    nodes = [scope.node, *module.ancestors(scope.node)] if scope.parent else []
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return tuple(getattr(node, "name", "") for node in nodes if isinstance(node, named))


def _has_no_effects(module: Module, statement: ast.stmt) -> bool:
    """Return whether a statement only defines a function, or a variable by calls of `_PURE`."""
    match statement:
        case ast.FunctionDef(decorator_list=[]):
            return True
        case ast.Assign(targets=[ast.Name()], value=value):
            calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
            is_pure = calls and all(module.qualified_name(call.func) in _PURE for call in calls)
            return isinstance(value, ast.Lambda) or bool(is_pure)
    return False


def _is_of_project(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> bool:
    """Return whether an import runs a file of the project, which may have effects."""
    if isinstance(statement, ast.Import):
        return alias.name.partition(".")[0] not in KNOWN
    home = "." * statement.level + (statement.module or "")
    return home.partition(".")[0] not in KNOWN and not is_vendored(f"{home}.{alias.name}")


def _is_read(module: Module, alias: ast.alias) -> bool:
    """Return whether code, or a string that is code, reads an imported name."""
    name, scope = alias.asname or alias.name.partition(".")[0], module.scopes.module
    if name not in scope.bindings:
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    return bool(module.reads(scope, name)) or any(map(word.search, _strings(module)))


@once
def _strings(module: Module) -> list[str]:
    """Return the strings that are code, such as annotations, entries of `__all__` and doctests."""
    constants = (node for node in module.scopes.parents if isinstance(node, ast.Constant))
    texts = [node.value for node in constants if isinstance(node.value, str)]
    return [text for text in texts if ">>>" in text or sources.parses(text.strip().encode())]


def _import_edits(
    module: Module,
    statement: ast.Import | ast.ImportFrom,
    unused: list[ast.alias],
    edit_above: Edit | None,
) -> list[Edit]:
    """Return the edits that remove the names `unused` from an import without a comment.

    If all of an import that stands between blank lines goes, so does the blank line below it;
    imports right above it that go, by the edit `edit_above`, do not count.
    """
    before, after = module.margins(statement)
    if not unused or "#" in module.text(statement) + after:
        return []
    if len(unused) < len(statement.names):
        return remove_names(module, statement, unused)
    if before.strip() or after.strip():  # it shares its line with another statement
        return []
    edit, code = module.line_edit(statement), module.source.code
    start = edit_above.start if edit_above and edit_above.end == edit.start else edit.start
    line_above = code[:start].removesuffix(b"\n").rpartition(b"\n")[2]
    is_between_blanks = not line_above.strip() and code[edit.end : edit.end + 1] == b"\n"
    return [Edit(edit.start, edit.end + 1 if is_between_blanks else edit.end, "")]
