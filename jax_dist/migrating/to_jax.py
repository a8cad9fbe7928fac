"""One `jax.pmap` as `jax.jit(jax.shard_map(...))`: the fix, or why not."""

import ast
import dataclasses
from typing import Any

from jax_dist.checker import pmaps
from jax_dist.checker.findings import Edit, Fix, Safety
from jax_dist.checker.modules import PARTIAL, Module
from jax_dist.checker.pmaps import Site
from jax_dist.migrating import emitted, layout, specs
from jax_dist.migrating.layout import Call, Style, Value
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.texts import Texts

_KNOWN = {
    "axis_name",
    "in_axes",
    "out_axes",
    "static_broadcasted_argnums",
    "devices",
    "donate_argnums",
}
_UNNAMED_AXIS = "devices"


def fix(module: Module, site: Site, style: Style) -> Fix:
    """The fix of one place that applies `jax.pmap`.

    Args:
      module: the file.
      site: an application, one of `pmaps.sites(module)`.
      style: how the file is written.

    Raises:
      Left: it cannot be shown that the two would do the same.
    """
    _check_form(module, site)
    _check_arguments(module, site)
    _check_calls(module, site)
    texts = Texts(module, site.node, style)
    parts = _parts(module, site, texts)
    if site.form == "call":
        edits = (_call_edit(module, site, parts, texts),)
    else:
        edits = (_decorator_edit(module, site, parts, texts),)
    title = "use jax.jit(jax.shard_map(...))"
    return Fix(title, Safety.UNSAFE, edits, texts.imports, texts.definitions)


def _check_form(module: Module, site: Site) -> None:
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
    for partial in site.partials:
        if not _is_here(module, partial):
            raise Left(
                "some arguments are bound in another file",
                "Call jax.pmap itself here, with all its arguments, then migrate again.",
            )


def _is_here(module: Module, node: ast.AST) -> bool:
    while hasattr(node, "parent"):
        if node is module.tree:
            return True
        node = node.parent  # type: ignore[attr-defined]
    return node is module.tree


def _check_arguments(module: Module, site: Site) -> None:
    if site.unknown:
        raise Left(
            f"the arguments of pmap come from {site.unknown}",
            "Write them out at the call, then migrate again.",
        )
    for name, value in site.arguments.items():
        if name not in _KNOWN and not (isinstance(value, ast.Constant) and value.value is None):
            raise Left(
                f"shard_map has nothing like pmap's {name}",
                _BY_HAND.get(name, "Use jax_dist.pmap, which takes all arguments of jax.pmap."),
            )


_BY_HAND = {
    "backend": 'Give the devices themselves: devices=jax.devices("gpu").',
    "axis_size": "Give the devices themselves: devices=jax.devices()[:axis_size].",
}


def _check_calls(module: Module, site: Site) -> None:
    """shard_map takes no keyword arguments; pmap maps them over axis 0."""
    for call in pmaps.mapped_calls(module, site):
        names = [keyword.arg or "**" for keyword in call.keywords]
        if names:
            line = module.source.position(module.span(call)[0]).line
            raise Left(
                f"the mapped function is called with keyword arguments in line {line}: "
                f"{', '.join(names)}; shard_map takes positional ones only",
                "Pass them by position, then migrate again.",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """The pieces of the new text."""

    axis: str
    in_specs: str
    out_specs: str
    static: tuple[int, ...]
    jit_keywords: tuple[tuple[str, str], ...]
    axes_keywords: tuple[tuple[str, str], ...]  # of per_device_axes; () for per_device
    devices: str
    lazily: bool  # where the module is imported: the devices must not be asked for yet


def _parts(module: Module, site: Site, texts: Texts) -> _Parts:
    given = {name: value for name, value in site.arguments.items() if not _is_none(name, value)}
    static = specs.integers(given.get("static_broadcasted_argnums"), "static_broadcasted_argnums")
    if any(number < 0 for number in static):
        raise Left("static_broadcasted_argnums counts from the end")
    in_axes = specs.without(given.get("in_axes"), static, "in_axes")
    out_axes = given.get("out_axes")
    axis = module.text(given["axis_name"]) if "axis_name" in given else texts.quoted(_UNNAMED_AXIS)
    spec = texts.named("jax.sharding.PartitionSpec")
    keywords: list[tuple[str, str]] = []
    if static:
        keywords.append(("static_argnums", _tuple(static)))
    if "donate_argnums" in given:
        keywords.append(("donate_argnums", module.text(given["donate_argnums"])))
    axes: list[tuple[str, str]] = []
    if not (specs.is_default(in_axes) and specs.is_default(out_axes)):
        axes = [
            (name, _axes_text(module, value))
            for name, value in (("in_axes", in_axes), ("out_axes", out_axes))
            if value is not None
        ]
    return _Parts(
        axis=axis,
        in_specs=specs.spec_text(module, in_axes, axis, spec, "in_axes"),
        out_specs=specs.spec_text(module, out_axes, axis, spec, "out_axes"),
        static=static,
        jit_keywords=tuple(keywords),
        axes_keywords=tuple(axes),
        devices=module.text(given["devices"]) if "devices" in given else "",
        lazily="devices" not in given and not static and module.function(site.node) is None,
    )


def _is_none(name: str, value: ast.expr) -> bool:
    """`devices=None` is as good as nothing; `in_axes=None` is not."""
    return name not in ("in_axes", "out_axes") and (
        isinstance(value, ast.Constant) and value.value is None
    )


def _tuple(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else repr(numbers)


def _axes_text(module: Module, axes: ast.expr) -> str:
    try:
        return module.text(axes)
    except AttributeError:  # made here, without the static arguments
        assert isinstance(axes, ast.Tuple)
        parts = [module.text(part) for part in axes.elts]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _mapped(fun: Value, parts: _Parts, texts: Texts) -> Value:
    """`jax.shard_map(per_device(fun), mesh=..., ...)`."""
    if parts.lazily:
        over = texts.helper(emitted.OVER_DEVICES)
        keywords = [("in_specs", parts.in_specs), ("out_specs", parts.out_specs)]
        return Call(over, [_body(fun, parts, texts), parts.axis], keywords)
    return Call(
        texts.named("jax.shard_map"), [_body(fun, parts, texts)], _shard_map_keywords(parts, texts)
    )


def _shard_map_keywords(parts: _Parts, texts: Texts) -> list[tuple[str, Value]]:
    devices: Value = parts.devices or f"{texts.named('jax.devices')}()"
    mesh = Call(texts.named("jax.sharding.Mesh"), [devices, f"({parts.axis},)"])
    return [
        ("mesh", mesh),
        ("in_specs", parts.in_specs),
        ("out_specs", parts.out_specs),
        ("check_vma", "False"),
    ]


def _body(fun: Value, parts: _Parts, texts: Texts) -> Value:
    if not parts.axes_keywords:
        return Call(texts.helper(emitted.PER_DEVICE), [fun])
    return Call(texts.helper(emitted.PER_DEVICE_AXES), [fun], parts.axes_keywords)


def _call_edit(module: Module, site: Site, parts: _Parts, texts: Texts) -> Edit:
    if site.fun is None:
        raise Left("pmap is called without a function")
    whole, comments = _around(module, site, texts)
    fun = texts.moved(site.fun)
    if parts.static:
        name, keywords = _static_call(parts, texts)
        mapped: Value = Call(name, [fun], keywords)
    else:
        mapped = _mapped(fun, parts, texts)
    value = Call(texts.named("jax.jit"), [mapped], parts.jit_keywords, comments)
    return Edit(*module.span(whole), texts.written(value, whole))


def _static_call(parts: _Parts, texts: Texts) -> tuple[str, list[tuple[str, Value]]]:
    """`shard_map_with_static`, and its keyword arguments."""
    if parts.axes_keywords:
        axes = texts.helper(emitted.PER_DEVICE_AXES)
        wrap: Value = Call(texts.named("functools.partial"), [axes], parts.axes_keywords)
    else:
        wrap = texts.helper(emitted.PER_DEVICE)
    static: list[tuple[str, Value]] = [
        ("static_argnums", _positions(parts.static)),
        ("wrap", wrap),
    ]
    name = texts.helper(emitted.WITH_STATIC)
    return name, static + _shard_map_keywords(parts, texts)


def _positions(static: tuple[int, ...]) -> str:
    return f"({static[0]},)" if len(static) == 1 else repr(static)


def _around(module: Module, site: Site, texts: Texts) -> tuple[ast.expr, list[str]]:
    """What is replaced, with a jit around it that has nothing to say; and the comments in it."""
    whole: Any = site.node
    around: Any = module.parent(whole)
    plain = isinstance(around, ast.Call) and around.args == [whole] and not around.keywords
    if plain and module.qualified_name(around.func) == "jax.jit":
        whole = around
    kept = [site.fun, *site.arguments.values()]
    return whole, texts.comments(whole, kept)


def _decorator_edit(module: Module, site: Site, parts: _Parts, texts: Texts) -> Edit:
    """`@jax.jit`, then `@partial(jax.shard_map, ...)`, then `@per_device`, each on its line."""
    _check_decorated(module, site)
    partial = texts.named(_partial_name(module, site))
    lines: list[Value] = [_as_decorator(texts.named("jax.jit"), partial, (), parts.jit_keywords)]
    if parts.static:
        name, keywords = _static_call(parts, texts)
        lines.append(_as_decorator(name, partial, (), keywords))
    elif parts.lazily:
        over = texts.helper(emitted.OVER_DEVICES)
        keywords: list[tuple[str, Value]] = [
            ("axis_name", parts.axis),
            ("in_specs", parts.in_specs),
            ("out_specs", parts.out_specs),
        ]
        lines.append(_as_decorator(over, partial, (), keywords))
    else:
        name = texts.named("jax.shard_map")
        lines.append(_as_decorator(name, partial, (), _shard_map_keywords(parts, texts)))
    if not parts.static:
        helper = emitted.PER_DEVICE_AXES if parts.axes_keywords else emitted.PER_DEVICE
        lines.append(_as_decorator(texts.helper(helper), partial, (), parts.axes_keywords))
    indent = texts.indent_of(site.node)
    comments = texts.comments(site.node, list(site.arguments.values()))
    written = [texts.written(line, site.node) for line in lines]
    newline = f"\n{indent}"
    above = "".join(f"{comment}{newline}" for comment in comments)
    start, end = module.span(site.node)
    at = texts.at_sign(start) if comments else start
    mark = "@" if comments else ""
    return Edit(at, end, above + mark + f"{newline}@".join(written))


def _as_decorator(name: str, partial: str, positional: Any, keywords: Any) -> Value:
    return Call(partial, [name, *positional], keywords) if keywords else name


def _partial_name(module: Module, site: Site) -> str:
    for partial in site.partials:
        name = module.qualified_name(partial.func)
        if name in PARTIAL:
            return name
    return "functools.partial"


def _check_decorated(module: Module, site: Site) -> None:
    function = site.fun
    if isinstance(function, ast.AsyncFunctionDef):
        raise Left("pmap maps no async function")
    del module
