"""One `jax.pmap` as `jax.jit(jax.shard_map(...))`: the fix, or why not."""

import ast
from typing import Any

from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import PARTIAL, Module
from jax_dist.checker.pmaps import Site
from jax_dist.migrating import emitted, plans
from jax_dist.migrating.layout import Call, Style, Value
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.plans import Plan
from jax_dist.migrating.texts import Texts


def fix(module: Module, site: Site, style: Style) -> Fix:
    """The fix of one place that applies `jax.pmap`.

    Args:
      module: the file.
      site: one of `pmaps.sites(module)`.
      style: how the file is written.

    Raises:
      Left: it cannot be shown that the two would do the same.
    """
    check_form(module, site)
    texts = Texts(module, site.node, style)
    return written(module, site, plans.plan(module, site, texts), texts)


def written(module: Module, site: Site, plan: Plan, texts: Texts, group: str = "") -> Fix:
    """The fix that puts a plan into words."""
    edit = (_call_edit if site.form == "call" else _decorator_edit)(module, site, plan, texts)
    title = "use jax.jit(jax.shard_map(...))"
    return Fix(title, Safety.UNSAFE, (edit,), texts.imports, texts.definitions, group)


def check_form(module: Module, site: Site) -> None:
    """Raises Left for what is no application of pmap, or none that can stay where it is."""
    if site.form == "value":
        raise Left(
            "pmap is passed on as a value, so what it will be given is not known here",
            "Pass a function of your own that does jax.jit(jax.shard_map(...)), or jax_dist.pmap.",
        )
    if site.form == "called decorator":
        raise Left(
            "`@jax.pmap(...)` without a function fails at run time",
            "Write @functools.partial(jax.pmap, ...), then migrate again.",
        )
    if isinstance(site.fun, ast.AsyncFunctionDef):
        raise Left("pmap maps no async function")
    if site.form == "call":
        if site.fun is None:
            raise Left("pmap is called without a function")
        _check_loop(module, site)


def _check_loop(module: Module, site: Site) -> None:
    """pmap remembers what it compiled for a function; a new jit of it compiles anew."""
    call = module.parent(site.node)
    at_once = isinstance(call, ast.Call) and call.func is site.node
    if not at_once or not isinstance(site.fun, ast.Name | ast.Attribute):
        return
    for around in module.ancestors(site.node):
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(around, ast.For | ast.While):
            raise Left(
                f"the function is mapped and called at once in a loop (line {around.lineno}): "
                "jax.pmap compiles it once, and a new jax.jit would in each round",
                "Bind the mapped function to a name above the loop, then migrate again.",
            )


def _call_edit(module: Module, site: Site, plan: Plan, texts: Texts) -> Edit:
    whole = _around(module, site)
    depth = 2 if plan.static or plan.keywords or plan.bare else 3  # calls around it
    mapped = _mapped(texts.moved(site.fun, depth), plan, texts)
    comments = texts.comments(whole, [site.fun, *site.arguments.values()])
    value = Call(texts.named("jax.jit"), [mapped], plan.jit_keywords, comments)
    return Edit(*module.span(whole), texts.written(value, whole))


def _around(module: Module, site: Site) -> ast.expr:
    """What is replaced: the call, with a jit around it that has nothing to say."""
    around: Any = module.parent(site.node)
    plain = isinstance(around, ast.Call) and around.args == [site.node] and not around.keywords
    return around if plain and module.qualified_name(around.func) == "jax.jit" else site.node


def _mapped(fun: Value, plan: Plan, texts: Texts) -> Value:
    """`jax.shard_map(per_device(fun), mesh=..., ...)`, or the helper that stands for it."""
    name, keywords, wraps_itself = _map(plan, texts)
    if wraps_itself or plan.bare:
        return Call(name, [fun], keywords)
    helper, axes = _per_device(plan, texts)
    return Call(name, [Call(helper, [fun], axes)], keywords)


def _map(plan: Plan, texts: Texts) -> tuple[str, list[tuple[str, Value]], bool]:
    """`(function, keywords, wraps)`: what maps; whether it applies per_device by itself."""
    specs: list[tuple[str, Value]] = [("in_specs", plan.in_specs), ("out_specs", plan.out_specs)]
    if plan.lazily:
        return texts.helper(emitted.OVER_DEVICES), [("axis_name", plan.axis), *specs], False
    devices: Value = plan.devices or f"{texts.named('jax.devices')}()"
    mesh = Call(texts.named("jax.sharding.Mesh"), [devices, f"({plan.axis},)"])
    specs = [("mesh", mesh), *specs, ("check_vma", "False")]
    if plan.static:
        static: Value = repr(plan.static)
        leading: list[tuple[str, Value]] = [("static_argnums", static), ("wrap", _wrap(plan, texts))]
        return texts.helper(emitted.WITH_STATIC), leading + specs, True
    if plan.keywords:
        return texts.helper(emitted.WITH_KEYWORDS), [("wrap", _wrap(plan, texts)), *specs], True
    return texts.named("jax.shard_map"), specs, False


def _wrap(plan: Plan, texts: Texts) -> Value:
    helper, axes = _per_device(plan, texts)
    return Call(texts.named("functools.partial"), [helper], axes) if axes else helper


def _per_device(plan: Plan, texts: Texts) -> tuple[str, list[tuple[str, str]]]:
    """The helper that takes the mapped axes off, and its keywords."""
    axes = [("in_axes", plan.in_axes), ("out_axes", plan.out_axes)]
    axes = [(name, text) for name, text in axes if text]
    return texts.helper(emitted.PER_DEVICE_AXES if axes else emitted.PER_DEVICE), axes


def _decorator_edit(module: Module, site: Site, plan: Plan, texts: Texts) -> Edit:
    """`@jax.jit`, then `@partial(jax.shard_map, ...)`, then `@per_device`, each on its line."""
    partial = texts.named(_partial_name(module, site))
    name, keywords, wraps_itself = _map(plan, texts)
    lines = [
        _as_decorator(texts.named("jax.jit"), partial, plan.jit_keywords),
        _as_decorator(name, partial, keywords),
    ]
    if not wraps_itself and not plan.bare:
        helper, axes = _per_device(plan, texts)
        lines.append(_as_decorator(helper, partial, axes))
    comments = texts.comments(site.node, list(site.arguments.values()))
    newline = f"\n{texts.indent_of(site.node)}"
    above = "".join(f"{comment}{newline}" for comment in comments)
    start, end = module.span(site.node)
    at = texts.at_sign(start) if comments else start
    mark = "@" if comments else ""
    text = f"{newline}@".join(texts.written(line, site.node) for line in lines)
    return Edit(at, end, above + mark + text)


def _as_decorator(name: str, partial: str, keywords: Any) -> Value:
    return Call(partial, [name], keywords) if keywords else name


def _partial_name(module: Module, site: Site) -> str:
    for partial in filter(module.holds, site.partials):
        name = module.qualified_name(partial.func)
        if name in PARTIAL:
            return name
    return "functools.partial"
