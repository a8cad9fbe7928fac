"""Places where a file applies a transformation, with its arguments and the names of its result."""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

from jax_dist.lint.findings import Edit
from jax_dist.lint.model import scopes
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
    """A reference to a transformation such as `jax.pmap`; `node` is the whole call or decorator."""

    form: _Form
    reference: ast.expr  # what means jax.pmap here: `jax.pmap`, `p`, `constants.pmap`
    node: ast.expr
    fun: Any = None  # the transformed expression, or the decorated def; None if it is by keyword
    args: Sequence[ast.expr] = ()  # positional ones after the function, those of partials first
    keywords: Sequence[ast.keyword] = ()

    @property
    def is_application(self) -> bool:
        """True if a function is transformed here, rather than the transformation passed on."""
        return self.form in ("call", "decorator", "partial decorator", "called decorator")

    @property
    def arguments(self) -> dict[str, ast.expr]:
        """The arguments by name, without the function.

        Of pmap's positional arguments only the second is known by name: `axis_name`. The others
        are called "argument 3" and so on.
        """
        names = ["axis_name", *(f"argument {3 + index}" for index in range(len(self.args)))]
        positional = dict(zip(names, self.args, strict=False))
        named = {word.arg: word.value for word in self.keywords if word.arg is not None}
        return positional | named

    @property
    def unknown(self) -> str:
        """`"*args"` or `"**kwargs"` if arguments are passed that way; "" if all can be read."""
        if any(isinstance(argument, ast.Starred) for argument in self.args):
            return "*args"
        return "**kwargs" if any(keyword.arg is None for keyword in self.keywords) else ""


@once
def sites(module: Module, names: tuple[str, ...]) -> list[Site]:
    """Return every reference to a transformation of these names, in order of line and column."""
    return [read_site(module, node) for node in module.uses(*names)]


def applications(module: Module, names: tuple[str, ...] = PMAP) -> list[Site]:
    """Return the `sites` that transform an expression of this file, in order of line."""
    applied = (site for site in sites(module, names) if site.is_application)
    return [site for site in applied if site.fun is not None and module.holds(site.fun)]


def read_site(module: Module, reference: ast.expr) -> Site:
    """Return how a transformation is used at `reference`, the name or attribute that means it.

    Of the `pmap` in `partial(pmap, axis_name="i")(f)`, that is a "call" of `f` with this keyword,
    whose node is the whole expression.
    """
    meaning = module.meaning(reference)  # of `p = partial(pmap, axis_name="i")`: with the keyword
    args = [*meaning.args] if meaning else []
    keywords = [*meaning.keywords] if meaning else []
    # Outwards through `partial(pmap, ...)`, `partial(partial(pmap, ...), ...)`.
    node, parent = reference, module.parent(reference)
    while isinstance(parent, ast.Call) and parent.args[:1] == [node] and module.meaning(parent):
        args += parent.args[1:]
        keywords += parent.keywords
        node, parent = parent, module.parent(parent)
    call = module.call_of(node)
    if call is None:  # `@pmap`, `p = pmap`, or the same with a partial of it
        form = _form_without_call(node, parent, is_partial=node is not reference)
        decorated_def = parent if form.endswith("decorator") else None
        return Site(form, reference, node, decorated_def, args, keywords)
    args += call.args
    keywords += call.keywords
    parent, second_call = module.parent(call), module.call_of(call)
    if not args and decorates(parent, call):  # `@pmap(axis_name="i")`
        return Site("called decorator", reference, call, parent, args, keywords)
    if not args and second_call is not None:  # `jit(inline=True)(f)`, which passes f
        call, args, keywords = second_call, second_call.args, keywords + second_call.keywords
    return Site("call", reference, call, args[0] if args else None, args[1:], keywords)


def _form_without_call(node: ast.expr, parent: ast.AST, *, is_partial: bool) -> _Form:
    """Return how the node `pmap`, or a partial of it, is used where it is not called."""
    if decorates(parent, node):
        return "partial decorator" if is_partial else "decorator"
    if isinstance(parent, ast.Assign | ast.AnnAssign) and parent.value is node:
        return "partial alias" if is_partial else "alias"
    return "value"


def decorates(around: ast.AST, node: ast.AST) -> bool:
    """Return whether `node` is one of the decorators of `around`, a def."""
    return isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        decorator is node for decorator in around.decorator_list
    )


def mapped_calls(module: Module, site: Site) -> list[ast.Call]:
    """Return the calls of the mapped function in this file: `pmap(f)(x)`, `x = pmap(f); x(y)`."""
    return list(filter(None, map(module.call_of, find_results(module, site))))


@once
def find_results(module: Module, site: Site) -> list[ast.expr]:
    """Return every expression of this file whose value is the result of a transformation.

    Of `p = pmap(f)`, these are the `pmap(f)` itself and each `p` that is read below; of a def that
    `@pmap` decorates, its name where it is read.
    """
    if site.form == "call":
        return [site.node, *reads_of(module, site.node)]
    return [] if site.fun is None else [*module.reads_of(site.fun, site.fun.name)]


def reads_of(module: Module, value: ast.expr) -> Iterator[ast.expr]:
    """Yield the reads of `x` that may see the value of `x = value`; also of `self.x = value`."""
    assignment = module.parent(value)
    if not isinstance(assignment, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return
    has_targets = isinstance(assignment, ast.Assign)  # several in `x = y = value`
    for target in assignment.targets if has_targets else [assignment.target]:
        if isinstance(target, ast.Name):
            yield from module.reads_of(value, target.id)
        elif isinstance(target, ast.Attribute):
            owner = module.class_of_self(target)
            if owner is not None and module.attribute_values(target):
                yield from module.self_attributes(owner, target.attr, ast.Load)


def definition(module: Module, fun: Any) -> scopes.Function | None:
    """Return the def or lambda that an expression is or names, as `f`, an alias or `self.f`.

    None if it may be another one as well: if the name has two bindings, or `self.f` is assigned.
    """
    for _ in range(8):  # aliases, such as the two of `g = f; h = g`
        if isinstance(fun, scopes.Function):
            return fun
        if isinstance(fun, ast.Attribute):
            owner = module.class_of_self(fun)
            if owner is None or module.attribute_values(fun):
                return None
            methods: list[Any] = module.scopes.of[owner].bindings.get(fun.attr, [])
            return methods[0].node if [method.kind for method in methods] == ["def"] else None
        bindings = module.reaching(fun) if isinstance(fun, ast.Name) else None
        if bindings is None or len(bindings) != 1:
            return None
        (binding,) = bindings
        fun = binding.node if binding.kind == "def" else binding.value
    return None


def remove_jit(module: Module, jit: ast.expr, inner: ast.expr) -> tuple[Edit, ...]:
    """Return the edits that make `jit(inner)` only `inner`, or remove the decorator `jit` above it.

    They are () if options or comments would be lost with it.
    """
    if isinstance(jit, ast.Call) and jit.args == [inner]:
        (start, end), (inner_start, inner_end) = module.span(jit), module.span(inner)
        code = module.source.code
        has_comment = b"#" in code[start:inner_start] + code[inner_end:end]
        if module.qualified_name(jit.func) != "jax.jit" or jit.keywords or has_comment:
            return ()
        return (Edit(start, inner_start, ""), Edit(inner_end, end, ""))
    # A decorator goes with its line, if nothing else is on that.
    text_before, text_after = module.margins(jit)
    is_alone = text_before.strip() == "@" and not text_after.strip()
    is_bare = module.qualified_name(jit) == "jax.jit"
    return (module.line_edit(jit),) if is_bare and is_alone else ()
