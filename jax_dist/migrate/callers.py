"""Where a project calls a function or hands it on, and where it does so with what does that."""

import ast
import dataclasses
import os
from collections.abc import Callable, Iterator

from jax_dist.lint.model import functions, pmaps, scopes
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.results import ProjectContext


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """A place where a function is called, or handed on."""

    module: Module
    node: ast.expr

    def line_of(self, line: int, module: Module) -> str:
        """A line of its file, as a file says it: `line 3`, or `src/a.py:3` of another."""
        if self.module is module:
            return f"line {line}"
        return f"{os.path.relpath(self.module.source.path)}:{line}"


def first(
    module: Module,
    context: ProjectContext,
    held: ast.expr,
    find: Callable[[Module, ProjectContext, ast.expr], tuple[int, str] | None],
) -> tuple[str, str] | None:
    """The first thing that is found at an expression, or at a use of a function that leads to it.

    A method is known by its name alone, and in its own file only.

    Args:
      module: the file of the expression.
      context: the project.
      held: the expression.
      find: says the line and the kind of what it finds at a use; None where nothing is.

    Returns:
      The place of the line, and the kind.
    """
    seen = set[ast.AST]()
    waiting = [Use(module, held)]
    while waiting:
        use = waiting.pop(0)
        if found := _known(use, context, find):
            line, kind = found
            return use.line_of(line, module), kind
        function = use.module.function(use.node)
        if function is not None and function not in seen:
            seen.add(function)
            waiting += _uses_of(use.module, context, function)
    return None


def around(module: Module, run: ast.expr) -> Iterator[tuple[ast.AST, ast.AST, bool]]:
    """Goes outward from where a function is run or handed on.

    Yields:
      What is around, the part of it that comes from there, and whether that is a function, which
      is not run there but by what it is given to.
    """
    inner: ast.AST = run
    is_later = module.call_of(run) is None
    for outer in module.ancestors(run):
        yield outer, inner, is_later
        is_later = is_later or isinstance(outer, ast.Lambda)
        inner = outer


def _known(
    use: Use, context: ProjectContext, find: Callable[..., tuple[int, str] | None]
) -> tuple[int, str] | None:
    known = use.module.memo(find)
    if use.node not in known:
        known[use.node] = find(use.module, context, use.node)
    return known[use.node]


def _uses_of(module: Module, context: ProjectContext, function: scopes.Function) -> list[Use]:
    known = module.memo(_uses_of)
    if function not in known:
        known[function] = [*_uses(module, context, function)]
    return known[function]


def _uses(module: Module, context: ProjectContext, function: scopes.Function) -> Iterator[Use]:
    if isinstance(function, ast.Lambda):
        yield from (Use(module, each) for each in pmaps.reads_of(module, function))
        return
    owner, named = module.parent(function), function
    if isinstance(owner, ast.ClassDef):
        if function.name != "__init__":
            yield from () if function.name.startswith("__") else _attributes(module, function.name)
            return
        named = owner  # which is called in its place
    name, scope = named.name, module.scope(named)
    yield from (Use(module, each) for each in module.reads(scope, name))
    if scope is module.scopes.module:
        for path in sorted({*context.graph.users(os.path.abspath(module.source.path), name)}):
            other = _module(context, path)
            if other is not None:
                reads = other.reads(other.scopes.module, name)
                yield from (Use(other, each) for each in reads)
                yield from _attributes(other, name)


def _attributes(module: Module, name: str) -> Iterator[Use]:
    yield from (Use(module, each) for each in functions.attribute_reads(module, name))


def _module(context: ProjectContext, path: str) -> Module | None:
    """A file of the project, which all that ask share."""
    known = context.graph.known.setdefault(_module, {})
    if path not in known:
        known[path] = context.module(path)
    return known[path]


def parameter(definition: ast.AST, call: ast.Call, given: ast.AST) -> str:
    """The name by which a function or a class gets an argument; "" where the text does not say."""
    is_class = isinstance(definition, ast.ClassDef)
    if is_class:
        methods = (each for each in definition.body if isinstance(each, ast.FunctionDef))
        definition = next((each for each in methods if each.name == "__init__"), definition)
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    given_to = definition.args
    if isinstance(given, ast.keyword):
        return given.arg or ""
    names = [each.arg for each in (*given_to.posonlyargs, *given_to.args)][is_class:]
    position = next((i for i, each in enumerate(call.args) if each is given), len(names))
    return names[position] if position < len(names) else ""


def carriers(definition: ast.AST, name: str) -> set[str]:
    """The names by which a parameter, or what calls it, is known in a function or a class.

    Those of fields and methods count as names too.
    """
    found: set[str] = {name} - {""}
    count = 0
    while count < len(found):
        count = len(found)
        for node in ast.walk(definition) if found else ():
            match node:
                case ast.Assign(targets=[ast.Name() | ast.Attribute() as target], value=value):
                    if _is_it(value, found):
                        found.add(scopes.last_name(target))
                case ast.FunctionDef() | ast.AsyncFunctionDef() if node is not definition:
                    is_made = node.name == "__init__"
                    if not is_made and any(says(each, found) for each in node.body):
                        found.add(node.name)
    return found


def _is_it(value: ast.expr, names: set[str]) -> bool:
    """Whether an expression is what one of the names means, or calls it when it is called."""
    match value:
        case ast.Name() | ast.Attribute():
            return scopes.last_name(value) in names
        case ast.Lambda():
            return says(value, names)
        case ast.Call(func=function):
            return scopes.last_name(function) == "partial" and says(value, names)
    return False


def says(node: ast.AST, names: set[str]) -> bool:
    """Whether a text reads one of the names, be it as an attribute."""
    return any(
        isinstance(each, ast.Name | ast.Attribute) and scopes.last_name(each) in names
        for each in ast.walk(node)
    )
