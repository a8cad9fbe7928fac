"""One `jax.pmap` as `jax.jit(jax.shard_map(...))` over all devices of one process.

`jax.pmap` finds out at each call how many devices its arguments want, in which processes these are,
and where arrays lie. A `jit(shard_map)` has all that fixed where it is written. So `PmapFacts`
tells whether the text shows that there is nothing to find out, or the user has said so. `plan` and
`written` do not ask: the flow of the values may show it instead.
"""

import ast
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax_dist.checker.model import flow, pmaps
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import codegen, device_counts, use_sites
from jax_dist.codemod.codegen import CallText, Texts, Value
from jax_dist.codemod.results import Left, ProjectContext

_FORMS = ("call", "decorator", "partial decorator")


@dataclasses.dataclass(frozen=True, slots=True)
class Promises:
    """What the user says of the program."""

    one_process: bool = False  # it never runs in several
    all_devices: bool = False  # what is mapped has one slice for each device there is


class PmapFacts:
    """Tells for each place of a file what is not known, and was not promised."""

    def __init__(self, module: Module, context: ProjectContext, promises: Promises):
        self._module, self._context, self._promises = module, context, promises
        self._unknown: dict[Site, str] = {}  # by a place: the first thing that is not known of it
        for site in pmaps.sites(module):
            if site.form in _FORMS:
                self._unknown[site] = self._of_text(site)
        if not promises.all_devices:
            self._check_sizes()

    @property
    def several_processes(self) -> bool:
        """Whether there may be several."""
        return not self._promises.one_process and bool(self._context.sign)

    def unknown(self, site: Site) -> str:
        """The first thing that is not known of a place; "" where all is."""
        return self._unknown.get(site, "pmap is not applied there")

    # --- facts that a place shows by itself

    def _of_text(self, site: Site) -> str:
        if self.several_processes:
            return f"the program may run in several processes: {self._context.sign}"
        try:
            if codegen.import_within(self._module, site.reference) is not None:
                return "jax is imported inside of a function or block"
        except Left as left:
            return left.reason
        for why in self._of_arguments(site), self.unfit_place(site):
            if why:
                return why
        return self._of_calls(site)

    def _of_arguments(self, site: Site) -> str:
        devices = site.arguments.get("devices")
        is_none = isinstance(devices, ast.Constant) and devices.value is None
        match devices:
            case ast.Call(func=function, args=[], keywords=[]):
                is_all = self._module.qualified_name(function) == "jax.devices"
            case _:
                is_all = devices is None or is_none
        if not is_all:
            return "its devices are chosen at run time"
        for name in ("static_broadcasted_argnums", "backend", "axis_size"):
            if name in site.arguments:
                return f"it has {name}"
        if site.unknown:
            return f"its arguments come from {site.unknown}"
        return ""

    def unfit_place(self, site: Site) -> str:
        """Why a mesh cannot be made, or a function cannot be mapped again, where a place is."""
        around = self._module.function(site.node)
        if around is None:
            return "it is made while the module is imported, before devices may be asked for"
        for each in self._module.ancestors(site.node):
            if each is around:
                break
            if isinstance(each, ast.For | ast.While):
                return f"it is made in the loop of line {each.lineno}"
        runs_once = getattr(around, "name", "") == "main" and self._module.function(around) is None
        if self._is_lasting(site.fun) and not runs_once:
            return "it would be compiled again each time that the function around it runs"
        return ""

    def _is_lasting(self, fun: ast.expr) -> bool:
        """Whether it outlives the call around it, so that pmap finds what it compiled for it."""
        if isinstance(fun, ast.Attribute):
            return True
        if not isinstance(fun, ast.Name):
            return False
        found = self._module.scope(fun).lookup(fun.id)
        if found is None or found[0] is self._module.scopes.module:
            return True
        return any(binding.kind in ("import", "parameter") for binding in found[1])

    def _of_calls(self, site: Site) -> str:
        """All calls are seen, by position, with nothing shared but literals."""
        lost = use_sites.unseen(self._module, flow.of(self._module), site)
        if lost:
            return lost
        made = self._calls.get(site.node, [])
        if not made:
            return "no call of it is seen"
        shared = shared_positions(site)
        if shared is None:
            return "its in_axes are not literal"
        for call in made:
            if call.keywords or any(isinstance(each, ast.Starred) for each in call.args):
                return f"line {call.lineno} calls it with named or spread arguments"
            for position, argument in enumerate(call.args):
                if shared(position) and not isinstance(argument, ast.Constant):
                    return f"line {argument.lineno} shares an array that may lie elsewhere"
        return ""

    @functools.cached_property
    def _of_node(self) -> dict[ast.expr, Site]:
        return {site.node: site for site in reversed(self._unknown)}

    @functools.cached_property
    def _calls(self) -> dict[ast.expr, list[ast.Call]]:
        """By the node that is the mapped function."""
        found: dict[ast.expr, list[ast.Call]] = {}
        for call, made_by in flow.of(self._module).mapped_calls.items():
            found.setdefault(made_by.node, []).append(call)
        return found

    # --- sizes

    def _check_sizes(self) -> None:
        """A result has the size of what it is made of: so until no place is left that fails."""
        changed = True
        while changed:
            changed = False
            for site, unknown in self._unknown.items():
                why = "" if unknown else self._size_unknown(site)
                if why:
                    self._unknown[site], changed = why, True

    def _size_unknown(self, site: Site) -> str:
        shared = shared_positions(site)
        for call in self._calls.get(site.node, []):
            for position, argument in enumerate(call.args):
                is_shared = shared is not None and shared(position)
                origins = () if is_shared else flow.of(self._module).origins(argument)
                if not all(map(self._is_whole, origins)):
                    text = self._module.text(argument)
                    return f"nothing shows that {text} has a slice for each device"
        return ""

    def _is_whole(self, origin: flow.Origin) -> bool:
        match origin.kind:
            case Kind.REPLICATED | Kind.SPLIT:
                is_call = isinstance(origin.node, ast.Call)
                return is_call and not device_counts.why_not(self._module, origin.node)  # type: ignore[arg-type]
            case Kind.KEYS:
                return origin.count is not None and device_counts.counts_all(
                    self._module, origin.count
                )
            case Kind.MAPPED:
                site = self._of_node.get(origin.site.node)  # type: ignore[union-attr]
                return site is not None and not self._unknown[site]
        return False


def shared_positions(site: Site):
    """Whether an argument at a position is shared by all devices; None: the text does not say."""
    given = site.arguments.get("in_axes")
    match given:
        case None:
            return lambda position: False
        case ast.Constant(value=None):
            return lambda position: True
        case ast.Constant(value=int()):
            return lambda position: False
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            is_none = [isinstance(each, ast.Constant) and each.value is None for each in parts]
            if all(isinstance(each, ast.Constant) or is_default(each) for each in parts):
                return lambda position: position < len(is_none) and is_none[position]
    return None


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
    if site.form not in _FORMS or site.fun is None:
        raise Left("pmap is not applied there")
    if isinstance(site.fun, ast.AsyncFunctionDef):
        raise Left("pmap maps no async function")
    if codegen.import_within(module, site.reference) is not None:
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
    is_plain = is_default(in_axes) and is_default(out_axes)
    return DirectPlan(
        axis=axis,
        in_specs=_spec_text(in_axes, axis, spec, "in_axes"),
        out_specs=_spec_text(out_axes, axis, spec, "out_axes"),
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
    """`edits`, which rename pmap, and the axes of a plan; None where it has no brackets."""
    call = site.node
    if not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return None
    given: Any = (*call.args, *call.keywords)
    last = max(given, key=lambda each: (each.end_lineno, each.end_col_offset))
    start, end = module.span(last)
    before = module.source.line_text(start)[: module.source.position(start).column - 1]
    if "\n" in module.text(call):
        row = module.source.line_text(end)
        axes = [f"{name}={text}" for name, text in _axes(plan)]
        is_long = len(row) + sum(len(each) + 2 for each in axes) > texts.style.width
        gap = f",\n{codegen.indentation(before)}" if is_long or not before.strip() else ", "
        new = "".join(f"{gap}{each}" for each in axes)
        return tuple(sorted((*edits, Edit(end, end, new))))
    low, high = module.span(call)
    inside = [each for each in edits if low <= each.start and each.end <= high]
    renamed = {each.start: each.text for each in inside}  # each is a whole name
    text = lambda node: renamed.get(module.span(node)[0], module.text(node))
    positional = [text(each) for each in call.args]
    keywords = [(each.arg or "", module.text(each.value)) for each in call.keywords]
    value = CallText(text(call.func), positional, [*keywords, *_axes(plan)])
    outside = [each for each in edits if each not in inside]
    return tuple(sorted((*outside, Edit(low, high, texts.written(value, call)))))


def _spec_text(axes: ast.expr | None, axis: str, spec: str, parameter: str) -> str:
    """The PartitionSpecs that say the same as `axes`.

    Args:
      axes: what the file gives for `in_axes` or `out_axes`; None: not given, which means 0.
      axis: the text of the mesh axis, such as `"'batch'"`.
      spec: how the file calls `jax.sharding.PartitionSpec`.
      parameter: "in_axes" or "out_axes", for messages.

    Raises:
      Left: the axes are no literals that count from the front.
    """
    if axes is None:
        return f"{spec}({axis})"
    match axes:
        case ast.Constant(value=None):
            return f"{spec}()"
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return f"{spec}({'None, ' * number}{axis})"
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            texts = [_spec_text(part, axis, spec, parameter) for part in parts]
            if isinstance(axes, ast.Tuple):
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            return f"[{', '.join(texts)}]"
        case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
            pairs = zip(keys, values, strict=True)
            texts = [
                f"{ast.unparse(key)}: {_spec_text(value, axis, spec, parameter)}"  # type: ignore[arg-type]
                for key, value in pairs
            ]
            return f"{{{', '.join(texts)}}}"
    raise Left(f"{parameter} is no literal that counts from the front")


def integers(node: ast.expr | None, parameter: str) -> tuple[int, ...]:
    """The literal integers of `donate_argnums`; () if not given. Raises Left."""
    match node:
        case None | ast.Constant(value=None):
            return ()
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return (number,)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
            if len(numbers) == len(parts) and all(type(number) is int for number in numbers):
                return tuple(numbers)  # type: ignore[arg-type]
    raise Left(f"{parameter} is no literal that counts from the front")


def is_default(axes: ast.expr | None) -> bool:
    """Whether every part is axis 0."""
    match axes:
        case None:
            return True
        case ast.Constant(value=0) if axes.value is not False:
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(is_default, parts))
        case ast.Dict(values=values):
            return all(map(is_default, values))
    return False
