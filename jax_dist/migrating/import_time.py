"""Names that a module reads while it is imported, before it has bound them.

Statements are taken in the order of the text, branches and loops as if each ran once; the bodies of
functions run later, and are not looked at. What the module binds nowhere comes from elsewhere: a
builtin, a magic of a notebook, `import *`.
"""

import ast
from collections.abc import Iterable

from jax_dist.checker.model import scopes

_Late = dict[str, int]  # by name: the line of its first read that comes too early


def read_too_early(tree: ast.Module) -> _Late:
    """Each name that is read above its first binding, with the line of the read."""
    walk = _Walk()
    walk.block(tree.body)
    return {name: line for name, line in walk.early.items() if name in walk.bound}


class _Walk:
    def __init__(self) -> None:
        self.bound: set[str] = set()
        self.early: _Late = {}

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
