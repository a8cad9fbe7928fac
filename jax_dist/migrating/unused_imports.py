"""Takes out imports that a migration has left without a use."""

import ast
import os
import re
from collections.abc import Callable, Collection

from jax_dist.checker.model import edits
from jax_dist.checker.model.findings import Edit
from jax_dist.checker.model.semantic_model import Module


def tidied(before: Module, after: Module, needed: Collection[str] = ()) -> bytes:
    """The code of `after` without the imports that only `before` used.

    What was unused before stays: it may be there for others.

    Args:
      before: the file as it was.
      after: the file with all edits made.
      needed: names that are to stay whatever uses them.
    """
    if os.path.basename(before.source.path) == "__init__.py":
        return after.source.code
    kept = _exported(after) | set(needed)
    used = _used_elsewhere(before)
    made: list[Edit] = []
    for statement in after.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        idle = [
            alias
            for alias in statement.names
            if (name := _bound(alias)) not in kept
            and alias.asname != alias.name  # `import a as a` says that it is for others
            and _reads(before, name)
            and not _reads(after, name)
            and not used(name)
        ]
        made += _removals(after, statement, idle, made[-1] if made else None)
    return edits.apply(after.source.code, made)


def _used_elsewhere(module: Module) -> Callable[[str], bool]:
    """Whether another file imports a name from this one, or reads it as an attribute."""
    graph = module.graph
    path = os.path.abspath(module.source.path)
    if graph is None:
        return lambda name: False
    return lambda name: not graph.is_whole or any(True for _ in graph.users(path, name))


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _reads(module: Module, name: str) -> bool:
    scope = module.scopes.module
    if name not in scope.bindings:
        return False
    return bool(module.reads(scope, name)) or _in_strings(module, name)


def _in_strings(module: Module, name: str) -> bool:
    """Annotations may be strings, and examples in docstrings run: `x: "jax_utils.T"`."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and word.search(node.value)
        for node in ast.walk(module.tree)
    )


def _exported(module: Module) -> set[str]:
    """The names in `__all__`."""
    names: set[str] = set()
    for binding in module.scopes.module.bindings.get("__all__", ()):
        for node in ast.walk(binding.node):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def _removals(
    module: Module,
    statement: ast.Import | ast.ImportFrom,
    idle: list[ast.alias],
    above: Edit | None,
) -> list[Edit]:
    """The edits that take names out of an import, or all of it; `above` is the edit before it."""
    start, end = module.span(statement)
    line = module.source.line_text(start)
    after = module.source.line_text(end)[module.source.position(end).column - 1 :]
    if not idle or "#" in module.text(statement) + after:
        return []  # a comment may be the reason why it is there
    if len(idle) == len(statement.names):
        if line.strip() != module.text(statement).split("\n")[0].strip() or after.strip():
            return []  # another statement shares its line
        top = start if above is None or above.end != start else above.start
        is_under_blank = (
            not module.source.code[:top].removesuffix(b"\n").rpartition(b"\n")[2].strip()
        )
        below = _next_line(module, end)
        if is_under_blank and not module.source.line_text(below).strip():
            below = _next_line(module, below)
        return [Edit(start, below, "")]
    return [_without(module, statement, alias) for alias in idle[:1]] if len(idle) == 1 else []


def _next_line(module: Module, end: int) -> int:
    code = module.source.code
    for newline in (b"\r\n", b"\n", b"\r"):
        if code.startswith(newline, end + len(code[end:]) - len(code[end:].lstrip(b" \t"))):
            return end + len(code[end:]) - len(code[end:].lstrip(b" \t")) + len(newline)
    return end


def _without(module: Module, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Edit:
    names = statement.names
    position = names.index(alias)
    if position + 1 < len(names):
        return Edit(module.span(alias)[0], module.span(names[position + 1])[0], "")
    return Edit(module.span(names[position - 1])[1], module.span(alias)[1], "")
