"""The imports of a migrated file: names read too early or elsewhere, unused ones, pmap's home.

Names are read too early if a module reads them while it is imported, before it has bound them.
Statements are taken in the order of the text, branches and loops as if each ran once; the bodies of
functions run later, and are not looked at. What the module binds nowhere comes from elsewhere: a
builtin, a magic of a notebook, `import *`.
"""

import ast
import functools
import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence

from jax_dist.lint.model import pmaps, scopes
from jax_dist.lint.model.findings import Edit, apply_edits
from jax_dist.lint.model.import_graph import stem_of
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.scopes import Binding
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate import process_signs

_EXAMPLE = re.compile(r"(?m)^\s*((?:>>>|\.\.\.) .*)$")


def tidied(before: Module, after: Module, needed: Collection[str] = ()) -> bytes:
    """The code of `after` without the imports that only `before` used, but for those `needed`.

    What was unused before stays: it may be there for others.
    """
    path, graph = os.path.abspath(before.source.path), before.graph
    if os.path.basename(path) == "__init__.py":
        return after.source.code
    exports = after.scopes.module.bindings.get("__all__", ())
    nodes = (node for binding in exports for node in ast.walk(binding.node))
    kept = {node.value for node in nodes if isinstance(node, ast.Constant)} | set(needed)
    used_elsewhere = lambda name: (
        graph is not None and (not graph.is_whole or any(True for _ in graph.users(path, name)))
    )
    made: list[Edit] = []
    for statement in after.tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        idle = [
            alias
            for alias in statement.names
            if (name := alias.asname or alias.name.partition(".")[0]) not in kept
            and alias.asname != alias.name  # `import a as a` says that it is for others
            and _reads(before, name)
            and not _reads(after, name)
            and not used_elsewhere(name)
            and not _is_of_project(after, statement, alias)  # which may act while it is imported
        ]
        made += _removals(after, statement, idle, made[-1] if made else None)
    return apply_edits(after.source.code, made)


def _is_of_project(
    module: Module, statement: ast.Import | ast.ImportFrom, alias: ast.alias
) -> bool:
    """Whether an import runs a file that is not of an installed library."""
    if isinstance(statement, ast.Import):
        return alias.name.partition(".")[0] not in KNOWN
    return bool(statement.level) or (statement.module or "").partition(".")[0] not in KNOWN


def is_used_elsewhere(module: Module, name: str) -> bool:
    """Whether another file may mean a name of this one, or an attribute of its objects."""
    graph = module.graph
    if graph is None:
        return False
    path = os.path.abspath(module.source.path)
    find = graph.users if name in module.scopes.module.bindings else graph.readers
    word, dotted = (
        re.compile(rb"\b%b%b\b" % (before, re.escape(name.encode())))
        for before in (b"", re.escape(stem_of(path).encode()) + rb"[.:]")
    )
    return any(True for _ in itertools.chain(find(path, name), graph.loaders(path, name))) or any(
        (word if is_import else dotted).search(data) for is_import, data in module.once(_scripts)
    )


def _scripts(module: Module) -> list[tuple[bool, bytes]]:
    """What speaks of the file and is no Python by its name, and whether it imports it.

    Scripts of the shell and others; settings, as in `target: train.fit`.
    """
    graph = module.graph
    if graph is None:
        return []
    stem = re.escape(stem_of(os.path.abspath(module.source.path)).encode())
    imported = re.compile(
        rb"\bfrom\s+(?:[\w.]*\.)?%b\s+import\b|\bimport\s+(?:[\w.]+,\s*)*(?:[\w.]*\.)?%b\b"
        % (stem, stem)
    )
    if _scripts not in graph.known:  # all files of the project ask
        texts = functools.partial(process_signs.project_texts, every=True)
        graph.known[_scripts] = [*texts(graph.roots), *texts(graph.near, deep=False)]
    texts = graph.known[_scripts]
    return [(imported.search(data) is not None, data) for _, data in texts if stem in data]


def _reads(module: Module, name: str) -> bool:
    scope = module.scopes.module
    if name not in scope.bindings:
        return False
    word = re.compile(rf"\b{re.escape(name)}\b")
    return bool(module.reads(scope, name)) or any(map(word.search, module.once(_strings)))


def _strings(module: Module) -> list[str]:
    """Those that are code: annotations, `x: "jax_utils.T"`, and examples, which run; no prose."""
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
    runs: list[tuple[int, int]] = []  # of names that stand side by side
    for number in (statement.names.index(each) for each in idle):
        first = runs.pop()[0] if runs and runs[-1][1] == number - 1 else number
        runs.append((first, number))
    return [_without_run(module, statement, *run) for run in runs]


def _next_line(module: Module, end: int) -> int:
    found = re.compile(rb"[ \t]*(?:\r\n|\n|\r)").match(module.source.code, end)
    return end if found is None else found.end()


def without(module: Module, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> Edit:
    """Takes an alias out of several, with the comma that belongs to it."""
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
    """Each name that is read above its first binding, with the line of the read."""
    walk = _Walk()
    walk.block(tree.body)
    return {name: line for name, line in walk.early.items() if name in walk.bound}


class _Walk:
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
                self.read(*node.decorator_list, node.bases, [each.value for each in node.keywords])
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
        """Notes the names that expressions read when they are computed."""
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
        for each in node.generators:
            self.read(each.iter)
            self.bind(each.target)
            self.read(*each.ifs)
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


_LONGEST = 20  # files that hand a name on; more are a circle


def definer(module: Module, project: Project, reference: ast.expr) -> str | None:
    """The other file of the project that binds a name which is used here.

    Files that only import it and hand it on are looked through. None where the name, or attribute
    such as `constants.pmap`, is bound in this file, or comes from no file of the project.
    """
    names: list[str] = []
    while isinstance(reference, ast.Attribute):
        names.insert(0, reference.attr)
        reference = reference.value
    if not isinstance(reference, ast.Name):
        return None
    names.insert(0, reference.id)
    bound = module.scope(reference).lookup(reference.id)
    name = _imported(module, names, None if bound is None else bound[1])
    path, home = os.path.abspath(module.source.path), None
    for _ in range(_LONGEST):
        found = None
        parts = [] if name is None else name.split(".")
        for length in range(len(parts) - 1, 0, -1):  # the longest part that is a module
            found = project.file(".".join(parts[:length]), os.path.dirname(path))
            if found is not None:
                names = parts[length:]
                break
        if found is None:
            return home
        path = home = found
        other = project.opened(path)
        bindings = None if other is None else other.scopes.module.bindings.get(names[0])
        name = None if other is None else _imported(other, names, bindings)
    return home


def line_of_alias(path: str, project: Project, reference: ast.expr) -> int:
    """The line in which a file gives jax.pmap the name of a reference; 0 where that is not seen."""
    other, name = project.opened(path), scopes.last_name(reference)
    if other is None:
        return 0
    bound = [other.statement(each.node) for each in other.scopes.module.bindings.get(name, ())]
    found = (each.reference for each in pmaps.sites(other))
    return next((each.lineno for each in found if other.statement(each) in bound), 0)


def _imported(module: Module, names: list[str], bindings: Sequence[Binding] | None) -> str | None:
    """What the module imports under the first of the names, with the others behind it."""
    if bindings is None:
        bases = module.scopes.module.star_imports
        return ".".join((module.absolute(bases[0]), *names)) if len(bases) == 1 else None
    if bindings[0].kind != "import":
        return None
    return ".".join((module.absolute(bindings[0].target), *names[1:]))
