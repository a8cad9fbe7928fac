"""Removal of the imports and definitions that nothing in a migrated file uses any more."""

import ast
import os
from collections.abc import Iterator

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.new_imports import remove_items

# Calls without effects, whose results a migration may leave unread.
_PURE = ("jax.devices", "jax.local_devices", "jax.sharding.Mesh", "jax.NamedSharding")
_PURE += ("jax.sharding.NamedSharding", "jax.P", "jax.sharding.PartitionSpec", "numpy.array")
_PURE += ("jax.device_count", "jax.local_device_count")


def tidy(before: Module, after: Module) -> bytes:
    """Return the code of `after` without the imports and definitions that only `before` reads."""
    if os.path.basename(before.source.path) == "__init__.py":
        return after.source.code
    edits: list[Edit] = []
    for statement in after.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            unused = [x for x in statement.names if _is_read(before, x) and not _is_read(after, x)]
            edits += _import_edits(after, statement, unused)
    edits += _unused_definitions(before, after)
    return apply_edits(after.source.code, edits)


def _unused_definitions(before: Module, after: Module) -> Iterator[Edit]:
    """Yield the removals of local and `_private` definitions that only `before` reads."""
    read_before = {
        (getattr(scope.node, "name", ""), name)  # of the function, and of what it reads
        for scope in before.scopes.all
        for name in scope.bindings
        if before.reads(scope, name)
    }
    for scope in after.scopes.all:
        for name, bindings in scope.bindings.items():
            was_read = (getattr(scope.node, "name", ""), name) in read_before
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


def _is_read(module: Module, alias: ast.alias) -> bool:
    """Return whether code reads an imported name."""
    name, scope = alias.asname or alias.name.partition(".")[0], module.scopes.module
    return name in scope.bindings and bool(module.reads(scope, name))


def _import_edits(
    module: Module, statement: ast.Import | ast.ImportFrom, unused: list[ast.alias]
) -> list[Edit]:
    """Return the edits that remove the names `unused` from an import without a comment.

    If all of an import that stands between blank lines goes, so does the blank line below it.
    """
    before, after = module.margins(statement)
    if not unused or "#" in module.text(statement) + after:
        return []
    if len(unused) < len(statement.names):
        return remove_items(module, statement.names, unused)
    if before.strip() or after.strip():  # it shares its line with another statement
        return []
    edit, code = module.line_edit(statement), module.source.code
    line_above = code[: edit.start].removesuffix(b"\n").rpartition(b"\n")[2]
    is_between_blanks = not line_above.strip() and code[edit.end : edit.end + 1] == b"\n"
    return [Edit(edit.start, edit.end + 1 if is_between_blanks else edit.end, "")]
