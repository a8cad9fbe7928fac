"""One `jax.pmap` as `jax.jit(jax.shard_map(...))`: the fix, or why not."""

import ast
import dataclasses
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
    plan = plans.plan(module, site, texts)
    if _is_called_at_once(module, site):
        if plan.is_plain and _is_lasting(module, site.fun):
            return _remembered(module, site, plan, style)
        _check_loop(module, site)
        if not plan.devices and not plan.keywords:
            plan = dataclasses.replace(plan, lazily=True)  # the arguments say how many
    return written(module, site, plan, texts)


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
            f"Pass a function of your own that does this, or jax_dist.pmap.\n{_OWN_PMAP}",
        )
    if site.form == "called decorator":
        raise Left(
            "`@jax.pmap(...)` without a function fails at run time",
            "Bind the arguments by partial, then migrate again.\n"
            '@functools.partial(jax.pmap, axis_name="i")',
        )
    if isinstance(site.fun, ast.AsyncFunctionDef):
        raise Left("pmap maps no async function", "Map the function that it awaits.")
    if site.form == "call" and site.fun is None and not site.unknown:
        raise Left(
            "pmap is called without a function, which fails at run time",
            "Use functools.partial to bind arguments before the function is known.",
        )


def _is_called_at_once(module: Module, site: Site) -> bool:
    """`pmap(f)(x)`."""
    call = module.parent(site.node)
    return isinstance(call, ast.Call) and call.func is site.node


def _is_lasting(module: Module, fun: ast.expr) -> bool:
    """Whether it is a function of a module or a bound method, which outlives the call."""
    if isinstance(fun, ast.Attribute):
        return True
    found = module.scope(fun).lookup(fun.id) if isinstance(fun, ast.Name) else None
    if found is None or found[0] is not module.scopes.module:
        return False
    return all(binding.kind in ("def", "import") for binding in found[1])


def _remembered(module: Module, site: Site, plan: Plan, style: Style) -> Fix:
    """pmap remembers what it compiled for a function; a new jit each time would compile anew."""
    texts = Texts(module, site.node, style)
    texts.helper(emitted.PER_DEVICE)
    texts.helper(emitted.OVER_DEVICES)
    value = Call(texts.helper(emitted.JIT_OVER_DEVICES), [texts.moved(site.fun, 1), plan.axis])
    whole = _around(module, site)
    edit = Edit(*module.span(whole), texts.written(value, whole))
    return Fix(
        "use jax.jit(jax.shard_map(...))", Safety.UNSAFE, (edit,), texts.imports, texts.definitions
    )


def _check_loop(module: Module, site: Site) -> None:
    """What pmap compiles once would be compiled anew in each round; not so a new function."""
    if not isinstance(site.fun, ast.Name | ast.Attribute):
        return
    for around in module.ancestors(site.node):
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(around, ast.For | ast.While):
            raise Left(
                "the function is mapped and called at once in a loop: jax.pmap compiles it once, "
                "and a new jax.jit would in each round",
                "Bind the mapped function to a name above the loop, then migrate again.\n"
                "mapped = jax.pmap(fun)\nfor x in xs:\n    y = mapped(x)",
                f"the loop in line {around.lineno}",
            )


_OWN_PMAP = """\
def pmap(fun, axis_name="devices"):
    mesh = jax.sharding.Mesh(jax.devices(), (axis_name,))
    specs = jax.sharding.PartitionSpec(axis_name)

    def body(*args):  # each argument keeps the mapped axis, of size 1
        result = fun(*jax.tree.map(lambda x: jnp.squeeze(x, 0), args))
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), result)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(mapped)"""


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
        over = texts.helper(emitted.OVER_DEVICES)
        specs = [("axis_name", plan.axis), *specs]
    else:
        devices: Value = plan.devices or f"{texts.named('jax.devices')}()"
        mesh = Call(texts.named("jax.sharding.Mesh"), [devices, f"({plan.axis},)"])
        specs = [("mesh", mesh), *specs, ("check_vma", "False")]
        over = ""
    if plan.static:
        leading = [("static_argnums", repr(plan.static)), ("wrap", _wrap(plan, texts))]
        leading += [("map_function", over)] if over else []
        return texts.helper(emitted.WITH_STATIC), leading + specs, True
    if over:
        return over, specs, False
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
