"""The imports of a migrated file: unused ones, and names read before they are bound."""

import ast
import os
import re
from collections.abc import Iterable, Iterator

from jax_dist.lint.model import scopes
from jax_dist.lint.model.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate.project_files import ProjectFiles
from jax_dist.migrate.sites import is_vendored

_EXAMPLE = re.compile(r"(?m)^\s*((?:>>>|\.\.\.) .*)$")


def tidied(before: Module, after: Module, files: ProjectFiles) -> bytes:
    """Return the code of `after` without the imports that only `before` used.

    What was unused before stays: it may be there for others.
    """
    path = os.path.abspath(before.source.path)
    if os.path.basename(path) == "__init__.py":
        return after.source.code
    exports = after.scopes.module.bindings.get("__all__", ())
    nodes = (node for binding in exports for node in ast.walk(binding.node))
    kept = {node.value for node in nodes if isinstance(node, ast.Constant)}
    edits: list[Edit] = []
    for statement in after.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        unused = [
            alias
            for alias in statement.names
            if (name := alias.asname or alias.name.partition(".")[0]) not in kept
            and alias.asname != alias.name  # `import a as a` re-exports
            and _is_read(before, name)
            and not _is_read(after, name)
            and not files.is_imported(path, name)
            and not _is_of_project(after, statement, alias)  # its import may have effects
        ]
        edits += _removals(after, statement, unused, edits[-1] if edits else None)
    edits += _unused_in_functions(after)
    return apply_edits(after.source.code, edits)


def _unused_in_functions(module: Module) -> Iterator[Edit]:
    """Yield the removals of imports inside of functions that an earlier migration wrote."""
    for scope, name, binding in module.imports():
        statement = module.statement(binding.node)
        is_nested = module.parent(statement) is not module.tree
        is_written = binding.target.partition(".")[0] == "jax_dist" or is_vendored(binding.target)
        is_alone = "," not in module.text(statement) and not any(
            map(str.strip, module.margins(statement))
        )
        if is_nested and is_written and is_alone and not module.reads(scope, name):
            yield module.line_edit(statement)


def _is_of_project(
    module: Module, statement: ast.Import | ast.ImportFrom, alias: ast.alias
) -> bool:
    """Return whether an import runs a file that is not of an installed library."""
    if isinstance(statement, ast.Import):
        return alias.name.partition(".")[0] not in KNOWN
    if is_vendored(f"{statement.module}.{alias.name}"):
        return False
    return bool(statement.level) or (statement.module or "").partition(".")[0] not in KNOWN


def _is_read(module: Module, name: str) -> bool:
    scope = module.scopes.module
    if name not in scope.bindings:
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    return bool(module.reads(scope, name)) or any(map(word.search, module.once(_strings)))


def _strings(module: Module) -> list[str]:
    """Return the strings that are code: annotations, `x: "jax_utils.T"`, and doctests."""
    constants = (node for node in module.scopes.parents if isinstance(node, ast.Constant))
    texts = [node.value for node in constants if isinstance(node.value, str)]
    return [line for text in texts for line in (_EXAMPLE.findall(text) or [text]) if _is_code(line)]


def _is_code(text: str) -> bool:
    if text.startswith((">>>", "...")):
        return True
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _removals(
    module: Module,
    statement: ast.Import | ast.ImportFrom,
    unused: list[ast.alias],
    above: Edit | None,
) -> list[Edit]:
    """Return the edits that take names out of an import; `above` is the edit before it."""
    start, end = module.span(statement)
    line = module.source.line_text(start)
    after = module.source.line_text(end)[module.source.position(end).column - 1 :]
    if not unused or "#" in module.text(statement) + after:
        return []  # a comment may be the reason why it is there
    if len(unused) == len(statement.names):
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
    runs: list[tuple[int, int]] = []  # of names that stand side by side
    for number in (statement.names.index(alias) for alias in unused):
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    return [_without_run(module, statement, *run) for run in runs]


def _next_line(module: Module, end: int) -> int:
    newline = re.compile(rb"[ \t]*(?:\r\n|\n|\r)").match(module.source.code, end)
    return end if newline is None else newline.end()


def without(module: Module, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Edit:
    """Return the edit that takes one of several names out of an import."""
    position = statement.names.index(alias)
    return _without_run(module, statement, position, position)


def _without_run(
    module: Module, statement: ast.Import | ast.ImportFrom, first: int, last: int
) -> Edit:
    names = statement.names
    if last + 1 < len(names):
        return Edit(module.span(names[first])[0], module.span(names[last + 1])[0], "")
    return Edit(module.span(names[first - 1])[1], module.span(names[last])[1], "")


def read_too_early(tree: ast.Module) -> dict[str, int]:
    """Return each name that is read above its first binding, with the line of the read."""
    walk = _Walk()
    walk.block(tree.body)
    return {name: line for name, line in walk.early.items() if name in walk.bound}


class _Walk:
    """The names bound and read so far, in the order of the text."""

    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.early: dict[str, int] = {}  # by name: the line of its first read

    def block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.read(*node.decorator_list, node.args.defaults, node.args.kw_defaults)
                self.bound.add(node.name)
            case ast.ClassDef():
                self.read(
                    *node.decorator_list, node.bases, [keyword.value for keyword in node.keywords]
                )
                outside = set(self.bound)
                self.block(node.body)
                self.bound = outside | {node.name}
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self.bound.add(alias.asname or alias.name.partition(".")[0])
            case ast.Assign(targets=targets, value=value):
                self.read(value, *targets)
                self.bind(*targets)
            case (
                ast.AnnAssign(target=target, value=value)
                | ast.AugAssign(target=target, value=value)
            ):
                self.read(value, target)
                self.bind(target)
            case ast.For() | ast.AsyncFor():
                self.read(node.iter)
                self.bind(node.target)
                self.block([*node.body, *node.orelse])
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self.read(item.context_expr)
                    self.bind(item.optional_vars)
                self.block(node.body)
            case ast.Try() | ast.TryStar():
                self.block(node.body)
                for handler in node.handlers:
                    self.read(handler.type)
                    self.bound.update(filter(None, [handler.name]))
                    self.block(handler.body)
                self.block([*node.orelse, *node.finalbody])
            case ast.If() | ast.While():
                self.read(node.test)
                self.block([*node.body, *node.orelse])
            case ast.Match():
                self.read(node.subject)
                for case in node.cases:
                    self.bind(case.pattern)
                    self.block(case.body)
            case _:
                self.read(node)

    def read(self, *nodes: ast.AST | Iterable[ast.AST | None] | None) -> None:
        """Note the names that expressions read when they are computed."""
        waiting: list[ast.AST | None] = []
        for node in nodes:
            waiting += [node] if node is None or isinstance(node, ast.AST) else node
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.NamedExpr):
                self.bind(node.target)
            if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
                self.comprehension(node)
            elif isinstance(node, ast.Lambda):
                waiting += [*node.args.defaults, *node.args.kw_defaults]
            elif isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Load) and node.id not in self.bound:
                    self.early.setdefault(node.id, node.lineno)
            elif node is not None:
                waiting += reversed(list(ast.iter_child_nodes(node)))

    def comprehension(self, node: scopes.Comprehension) -> None:
        """Its targets are bound inside it only."""
        outside = set(self.bound)
        for generator in node.generators:
            self.read(generator.iter)
            self.bind(generator.target)
            self.read(*generator.ifs)
        self.read(*([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]))
        self.bound = outside

    def bind(self, *targets: ast.AST | None) -> None:
        for target in filter(None, targets):
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.bound.add(node.id)
                elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                    self.bound.add(node.name)
                elif isinstance(node, ast.MatchMapping) and node.rest:
                    self.bound.add(node.rest)
