"""One `jax.pmap` as `jax.jit(jax.shard_map(...))` over all devices of one process.

Whether the two do the same is not asked here: `facts` shows it, or the flow of the values does.
"""

import ast
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.codemod import facts, names
from jax_dist.codemod.codegen import CallText, Texts, Value
from jax_dist.codemod.results import Left

_KNOWN = frozenset(("axis_name", "in_axes", "out_axes", "devices", "donate_argnums"))
_UNNAMED_AXIS = "devices"


@dataclasses.dataclass(frozen=True, slots=True)
class DirectPlan:
    """The pieces of the new text; texts are Python."""

    axis: str  # the name of the mesh axis: "'batch'"
    in_specs: str
    out_specs: str
    in_axes: str = ""  # for `per_device`; "" where all are 0
    out_axes: str = ""
    is_bare: bool = False  # the function has no mapped axis to take off: it is mapped as it is
    donated: str = ""


def plan(module: Module, site: Site, texts: Texts) -> DirectPlan:
    """Reads the arguments of one application of pmap.

    Raises:
      Left: an argument cannot be read, or has no counterpart.
    """
    if site.form not in ("call", "decorator", "partial decorator") or site.fun is None:
        raise Left("pmap is not applied there")
    if isinstance(site.fun, ast.AsyncFunctionDef):
        raise Left("pmap maps no async function")
    if names.import_within(module, site.reference) is not None:
        raise Left("jax is imported inside of a function or block")
    if site.unknown:
        raise Left(f"the arguments of pmap come from {site.unknown}")
    given = {name: value for name, value in site.arguments.items() if not _is_none(name, value)}
    for name, value in given.items():
        if name not in _KNOWN:
            raise Left(f"shard_map has nothing like pmap's {name}")
        if not module.holds(value):
            raise Left(f"another file gives {name} of pmap")
    in_axes, out_axes = given.get("in_axes"), given.get("out_axes")
    axis = module.text(given["axis_name"]) if "axis_name" in given else texts.quoted(_UNNAMED_AXIS)
    spec = texts.named("jax.sharding.PartitionSpec")
    is_plain = facts.is_default(in_axes) and facts.is_default(out_axes)
    return DirectPlan(
        axis=axis,
        in_specs=facts.spec_text(in_axes, axis, spec, "in_axes"),
        out_specs=facts.spec_text(out_axes, axis, spec, "out_axes"),
        in_axes="" if is_plain or in_axes is None else module.text(in_axes),
        out_axes="" if is_plain or out_axes is None else module.text(out_axes),
        donated=module.text(given["donate_argnums"]) if "donate_argnums" in given else "",
    )


def _is_none(name: str, value: ast.expr) -> bool:
    """`devices=None` is as good as nothing; `in_axes=None` is not."""
    return name not in ("in_axes", "out_axes") and (
        isinstance(value, ast.Constant) and value.value is None
    )


def written(module: Module, site: Site, plan: DirectPlan, texts: Texts, group: str = "") -> Fix:
    """The fix that puts a plan into words."""
    edit = (_call_edit if site.form == "call" else _decorator_edit)(module, site, plan, texts)
    title = "use jax.jit(jax.shard_map(...))"
    return Fix(title, Safety.UNSAFE, (edit,), texts.imports, group)


def _call_edit(module: Module, site: Site, plan: DirectPlan, texts: Texts) -> Edit:
    whole = _around(module, site)
    depth = 2 if plan.is_bare else 3  # calls around it
    mapped: Value = texts.moved(site.fun, depth)
    if not plan.is_bare:
        mapped = CallText(texts.helper("per_device"), [mapped], _axes(plan))
    mapped = CallText(texts.named("jax.shard_map"), [mapped], _specs(plan, texts))
    comments = texts.comments(whole, [site.fun, *site.arguments.values()])
    value = CallText(texts.named("jax.jit"), [mapped], _donation(plan), comments)
    return Edit(*module.span(whole), texts.written(value, whole))


def _around(module: Module, site: Site) -> ast.expr:
    """What is replaced: the call, with a jit around it that has nothing to say."""
    around: Any = module.parent(site.node)
    plain = isinstance(around, ast.Call) and around.args == [site.node] and not around.keywords
    return around if plain and module.qualified_name(around.func) == "jax.jit" else site.node


def _specs(plan: DirectPlan, texts: Texts) -> list[tuple[str, Value]]:
    devices = f"{texts.named('jax.devices')}()"
    mesh = CallText(texts.named("jax.sharding.Mesh"), [devices, f"({plan.axis},)"])
    return [
        ("mesh", mesh),
        ("in_specs", plan.in_specs),
        ("out_specs", plan.out_specs),
        ("check_vma", "False"),
    ]


def _axes(plan: DirectPlan) -> list[tuple[str, str]]:
    given = [("in_axes", plan.in_axes), ("out_axes", plan.out_axes)]
    return [(name, text) for name, text in given if text]


def _donation(plan: DirectPlan) -> list[tuple[str, str]]:
    return [("donate_argnums", plan.donated)] if plan.donated else []


def _decorator_edit(module: Module, site: Site, plan: DirectPlan, texts: Texts) -> Edit:
    """`@jax.jit`, then `@partial(jax.shard_map, ...)`, then `@per_device`, each on its line."""
    partial = texts.named(_partial_name(module, site))
    lines = [
        _as_decorator(texts.named("jax.jit"), partial, _donation(plan)),
        _as_decorator(texts.named("jax.shard_map"), partial, _specs(plan, texts)),
    ]
    if not plan.is_bare:
        lines.append(_as_decorator(texts.helper("per_device"), partial, _axes(plan)))
    comments = texts.comments(site.node, list(site.arguments.values()))
    newline = f"\n{texts.indent_of(site.node)}"
    above = "".join(f"{comment}{newline}" for comment in comments)
    start, end = module.span(site.node)
    at = texts.at_sign(start) if comments else start
    mark = "@" if comments else ""
    text = f"{newline}@".join(texts.written(line, site.node) for line in lines)
    return Edit(at, end, above + mark + text)


def _as_decorator(name: str, partial: str, keywords: Any) -> Value:
    return CallText(partial, [name], keywords) if keywords else name


def _partial_name(module: Module, site: Site) -> str:
    for partial in filter(module.holds, site.partials):
        name = module.qualified_name(partial.func)
        if name in PARTIAL:
            return name
    return "functools.partial"


def with_axes(
    module: Module, site: Site, plan: DirectPlan, texts: Texts, edits: Sequence[Edit]
) -> tuple[Edit, ...] | None:
    """The edits that rename pmap and give it the axes of a plan; None where it has no brackets.

    Args:
      module: the file.
      site: a call of pmap, or of a partial of it.
      plan: with the axes.
      texts: of the site.
      edits: those that rename pmap.
    """
    call = site.node
    if not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return None
    last: Any = max((*call.args, *call.keywords), key=_end)
    start, end = module.span(last)
    before = module.source.line_text(start)[: module.source.position(start).column - 1]
    if "\n" in module.text(call):
        row = module.source.line_text(end)
        given = [f"{name}={text}" for name, text in _axes(plan)]
        is_long = len(row) + sum(len(each) + 2 for each in given) > texts.style.width
        indent = before[: len(before) - len(before.lstrip())]
        gap = f",\n{indent}" if is_long or not before.strip() else ", "
        new = "".join(f"{gap}{each}" for each in given)
        return tuple(sorted((*edits, Edit(end, end, new))))
    low, high = module.span(call)
    inside = [each for each in edits if low <= each.start and each.end <= high]
    renamed = {each.start: each.text for each in inside}  # each is a whole name
    positional = [_text(module, each, renamed) for each in call.args]
    keywords = [(each.arg or "", module.text(each.value)) for each in call.keywords]
    value = CallText(_text(module, call.func, renamed), positional, [*keywords, *_axes(plan)])
    outside = [each for each in edits if each not in inside]
    return tuple(sorted((*outside, Edit(low, high, texts.written(value, call)))))


def _text(module: Module, node: ast.expr, renamed: dict[int, str]) -> str:
    return renamed.get(module.span(node)[0], module.text(node))


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset
