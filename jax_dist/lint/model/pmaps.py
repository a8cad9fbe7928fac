"""Places where a file applies a transformation, with its arguments and the names of its result."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from jax_dist.lint.model import scopes
from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.reaching import LIMIT
from jax_dist.lint.model.semantic_model import Module, once

PMAP = ("jax.pmap", "jax.api.pmap", "jax._src.api.pmap", "jax.interpreters.pxla.pmap")

_Form: TypeAlias = Literal[
    "call",  # pmap(f, ...), pmap(f)(x), partial(pmap, ...)(f)
    "decorator",  # @pmap
    "partial decorator",  # @partial(pmap, axis_name="i")
    "called decorator",  # @pmap(axis_name="i"): fails at run time; @jit(inline=True) does not
    "alias",  # p = pmap
    "partial alias",  # p = partial(pmap, axis_name="i")
    "value",  # passed on, compared, stored
]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One reference to a transformation such as `jax.pmap`.

    `node` is the widest expression that is the transformed function: the call, or the decorator.
    """

    form: _Form
    reference: ast.expr  # what means jax.pmap here: `jax.pmap`, `p`, `constants.pmap`
    node: ast.expr
    fun: Any = None  # the expression transformed, by position, or the decorated def
    args: Sequence[ast.expr] = ()  # by position, behind the function; of partials first
    keywords: Sequence[ast.keyword] = ()

    @property
    def is_application(self) -> bool:
        return self.form in ("call", "decorator", "partial decorator", "called decorator")

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """The arguments by name, but for the function; only pmap's second has one by position."""
        names = ["axis_name", *(f"argument {place + 3}" for place in range(len(self.args)))]
        found = dict(zip(names, self.args, strict=False))
        words = {each.arg: each.value for each in self.keywords}
        return found | {name: value for name, value in words.items() if name is not None}

    @property
    def unknown(self) -> str:
        """The arguments that cannot be read: "**kwargs"; "" if all can."""
        if any(isinstance(each, ast.Starred) for each in self.args):
            return "*args"
        return "**kwargs" if any(each.arg is None for each in self.keywords) else ""


@once
def sites(module: Module, names: tuple[str, ...]) -> list[Site]:
    """Return every reference to functions of these names, in order of place."""
    return [site(module, node) for node in module.uses(*names)]


def applications(module: Module, names: tuple[str, ...] = PMAP) -> list[Site]:
    """Return those of `sites` that transform a function of this file."""
    applied = (site for site in sites(module, names) if site.is_application)
    return [site for site in applied if site.fun is not None and module.holds(site.fun)]


def site(module: Module, reference: ast.expr) -> Site:
    """Return how a transformation is used where it is named."""
    meaning = module.meaning(reference)
    node = reference
    args = [*meaning.args] if meaning else []
    keywords = [*meaning.keywords] if meaning else []
    while isinstance(around := module.parent(node), ast.Call) and around.args[:1] == [node]:
        if module.meaning(around) is None:  # not a partial
            break
        node = around
        args += around.args[1:]
        keywords += around.keywords
    call = module.call_of(node)
    if call is None:
        form = _form_without_call(around, node, is_partial=node is not reference)
        fun = around if form.endswith("decorator") else None
        return Site(form, reference, node, fun, args, keywords)
    args += call.args
    keywords += call.keywords
    outside, outer = module.parent(call), module.call_of(call)
    if not args and decorates(outside, call):
        return Site("called decorator", reference, call, outside, args, keywords)
    if not args and outer is not None:  # `jit(inline=True)(f)`
        call, args, keywords = outer, [*outer.args], [*keywords, *outer.keywords]
    return Site("call", reference, call, args[0] if args else None, args[1:], keywords)


def _form_without_call(around: ast.AST, node: ast.expr, *, is_partial: bool) -> _Form:
    if decorates(around, node):
        return "partial decorator" if is_partial else "decorator"
    if isinstance(around, ast.Assign | ast.AnnAssign) and around.value is node:
        return "partial alias" if is_partial else "alias"
    return "value"


def decorates(around: ast.AST, node: ast.AST) -> bool:
    """Return whether an expression is a decorator of a def."""
    return isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        each is node for each in around.decorator_list
    )


def mapped_calls(module: Module, site: Site) -> list[ast.Call]:
    """Return the calls of the mapped function in this file: `pmap(f)(x)`, `x = pmap(f); x(y)`."""
    return list(filter(None, map(module.call_of, held_by(module, site))))


@once
def held_by(module: Module, site: Site) -> list[ast.expr]:
    """Return every expression of this file that is the mapped function: the site, and names."""
    if site.form == "call":
        return [site.node, *reads_of(module, site.node)]
    return [] if site.fun is None else [*module.reads_of(site.fun, site.fun.name)]


def reads_of(module: Module, value: ast.expr) -> Iterator[ast.expr]:
    """Yield where the value of an assignment is read again, by name or as `self.name`."""
    around = module.parent(value)
    if not isinstance(around, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return
    targets = around.targets if isinstance(around, ast.Assign) else [around.target]
    for target in targets:
        if isinstance(target, ast.Name):
            yield from module.reads_of(value, target.id)
        elif isinstance(target, ast.Attribute) and is_self(target):
            owner = module.class_of(target)
            if owner is not None and module.attribute_values(target):
                yield from self_attributes(module, owner, target.attr, ast.Load)


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def self_attributes(
    module: Module, owner: ast.ClassDef, name: str, context: type[ast.Load] | type[ast.Store]
) -> list[ast.Attribute]:
    """Return where a class reads or sets `self.name`."""
    attributes = _self_attributes(module, owner).get((name, context), [])
    return attributes if len(attributes) <= LIMIT or context is ast.Load else []


@once
def _self_attributes(
    module: Module, owner: ast.ClassDef
) -> dict[tuple[str, type], list[ast.Attribute]]:
    del module
    attributes: dict[tuple[str, type], list[ast.Attribute]] = {}
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and is_self(node):
            attributes.setdefault((node.attr, node.ctx.__class__), []).append(node)
    return attributes


_ALIASES = 8  # names for one function, one of the other


def definition(module: Module, fun: Any) -> scopes.Function | None:
    """Return the def or lambda that an expression names, where the file shows just one."""
    for _ in range(_ALIASES):
        if isinstance(fun, scopes.Function):
            return fun
        if isinstance(fun, ast.Attribute):  # `self.method`
            owner = module.class_of(fun)
            if owner is None or not is_self(fun) or module.attribute_values(fun):
                return None
            found: list[Any] = module.scopes.of[owner].bindings.get(fun.attr, [])
            return found[0].node if [each.kind for each in found] == ["def"] else None
        bindings = module.reaching(fun) if isinstance(fun, ast.Name) else None
        if bindings is None or len(bindings) != 1:
            return None
        is_def = bindings[0].kind == "def"
        fun = bindings[0].node if is_def else bindings[0].value
    return None


def unjitted(module: Module, jit: ast.expr, inner: ast.expr) -> tuple[Edit, ...]:
    """Return edits that take a jit away; none where more would be lost."""
    (start, end), code = module.span(jit), module.source.code
    if isinstance(jit, ast.Call) and jit.args == [inner]:
        first, last = module.span(inner)
        has_comment = b"#" in code[start:first] + code[last:end]
        if module.qualified_name(jit.func) != "jax.jit" or jit.keywords or has_comment:
            return ()
        return (Edit(start, first, ""), Edit(last, end, ""))
    before, behind = module.margins(jit)
    is_alone = before.strip() == "@" and not behind.strip()
    is_bare = module.qualified_name(jit) == "jax.jit"
    return (module.line_edit(jit),) if is_bare and is_alone else ()
