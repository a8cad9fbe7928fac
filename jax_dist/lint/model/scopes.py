"""Which names a file binds, in which scope, and where it reads them: one pass over its tree.

The pass also records each node's parent; in a dictionary, since attributes of the nodes would make
reference cycles, whose memory waits for the garbage collector. It is the hot loop of the linter: it
visits one scope at a time, with a stack of the nodes that it has not visited.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

# "outer": bound in a function that declares the name global or nonlocal, and may run at any time.
_BindingKind: TypeAlias = Literal["import", "assign", "def", "class", "parameter", "other", "outer"]


@dataclasses.dataclass(slots=True, eq=False)
class Binding:
    """One place that gives a name a value."""

    kind: _BindingKind
    node: ast.AST  # the statement, or the name or parameter itself
    value: ast.expr | None = None  # of `name = value`
    target: str = ""  # of an import: what it means, "jax.lax"; relative ones begin with dots


@dataclasses.dataclass(slots=True, eq=False)
class NameScope:
    """A module, class, function, lambda or comprehension."""

    node: ast.AST
    parent: "NameScope | None"
    bindings: dict[str, list[Binding]] = dataclasses.field(default_factory=dict)
    loads: dict[str, list[ast.Name]] = dataclasses.field(default_factory=dict)
    outer: dict[str, bool] = dataclasses.field(default_factory=dict)  # is `global`, not `nonlocal`

    def bind(self, name: str, binding: Binding) -> None:
        """Add one binding of a name."""
        self.bindings.setdefault(name, []).append(binding)

    def lookup(self, name: str) -> "tuple[NameScope, list[Binding]] | None":
        """Return the scope that a load of `name` here reads from, and its bindings of the name."""
        scope: NameScope | None = self
        while scope is not None:
            # Methods do not see the names of their class.
            is_visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if is_visible and name in scope.bindings and name not in scope.outer:
                return scope, scope.bindings[name]
            scope = scope.parent
        return None

    @property
    def around_comprehensions(self) -> "NameScope":
        """The scope of the function, class or module around a comprehension."""
        scope = self
        while isinstance(scope.node, Comprehension) and scope.parent is not None:
            scope = scope.parent
        return scope


class Scopes:
    """All scopes of a file, in no order; `build` fills them."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = NameScope(tree, None)
        self.all: list[NameScope] = [self.module]
        self.of: dict[ast.AST, NameScope] = {tree: self.module}  # by the node that makes it
        self.nodes: list[Any] = []  # all but names
        self.parents: dict[Any, Any] = {}  # the node around each node but the module
        # By scope those right inside it; a list in each scope would make reference cycles.
        self.children: dict[NameScope, list[NameScope]] = {}
        # The scopes around decorators, defaults and the like; a cache for other nodes.
        self.around: dict[ast.AST, NameScope] = {tree: self.module}
        self._statements: dict[ast.AST, ast.stmt] = {}  # around other nodes, a cache

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around, innermost first."""
        parents, tree = self.parents, self.module.node
        while node is not tree:
            node = parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that holds the node, perhaps the node itself."""
        climbed: list[ast.AST] = []
        while not isinstance(node, ast.stmt):
            climbed.append(node)
            node = self._statements.get(node) or self.parents[node]
        self._statements.update(dict.fromkeys(climbed, node))  # climb deep expressions once
        return node

    def scope(self, node: ast.AST) -> NameScope:
        """Return the scope in which a node's names are looked up; of a def, the one around it."""
        known_scope = self.around.get(node)
        if known_scope is not None:
            return known_scope
        climbed: list[ast.AST] = []
        while known_scope is None:  # up to a def or the like, whose scope the node is in
            climbed.append(node)
            node = self.parents[node]
            known_scope = self.of.get(node) or self.around.get(node)
        self.around.update(dict.fromkeys(climbed, known_scope))  # climb deep expressions once
        return known_scope

    @functools.cached_property
    def fields(self) -> dict[ast.AST, str]:
        """The field of its parent, as "orelse", that holds a statement or the body of a lambda."""
        fields: dict[ast.AST, str] = {}
        for node in self.nodes:
            if isinstance(node, _NODES_WITH_BODY):
                for field in ("body", "orelse", "finalbody"):
                    block = getattr(node, field, None)
                    # The body of a lambda, and both branches of `a if c else b`, are no list.
                    children = block if isinstance(block, list) else filter(None, [block])
                    fields.update(dict.fromkeys(children, field))
        return fields

    @functools.cached_property
    def bound(self) -> dict[tuple[ast.AST, str], tuple[NameScope, Binding]]:
        """The scope and binding of `x = value` by `(value, "x")`, of `def f` by `(def, "f")`."""
        return {
            (binding.value or binding.node, name): (scope, binding)
            for scope in self.all
            for name, bindings in scope.bindings.items()
            for binding in bindings
            if binding.kind in ("assign", "def")
        }

    @functools.cached_property
    def loads(self) -> dict[tuple[NameScope, str], list[ast.Name]]:
        """Every load of a name, by line, under `(the scope that binds the name, name)`."""
        by_binder: dict[tuple[NameScope, str], list[ast.Name]] = {}
        for scope in self.all:
            for name, loads in scope.loads.items():
                scope_and_bindings = scope.lookup(name)
                if scope_and_bindings is not None:
                    by_binder.setdefault((scope_and_bindings[0], name), []).extend(loads)
        for loads in by_binder.values():
            loads.sort(key=place)
        return by_binder


_NODE_CLASSES = [kind for kind in vars(ast).values() if isinstance(kind, type)]
_NODES_WITH_BODY = tuple(kind for kind in _NODE_CLASSES if "body" in getattr(kind, "_fields", ()))
_SCOPE_NODES = frozenset((ast.ClassDef, *get_args(Function), *get_args(Comprehension)))
# Fields that the pass does not descend into: those without names, and on the last line those of
# a def or class that are computed outside of its scope (see `_parts_outside`).
_NAMES_OF_FIELDS = """
arg asname attr conversion ctx id is_async kind kwd_attrs level module name op ops rest simple
type_comment type_ignores
bases decorator_list defaults kw_defaults returns
"""
_SKIPPED_FIELDS = frozenset(_NAMES_OF_FIELDS.split())
_VISITED = {  # all other fields, by class of node
    kind: tuple(field for field in kind._fields if field not in _SKIPPED_FIELDS)
    for kind in _NODE_CLASSES
    if issubclass(kind, ast.AST)
}
_VISITED |= dict.fromkeys((ast.Constant, ast.MatchSingleton, ast.Global, ast.Nonlocal, ast.arg), ())
_VISITED[ast.ClassDef] = tuple(field for field in _VISITED[ast.ClassDef] if field != "keywords")
_VISITED[ast.comprehension] = ("target", "ifs")
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.NamedExpr)


def build(tree: ast.Module) -> Scopes:
    """Return the scopes of a file, in one pass over its nodes: those of one scope at a time."""
    scopes = Scopes(tree)
    walk = _Walk(scopes)
    walk.visit([tree])
    while walk.waiting:
        walk.scope, nodes = walk.waiting.pop()
        walk.visit(nodes)
    # What a function binds to a `global` or `nonlocal` name is a binding of another scope, too.
    for scope in scopes.all:
        for name, is_global in scope.outer.items():
            around = scope.parent.lookup(name) if scope.parent and not is_global else None
            declared_in = around[0] if around else scopes.module
            for binding in scope.bindings.get(name, ()):
                declared_in.bind(name, Binding("outer", binding.node))
    return scopes


class _Walk:
    """The one pass over a tree: a scope at a time, while those within it wait."""

    def __init__(self, scopes: Scopes):
        self.scopes = scopes
        self.scope: NameScope = scopes.module  # the one that is visited
        self.waiting: list[tuple[NameScope, list[Any]]] = []  # others, with the nodes in each

    def visit(self, nodes: list[Any]) -> None:
        """Record what the nodes of one scope, and all below them, bind and read.

        `nodes` is a stack, which ends empty. The insides of a def or the like go to `waiting`.
        """
        pop, push, add_node = nodes.pop, nodes.append, self.scopes.nodes.append  # a hot loop
        parents, loads = self.scopes.parents, self.scope.loads
        visited_fields, binders, name, load = _VISITED, _BINDERS, ast.Name, ast.Load
        while nodes:
            node = pop()
            kind = node.__class__
            if kind is name:
                if node.ctx.__class__ is load:
                    loads.setdefault(node.id, []).append(node)
                elif not isinstance(parents[node], _ASSIGNMENTS):  # which `binders` handle
                    self.scope.bind(node.id, Binding("other", node))
                continue
            add_node(node)
            if kind in binders:
                binders[kind](self, node)
            push_child = self._enter(node, nodes).append if kind in _SCOPE_NODES else push
            for field in visited_fields[kind]:
                child = getattr(node, field)
                if child.__class__ is list:
                    for item in child:
                        if item is not None:
                            parents[item] = node
                            push_child(item)
                elif child is not None:
                    parents[child] = node
                    push_child(child)

    def _enter(self, node: Any, nodes: list[Any]) -> list[Any]:
        """Begin the scope of a def, class or the like, and return a new stack for its insides.

        Its decorators and defaults, which are evaluated in the scope around, go to `nodes`, the
        stack of that scope.
        """
        scope = NameScope(node, self.scope)
        self.scopes.children.setdefault(self.scope, []).append(scope)
        self.scopes.all.append(scope)
        self.scopes.of[node] = scope
        for part, parent in _parts_outside(node):
            self.scopes.parents[part] = parent
            self.scopes.around[part] = self.scope
            nodes.append(part)
        # Of `[... for x in xs for y in ys]`, `ys` is inside: only `xs` is computed outside.
        later_generators = getattr(node, "generators", ())[1:]
        self.scopes.parents.update((loop.iter, loop) for loop in later_generators)
        inside = [loop.iter for loop in later_generators]
        self.waiting.append((scope, inside))
        return inside


def _parts_outside(node: Any) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield `(part, parent)` for what a def, class or comprehension computes in the scope around.

    These are decorators, bases, defaults and annotations; of `[x for x in xs]`, the `xs`.
    """
    if isinstance(node, Comprehension):
        yield node.generators[0].iter, node.generators[0]
        return
    parts = [(part, node) for part in getattr(node, "decorator_list", ())]
    if isinstance(node, ast.ClassDef):
        parts += [(part, node) for part in (*node.bases, *node.keywords)]
    else:
        arguments = node.args
        parts += [(part, arguments) for part in (*arguments.defaults, *arguments.kw_defaults)]
        parts += [(argument.annotation, argument) for argument in parameters(arguments)]
        parts += [(getattr(node, "returns", None), node)]
    yield from ((part, parent) for part, parent in parts if part is not None)


def _bind_named(walk: _Walk, node: Any) -> None:
    """Bind the name of a def, class, parameter, `except E as name`, `case [*name]`, `type name`."""
    # In which field it is depends on the class of the node; `except E:` and `case [*_]` have none.
    names = (getattr(node, field, None) for field in ("name", "rest", "arg"))
    name = next(filter(None, names), None)
    if name is not None:
        text = name.id if isinstance(name, ast.Name) else name  # a Name in `type name = ...`
        walk.scope.bind(text, Binding(_KIND_OF_NAMED.get(node.__class__, "other"), node))


def _bind_import(walk: _Walk, node: ast.alias) -> None:
    """Bind a name of an import to its target: of `from .a import b as c`, "c" to ".a.b".

    `import a.b` binds "a" to "a", and `import a.b as c` binds "c" to "a.b".
    """
    statement = walk.scopes.parents[node]
    if node.name == "*":
        return
    name = node.asname or node.name
    if isinstance(statement, ast.ImportFrom):
        base = "." * statement.level + (statement.module or "")
        target = f"{base}{node.name}" if base.endswith(".") else f"{base}.{node.name}"
    elif node.asname:
        target = node.name
    else:
        name = target = node.name.partition(".")[0]
    walk.scope.bind(name, Binding("import", node, target=target))


def _bind_targets(walk: _Walk, node: Any) -> None:
    """Bind the targets of `a = b.c = value`, `a: T = value`, `a := value`; `a: T` binds nothing."""
    # A walrus in a comprehension binds its name in the function around.
    is_walrus = isinstance(node, ast.NamedExpr)
    scope = walk.scope.around_comprehensions if is_walrus else walk.scope
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Name) and node.value is not None:
            scope.bind(target.id, Binding("assign", node, node.value))


def _bind_outside(walk: _Walk, node: ast.Global | ast.Nonlocal) -> None:
    """Record the names of `global x` and `nonlocal x`, which mean nothing at module level."""
    if walk.scope.parent is not None:
        walk.scope.outer |= dict.fromkeys(node.names, isinstance(node, ast.Global))


_BINDERS: dict[type, Any] = {
    **dict.fromkeys(_ASSIGNMENTS, _bind_targets),
    **dict.fromkeys((ast.Global, ast.Nonlocal), _bind_outside),
    ast.alias: _bind_import,
    ast.arg: _bind_named,
}
_KIND_OF_NAMED: dict[type, _BindingKind] = {
    ast.arg: "parameter",
    ast.FunctionDef: "def",
    ast.AsyncFunctionDef: "def",
    ast.ClassDef: "class",
}
for _kind in _NODE_CLASSES:  # all others with a name: some exist only since Python 3.12
    if not {"name", "rest"}.isdisjoint(getattr(_kind, "_fields", ())):
        _BINDERS.setdefault(_kind, _bind_named)


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters, in the order of a call; `*args` and `**kwargs` last."""
    last = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *last]


def last_name(node: ast.AST) -> str:
    """Return `"mean"` of `mean` and of `x.mean`; "" of anything else."""
    return getattr(node, "attr", getattr(node, "id", ""))


def place(node: Any) -> tuple[int, int]:
    """Return where a node begins: line and column."""
    return (node.lineno, node.col_offset)
