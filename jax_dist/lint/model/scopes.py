"""Which names a file binds, in which scope, and where it reads them: one pass over its tree.

The pass also notes each node's parent; in a dictionary, since in the nodes it would make circles,
whose memory waits for the garbage collector. It is the hot loop of the checker: a scope at a time,
each with a stack of the nodes that are still to be seen.
"""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp

# "outer": by a function that declares the name global or nonlocal, and may run at any time.
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
    outer: dict[str, bool] = dataclasses.field(default_factory=dict)  # whether it is global
    star_imports: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def bind(self, name: str, binding: Binding) -> None:
        self.bindings.setdefault(name, []).append(binding)

    def lookup(self, name: str) -> "tuple[NameScope, list[Binding]] | None":
        """Return the scope that a load of `name` here reads from, and what it binds the name to."""
        scope: NameScope | None = self
        while scope is not None:
            visible = scope is self or not scope.is_class  # methods do not see their class's names
            if visible and name in scope.bindings and name not in scope.outer:
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


@dataclasses.dataclass
class Scopes:
    """All scopes of a file, in the order in which they begin in the text of their parents."""

    module: NameScope
    all: list[NameScope]
    of: dict[ast.AST, NameScope]  # by the node that makes it
    attribute_stores: list[tuple[ast.Attribute, ast.expr]]  # `self.x = value`
    nodes: list[Any]  # statements and expressions, but for names and most constants
    parents: dict[Any, Any]  # by node: the one around it; all but the module itself have one
    _scopes: dict[ast.AST, NameScope] = dataclasses.field(default_factory=dict)
    _statements: dict[ast.AST, ast.stmt] = dataclasses.field(default_factory=dict)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around, innermost first."""
        parents, tree = self.parents, self.module.node
        while node is not tree:
            node = parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that holds the node."""
        path: list[ast.AST] = []
        while not isinstance(node, ast.stmt):
            path.append(node)
            node = self._statements.get(node) or self.parents[node]
        self._statements.update(dict.fromkeys(path, node))  # climb deep expressions once
        return node

    def scope(self, node: ast.AST) -> NameScope:
        """Return the scope in which the node's names are looked up."""
        path: list[ast.AST] = []
        below, child = node, node
        scope = self._scopes.get(node)
        while scope is None:
            if child is self.module.node:
                scope = self.module
                break
            around = self.parents[child]
            made = self.of.get(around)
            if made is not None and _is_inside(below, child, around):
                scope = made
            else:
                path.append(child)
                below, child = child, around
                # In a header, the answer also depends on where one comes from.
                scope = None if made or isinstance(child, _HEADERS) else self._scopes.get(child)
        self._scopes.update((each, scope) for each in path if not isinstance(each, _HEADERS))
        return scope

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that holds a statement, or an empty list."""
        parent, field = self.parents[statement], self.fields.get(statement)
        return getattr(parent, field) if field else []

    @functools.cached_property
    def fields(self) -> dict[ast.stmt, str]:
        """Return, by statement, the field of its parent whose list holds it."""
        found: dict[ast.stmt, str] = {}
        for node in (self.module.node, *self.nodes):
            if isinstance(node, _WITH_BLOCKS):
                for field in ("body", "orelse", "finalbody"):
                    found.update(dict.fromkeys(getattr(node, field, None) or (), field))
        return found

    @functools.cached_property
    def bound(self) -> dict[tuple[ast.AST, str], tuple[NameScope, Binding]]:
        """Return, by the assigned value or def and the name, the binding and its scope."""
        return {
            (binding.value or binding.node, name): (scope, binding)
            for scope in self.all
            for name, bindings in scope.bindings.items()
            for binding in bindings
            if binding.kind in ("assign", "def")
        }

    @functools.cached_property
    def loads(self) -> dict[tuple[NameScope, str], list[ast.Name]]:
        """Return, by the scope that binds a name and the name, every load of it in order."""
        found: dict[tuple[NameScope, str], list[ast.Name]] = {}
        for scope in self.all:
            for name, loads in scope.loads.items():
                home = scope.lookup(name)
                if home is not None:
                    found.setdefault((home[0], name), []).extend(loads)
        for loads in found.values():
            loads.sort(key=place)
        return found


_HEADERS = (ast.arguments, ast.arg, ast.comprehension)
_WITH_BLOCKS = (
    ast.Module,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.ExceptHandler,
    ast.match_case,
)


def _is_inside(below: ast.AST, child: ast.AST, around: Any) -> bool:
    """Return whether `child`, reached from `below`, sees the names of the scope of `around`."""
    if isinstance(around, ast.Module):
        return True
    if isinstance(around, ast.Lambda):
        return child is around.body
    if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return isinstance(child, ast.stmt) or child in getattr(around, "type_params", ())
    first = around.generators[0]  # its iterable is computed outside
    return child is not first or below is not first.iter


def build(tree: ast.Module, *, is_whole: bool = True) -> Scopes:
    """See every node once; if not `is_whole`, only the module's level, and drop the rest."""
    module = NameScope(tree, None)
    walk = _Walk(Scopes(module, [module], {tree: module}, [], [tree], {}))
    walk.waiting.append((module, walk.adopted(tree, tree.body)))
    while walk.waiting:
        walk.scope, stack = walk.waiting.pop()
        if is_whole or walk.scope is module:
            walk.run(stack)
            continue
        for node in stack:  # whose memory is free now
            del walk.found.parents[node]
        if isinstance(walk.scope.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            walk.scope.node.body.clear()
    for scope in walk.found.all:
        for name, is_global in scope.outer.items():
            home = module if is_global else _nonlocal_home(scope, name) or module
            for binding in scope.bindings.get(name, ()):
                home.bind(name, Binding("outer", binding.node))
    return walk.found


def _nonlocal_home(scope: NameScope, name: str) -> NameScope | None:
    """Return the nearest function around a scope that binds a name of its own."""
    around = scope.parent
    while around is not None:
        if name in around.bindings and name not in around.outer and not around.is_class:
            break
        around = around.parent
    return around


class _Walk:
    """The state of the one pass."""

    def __init__(self, found: Scopes):
        self.found = found
        self.scope: NameScope = found.module
        self.waiting: list[tuple[NameScope, list[Any]]] = []

    def run(self, stack: list[Any]) -> None:
        """See all nodes of one scope; scopes within it are left waiting."""
        pop, push, seen = stack.pop, stack.append, self.found.nodes.append
        loads, parents = self.scope.loads, self.found.parents
        fields_of, handlers = _FIELDS, _HANDLERS
        name, load, constant = ast.Name, ast.Load, ast.Constant
        while stack:
            node = pop()
            kind = node.__class__
            if kind is name:
                if node.ctx.__class__ is load:
                    loads.setdefault(node.id, []).append(node)
                else:
                    self.scope.bind(node.id, Binding("other", node))
                continue
            seen(node)
            handler = handlers.get(kind)
            if handler is not None and handler(self, node, stack):
                continue
            for field in fields_of[kind]:
                child = getattr(node, field)
                kind = child.__class__
                if kind is list:
                    for each in child:
                        kind = each.__class__
                        if kind is not str and each is not None:
                            parents[each] = node
                            if kind is not constant:
                                push(each)
                elif child is not None:
                    parents[child] = node
                    if kind is not constant:
                        push(child)

    def adopted(self, parent: ast.AST, nodes: list[Any]) -> list[Any]:
        """Note the parent of some nodes; a new list of them."""
        parents = self.found.parents
        for node in nodes:
            parents[node] = parent
        return list(nodes)

    def enter(self, node: ast.AST) -> NameScope:
        scope = NameScope(node, self.scope)
        self.found.all.append(scope)
        self.found.of[node] = scope
        return scope


# Fields that hold no node, or whose nodes say nothing of names (`ctx`, operators).
_SKIPPED = {"ctx", "op", "ops", "type_comment", "kind", "conversion", "type_ignores", "is_async"}
_SKIPPED |= {"name", "id", "attr", "arg", "module", "level", "names", "rest", "kwd_attrs"}

_LEAVES = (ast.Constant, ast.alias, ast.MatchSingleton)


class _Fields(dict[type, tuple[str, ...]]):
    """The fields of a class of nodes that hold nodes; found out once for each."""

    def __missing__(self, kind: type) -> tuple[str, ...]:
        names = () if kind in _LEAVES else getattr(kind, "_fields", ())
        found = self[kind] = tuple(name for name in names if name not in _SKIPPED)
        return found


_FIELDS = _Fields()


def _function(walk: _Walk, node: Any, stack: list[Any]) -> bool:
    is_lambda = isinstance(node, ast.Lambda)
    if not is_lambda:
        walk.scope.bind(node.name, Binding("def", node))
        stack += walk.adopted(node, node.decorator_list)
    arguments: ast.arguments = node.args
    walk.found.parents[arguments] = node
    walk.found.nodes.append(arguments)
    outside = [*arguments.defaults, *(each for each in arguments.kw_defaults if each)]
    stack += walk.adopted(arguments, outside)
    inner = walk.enter(node)
    for argument in parameters(arguments):
        walk.found.parents[argument] = arguments
        inner.bind(argument.arg, Binding("parameter", argument))
        if argument.annotation is not None:
            stack += walk.adopted(argument, [argument.annotation])
    if not is_lambda and node.returns is not None:
        stack += walk.adopted(node, [node.returns])
    body = [node.body] if is_lambda else node.body
    types = getattr(node, "type_params", [])
    walk.waiting.append((inner, walk.adopted(node, [*body, *types])))
    return True


def _class(walk: _Walk, node: ast.ClassDef, stack: list[Any]) -> bool:
    walk.scope.bind(node.name, Binding("class", node))
    stack += walk.adopted(node, [*node.decorator_list, *node.bases, *node.keywords])
    inner = walk.enter(node)
    types = getattr(node, "type_params", [])
    walk.waiting.append((inner, walk.adopted(node, [*node.body, *types])))
    return True


def _comprehension(walk: _Walk, node: Any, stack: list[Any]) -> bool:
    """Return the first iterable is computed outside."""
    stack += walk.adopted(node.generators[0], [node.generators[0].iter])
    inner = walk.enter(node)
    inside: list[Any] = []
    elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    inside += walk.adopted(node, [each for each in elements if each is not None])
    for number, generator in enumerate(node.generators):
        walk.found.parents[generator] = node
        parts = [generator.target, *generator.ifs, *([generator.iter] if number else [])]
        inside += walk.adopted(generator, parts)
    walk.waiting.append((inner, inside))
    return True


def _import(walk: _Walk, node: ast.Import, _stack: list[Any]) -> bool:
    for alias in node.names:
        walk.found.parents[alias] = node
        bound = alias.asname or alias.name.partition(".")[0]
        target = alias.name if alias.asname else bound
        walk.scope.bind(bound, Binding("import", alias, target=target))
    return True


def _import_from(walk: _Walk, node: ast.ImportFrom, _stack: list[Any]) -> bool:
    base = "." * node.level + (node.module or "")
    for alias in node.names:
        walk.found.parents[alias] = node
        if alias.name == "*":
            walk.scope.star_imports.append(base)
            continue
        dot = "" if base.endswith(".") else "."
        binding = Binding("import", alias, target=f"{base}{dot}{alias.name}")
        walk.scope.bind(alias.asname or alias.name, binding)
    return True


def _assign(walk: _Walk, node: Any, stack: list[Any]) -> bool:
    """Return `a = b.c = value`, `a: T = value`, `a: T`."""
    is_plain = isinstance(node, ast.Assign)
    value = node.value
    rest: list[Any] = [value] if is_plain else [node.annotation, *([value] if value else [])]
    for target in node.targets if is_plain else [node.target]:
        if isinstance(target, ast.Name):
            walk.found.parents[target] = node
            if value is not None:
                walk.scope.bind(target.id, Binding("assign", node, value))
        else:
            rest.append(target)
            if isinstance(target, ast.Attribute) and value is not None:
                walk.found.attribute_stores.append((target, value))
    stack += walk.adopted(node, rest)
    return True


def _walrus(walk: _Walk, node: ast.NamedExpr, stack: list[Any]) -> bool:
    """Binds in the function around a comprehension."""
    binding = Binding("assign", node, node.value)
    walk.scope.around_comprehensions.bind(node.target.id, binding)
    walk.found.parents[node.target] = node
    stack += walk.adopted(node, [node.value])
    return True


def _outer(walk: _Walk, node: Any, _stack: list[Any]) -> bool:
    if walk.scope.parent is None:
        return True  # `global x` of a module says nothing
    walk.scope.outer |= dict.fromkeys(node.names, isinstance(node, ast.Global))
    return True


def _named(walk: _Walk, node: Any, _stack: list[Any]) -> bool:
    """Bind the name of `except E as name`, `case [*name]`, `case P() as name`, `type name = T`."""
    name = getattr(node, "name", None) or getattr(node, "rest", None)
    if isinstance(name, ast.Name):
        name = name.id
    if isinstance(name, str):
        walk.scope.bind(name, Binding("other", node))
    return False


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """Return all parameters, in the order of a call; `*args` and `**kwargs` last."""
    last = [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *last]


_HANDLERS: dict[type, Any] = {
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.Lambda: _function,
    ast.ClassDef: _class,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.DictComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.Assign: _assign,
    ast.AnnAssign: _assign,
    ast.NamedExpr: _walrus,
    ast.Global: _outer,
    ast.Nonlocal: _outer,
    ast.ExceptHandler: _named,
    ast.MatchStar: _named,
    ast.MatchMapping: _named,
    ast.MatchAs: _named,
}
for _kind in ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAlias"):  # since Python 3.12
    if hasattr(ast, _kind):
        _HANDLERS[getattr(ast, _kind)] = _named


def last_name(node: ast.AST) -> str:
    """Return `"mean"` of `mean` and of `x.mean`; "" of anything else."""
    return getattr(node, "attr", getattr(node, "id", ""))


def place(node: Any) -> tuple[int, int]:
    """Return where a node begins: line and column."""
    return (node.lineno, node.col_offset)
