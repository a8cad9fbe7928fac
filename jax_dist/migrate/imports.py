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
_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def tidy(before: Module, after: Module) -> bytes:
    """Return the code of `after` without the definitions and imports that only `before` used.

    What was unused before stays: it may be there for others.
    """
    if os.path.basename(before.source.path) == "__init__.py":
        return after.source.code
    edits: list[Edit] = []
    for statement in after.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        unused = [
            alias
            for alias in statement.names
            if alias.asname != alias.name  # `import a as a` re-exports
            and _is_read(before, name := alias.asname or alias.name.partition(".")[0])
            and not _is_read(after, name)
            and not _is_of_project(statement, alias)  # its import may have effects
        ]
        edits += _removals(after, statement, unused, edits[-1] if edits else None)
    edits += _unused_definitions(before, after)
    return apply_edits(after.source.code, edits)


def _unused_definitions(before: Module, after: Module) -> Iterator[Edit]:
    """Yield the removals of definitions that only `before` read, such as `n = len(devices)`."""
    was_read = {
        (_names(before, scope), name)
        for scope in before.scopes.all
        for name in scope.bindings
        if before.reads(scope, name)
    }
    for scope in after.scopes.all:
        for name, bindings in scope.bindings.items():
            is_private = scope is not after.scopes.module or name.startswith("_")
            is_unused = (_names(after, scope), name) in was_read and not after.reads(scope, name)
            is_made_here = [binding.kind for binding in bindings] in (["def"], ["assign"])
            if is_private and is_unused and is_made_here:
                statement = after.statement(bindings[0].node)
                body = getattr(after.parent(statement), "body", ())
                is_alone = len(body) == 1 or any(map(str.strip, after.margins(statement)))
                if _is_free_of_effects(after, statement) and not is_alone:
                    yield _remove_with_blank_lines(after, statement)


def _remove_with_blank_lines(module: Module, statement: ast.stmt) -> Edit:
    """Return the removal of a statement, with the blank lines that set it apart."""
    edit, code = module.line_edit(statement), module.source.code
    above = code[: edit.start].rstrip(b"\n \t")
    if above.endswith(b":"):  # it is the first of a body
        below = code[edit.end :]
        return Edit(edit.start, edit.end + len(below) - len(below.lstrip(b"\n")), "")
    return Edit(len(above) + 1, edit.end, "") if hasattr(statement, "body") and above else edit


def _names(module: Module, scope: NameScope) -> tuple[str, ...]:
    """Return the names of a scope and those around it, which identify it in both texts."""
    nodes = [scope.node, *module.ancestors(scope.node)] if scope.parent else []
    return tuple(getattr(node, "name", "") for node in nodes if isinstance(node, _NAMED))


def _is_free_of_effects(module: Module, statement: ast.stmt) -> bool:
    """Return whether a statement may go: it defines a function or calls functions in `_PURE`."""
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


def _is_read(module: Module, name: str) -> bool:
    """Return whether code, or a string that is code, reads a name of the module's level."""
    scope = module.scopes.module
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


def _removals(
    module: Module,
    statement: ast.Import | ast.ImportFrom,
    unused: list[ast.alias],
    above: Edit | None,
) -> list[Edit]:
    """Return the edits that take the names `unused` out of an import.

    `above` is the removal before it. Of two blank lines that a removal would join, one goes too.
    """
    before, after = module.margins(statement)
    if not unused or "#" in module.text(statement) + after:
        return []  # a comment may be the reason why it is there
    if len(unused) < len(statement.names):
        return remove_names(module, statement, unused)
    if before.strip() or after.strip():
        return []  # another statement shares its line
    edit, code = module.line_edit(statement), module.source.code
    top = edit.start if above is None or above.end != edit.start else above.start
    is_under_blank = not code[:top].removesuffix(b"\n").rpartition(b"\n")[2].strip()
    is_above_blank = is_under_blank and code[edit.end : edit.end + 1] == b"\n"
    return [Edit(edit.start, edit.end + is_above_blank, "")]
