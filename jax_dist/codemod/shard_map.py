"""One `jax.pmap` as `jax.jit(jax.shard_map(...))` over all devices of one process.

`jax.pmap` finds out at each call how many devices its arguments want, in which processes these are,
and where arrays lie. A `jit(shard_map)` has all that fixed where it is written, and raises where a
call does not fit. So `PmapFacts` tells whether a run has shown that there is nothing to find out,
or will show it, or the user has said so. A `DirectPlan` does not ask: the flow of the values may
show it instead.
"""

import ast
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from jax_dist.checker.model import pmaps, scopes, traced
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import PARTIAL, Module
from jax_dist.checker.model.stacking import lists_devices
from jax_dist.codemod import codegen, named_calls, site_parts
from jax_dist.codemod.codegen import CallText, Texts, Value
from jax_dist.codemod.named_calls import NamedCalls
from jax_dist.codemod.results import Left, ProjectContext

if TYPE_CHECKING:
    from jax_dist.codemod.recorded_flow import FileFlow

_FORMS = ("call", "decorator", "partial decorator")
_ASKING = frozenset(
    ("jax.devices", "jax.local_devices", "jax.device_count", "jax.local_device_count")
)
# What must come before devices are asked for.
_SETTING = re.compile(
    rb"XLA_FLAGS|XLA_PYTHON_CLIENT|JAX_PLATFORM|JAX_NUM_CPU|CUDA_VISIBLE|distributed\.initialize"
    rb"|jax_platform|jax_num_cpu_devices|set_cpu_device_count"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Promises:
    """What the user says of the program."""

    one_process: bool = False  # it never runs in several
    all_devices: bool = False  # what is mapped has one slice for each device there is


class PmapFacts:
    """Tells for each place of a file what is not known, and was not promised.

    Args:
      module: the file.
      context: its project.
      promises: of the user.
      is_tried: a run of the program will show what the text leaves open of its calls.
      flow: what a run has shown already.
    """

    def __init__(
        self,
        module: Module,
        context: ProjectContext,
        promises: Promises,
        *,
        is_tried: bool = False,
        flow: "FileFlow | None" = None,
    ):
        self._module, self._context, self._promises = module, context, promises
        self._is_tried, self._flow = is_tried, flow

    @property
    def several_processes(self) -> bool:
        """Whether there may be several."""
        return not self._promises.one_process and bool(self.sign)

    def check_one_process(self) -> None:
        """Raises Left where it is no promise, for what would notice nothing of several."""
        if not self._promises.one_process:
            raise Left("several processes would go unnoticed, without --one-process")

    @property
    def sign(self) -> str:
        """What shows it; or ""."""
        return self._context.sign(self._module.source.path)

    def is_read_elsewhere(self, field: str) -> bool:
        """Whether another file of the program has a text that may read a field of an object."""
        pattern = re.compile(rb"\." + field.encode() + rb"\b")
        return self._context.is_in_another(pattern, os.path.abspath(self._module.source.path))

    def is_subclassed_elsewhere(self, name: str) -> bool:
        """Whether another file of the program has a text that may define a subclass of a class."""
        pattern = re.compile(rb"class\s+\w+\s*\([^)]*\b" + name.encode() + rb"\b")
        return self._context.is_in_another(pattern, os.path.abspath(self._module.source.path))

    def slices(self, site: Site) -> int | None:
        """How many slices its calls have, if fewer than there are devices, and that is known."""
        return self._flow.slices(site) if self._flow else None

    def named_calls(self, site: Site) -> NamedCalls:
        """Its calls that give arguments by name."""
        return named_calls.of(self._flow, site) if self._flow else NamedCalls()

    def unknown(self, site: Site, but: str = "") -> str:
        """The first thing that is not known of a place; "" where all is.

        Args:
          site: the place.
          but: an argument of pmap that does not count.
        """
        if site.form not in _FORMS:
            return "pmap is not applied there"
        if self.several_processes:
            return f"the program may run in several processes, without --one-process: {self.sign}"
        if not (self._is_tried or (self._promises.one_process and self._promises.all_devices)):
            return "nothing shows how it is called: --verify does, or --one-process --all-devices"
        try:
            if codegen.import_within(self._module, site.reference) is not None:
                return "jax is imported inside of a function or block"
        except Left as left:
            return left.reason
        if why := self._of_devices(site.arguments.get("devices")):
            return why
        for name in ("static_broadcasted_argnums", "backend", "axis_size"):
            if name in site.arguments and name != but:
                return f"it has {name}"
        if site.unknown:
            return f"its arguments come from {site.unknown}"
        if why := self._unfit_place(site) or (self._flow.misfit(site) if self._flow else ""):
            return why
        if why := self.named_calls(site).why_not:
            return why
        return "" if self._is_tried else self._of_calls(site)

    def _of_devices(self, given: ast.expr | None) -> str:
        """Why no mesh can be made of what pmap is given; "" where one can."""
        if given is None or is_none(given):
            return ""
        match given:
            case ast.Call(func=function, args=[], keywords=[]):
                if self._module.qualified_name(function) == "jax.devices":
                    return ""
        if not self._module.holds(given):
            return "another file gives its devices"
        is_list = self._is_a_list(given) or lists_devices(self._module, given)
        return "" if is_list else "its devices may be None"  # of which no mesh can be made

    def _is_a_list(self, given: ast.expr) -> bool:
        """Whether the text shows that a value is no None, in another run neither."""
        if not isinstance(given, ast.Name):
            return isinstance(given, ast.Call | ast.Subscript | ast.List | ast.ListComp)
        values = self._module.values(given)
        return bool(values) and all(map(self._is_a_list, values))

    def _unfit_place(self, site: Site) -> str:
        """Why a mesh cannot be made, or a function cannot be mapped again, where a place is."""
        if self._module.function(site.node) is None:
            return self._too_early(site)
        if self._flow is not None and self._flow.is_mapped_once(site):
            return ""
        if not site_parts.may_map_again(self._module, site) or self._is_own_method(site):
            return ""
        return "the function that it maps may be mapped again, and would be compiled again"

    def _too_early(self, site: Site) -> str:
        """Why a module may not ask for devices while it is imported; "" where it may."""
        start, path = self._module.span(site.node)[0], os.path.abspath(self._module.source.path)
        if start > self._asks_from:
            return ""  # it does already
        is_set = self._sets_until < start  # what this file sets is set by then
        setting = self._context.first(_SETTING, near=[path], but=path if is_set else "")
        why = "it is made while the module is imported, before devices may be asked for: see"
        return f"{why} {setting}" if setting else ""

    @functools.cached_property
    def _asks_from(self) -> float:
        """Where the module first asks for devices while it is imported."""
        module, found = self._module, [math.inf]
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or module.function(node) is not None:
                continue
            if module.qualified_name(node.func) in _ASKING:
                found.append(module.span(node)[0])
        return min(found)

    @functools.cached_property
    def _sets_until(self) -> float:
        """Where the last statement ends that sets what must come before; in a function, never."""
        module, until = self._module, 0.0
        for node in module.tree.body:
            start, end = module.span(node)
            if _SETTING.search(module.source.code, start, end):
                functions = (e for e in ast.walk(node) if isinstance(e, scopes.Function))
                spans = map(module.span, functions)
                inside = any(_SETTING.search(module.source.code, *span) for span in spans)
                until = math.inf if inside else end
        return until

    def _is_own_method(self, site: Site) -> bool:
        """Whether an object maps a method of its own while it is made: another one each time."""
        match site.fun, self._module.function(site.node):
            case (
                ast.Attribute(value=ast.Name(id=name)),
                ast.FunctionDef(name="__init__", args=ast.arguments(args=[own, *_])),
            ):
                return name == own.arg
        return False

    def _of_calls(self, site: Site) -> str:
        """What of the calls that are seen does not fit, whatever is promised; "" where all do."""
        shared = shared_positions(site)
        if shared is None:
            return "its in_axes are not literal"
        for call in pmaps.mapped_calls(self._module, site):
            if traced.around(self._module, call) is not None:
                return f"line {call.lineno} runs it under a transformation"
            if call.keywords:
                return f"line {call.lineno} calls it with named arguments"
            for position, argument in enumerate(call.args):
                if shared(position) and not isinstance(argument, ast.Constant):
                    return f"line {argument.lineno} shares an array that may lie elsewhere"
        return ""


def is_none(node: ast.expr) -> bool:
    """Whether it is a literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def shared_positions(site: Site) -> Callable[[int], bool] | None:
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
            of_all = list(map(is_none, parts))
            if all(isinstance(each, ast.Constant) or is_default(each) for each in parts):
                return lambda position: position < len(of_all) and of_all[position]
    return None


_KNOWN = frozenset(("axis_name", "in_axes", "out_axes", "devices", "donate_argnums"))


@dataclasses.dataclass(frozen=True, slots=True)
class DirectPlan:
    """The pieces of the new text of one application of pmap; they are Python."""

    site: Site
    texts: Texts
    axis: str  # the name of the mesh axis: "'batch'"
    in_specs: str
    out_specs: str
    in_axes: str = ""  # for `per_device`; "" where all are 0
    out_axes: str = ""
    is_bare: bool = False  # the function has no mapped axis to take off: it is mapped as it is
    donated: str = ""
    devices: str = ""  # where they are given; "" for all
    names: tuple[str, ...] = ()  # of its last arguments, which its calls give by name

    @classmethod
    def of(
        cls,
        site: Site,
        texts: Texts,
        *,
        without: Collection[str] = (),
        slices: int | None = None,
        names: tuple[str, ...] = (),
    ) -> "DirectPlan":
        """The plan for a place.

        Args:
          site: the place.
          texts: the text around it.
          without: arguments of pmap that are left out.
          slices: how many its calls have; None if as many as there are devices.
          names: of the last arguments, which its calls give by name.

        Raises:
          Left: an argument cannot be read, or has no counterpart.
        """
        module = texts.module
        if site.form not in _FORMS or site.fun is None:
            raise Left("pmap is not applied there")
        if isinstance(site.fun, ast.AsyncFunctionDef):
            raise Left("pmap maps no async function")
        if codegen.import_within(module, site.reference) is not None:
            raise Left("jax is imported inside of a function or block")
        if site.unknown:
            raise Left(f"the arguments of pmap come from {site.unknown}")
        # `devices=None` is as good as nothing; `in_axes=None` is not.
        given = {
            name: value
            for name, value in site.arguments.items()
            if name not in without and (name in ("in_axes", "out_axes") or not is_none(value))
        }
        for name, value in given.items():
            if name not in _KNOWN:
                raise Left(f"shard_map has nothing like pmap's {name}")
            if not module.holds(value):
                raise Left(f"another file gives {name} of pmap")
        in_axes, out_axes = given.get("in_axes"), given.get("out_axes")
        text = lambda name, default="": module.text(given[name]) if name in given else default
        axis = text("axis_name", f"{texts.style.quote}devices{texts.style.quote}")
        spec = texts.named("jax.sharding.PartitionSpec")
        is_plain = is_default(in_axes) and is_default(out_axes)
        if names and not (is_default(in_axes) and site.form == "call"):
            raise Left("a call gives arguments by name")
        of_all = "" if slices is None else f"{texts.named('jax.devices')}()[:{slices}]"
        return cls(
            site,
            texts,
            axis=axis,
            in_specs=_spec_text(in_axes, axis, spec, "in_axes"),
            out_specs=_spec_text(out_axes, axis, spec, "out_axes"),
            in_axes="" if is_plain else text("in_axes"),
            out_axes="" if is_plain else text("out_axes"),
            donated=text("donate_argnums"),
            devices=text("devices", of_all),
            names=names,
        )

    def fix(self, group: str = "") -> Fix:
        """Puts the plan into words."""
        edit = self._call_edit() if self.site.form == "call" else self._decorator_edit()
        title = "use jax.jit(jax.shard_map(...))"
        return Fix(title, Safety.UNSAFE, (edit,), self.texts.imports, group)

    def _call_edit(self) -> Edit:
        site, texts, module = self.site, self.texts, self.texts.module
        whole: ast.expr = site.node
        around = module.parent(whole)
        match around:
            case ast.Call(args=[_], keywords=[]) if around.func is not whole:
                if module.qualified_name(around.func) == "jax.jit":
                    whole = around  # it has nothing to say
        depth = 2 + (not self.is_bare) + bool(self.names)  # calls around it
        mapped: Value = texts.moved(site.fun, depth)
        if self.names:
            quote = texts.style.quote
            names = [f"{quote}{name}{quote}" for name in self.names]
            mapped = CallText(texts.helper("by_position"), [mapped, *names])
        if not self.is_bare:
            mapped = CallText(self._per_device, [mapped], self._axes)
        mapped = CallText(texts.named("jax.shard_map"), [mapped], self._specs())
        comments = texts.comments(whole, [site.fun, *site.arguments.values()])
        value = CallText(texts.named("jax.jit"), [mapped], self._donation, comments)
        return Edit(*module.span(whole), texts.written(value, whole))

    def _decorator_edit(self) -> Edit:
        """`@jax.jit`, then `@partial(jax.shard_map, ...)`, then `@per_device`, each on its line."""
        site, texts, module = self.site, self.texts, self.texts.module
        used = (module.qualified_name(each.func) for each in site.partials if module.holds(each))
        own = (name for name in used if name in PARTIAL)
        partial = texts.named(next(own, None) or "functools.partial")
        bound = lambda name, keywords: CallText(partial, [name], keywords) if keywords else name
        lines = [
            bound(texts.named("jax.jit"), self._donation),
            bound(texts.named("jax.shard_map"), self._specs()),
        ]
        if not self.is_bare:
            lines.append(bound(self._per_device, self._axes))
        comments = texts.comments(site.node, list(site.arguments.values()))
        newline = f"\n{texts.indent_of(site.node)}"
        above = "".join(f"{comment}{newline}" for comment in comments)
        start, end = module.span(site.node)
        at = module.source.code.rindex(b"@", 0, start) if comments else start
        mark = "@" if comments else ""
        text = f"{newline}@".join(texts.written(line, site.node) for line in lines)
        return Edit(at, end, above + mark + text)

    @property
    def _per_device(self) -> str:
        return self.texts.helper("per_device", *(("dims",) if self._axes else ()))

    @property
    def mesh(self) -> str:
        devices = self.devices or f"{self.texts.named('jax.devices')}()"
        return f"{self.texts.named('jax.sharding.Mesh')}({devices}, ({self.axis},))"

    def _specs(self) -> list[tuple[str, Value]]:
        return [
            ("mesh", self.mesh),
            ("in_specs", self.in_specs),
            ("out_specs", self.out_specs),
            ("check_vma", "False"),
        ]

    @property
    def _axes(self) -> list[tuple[str, str]]:
        given = [("in_axes", self.in_axes), ("out_axes", self.out_axes)]
        return [(name, text) for name, text in given if text]

    @property
    def _donation(self) -> list[tuple[str, str]]:
        return [("donate_argnums", self.donated)] if self.donated else []


def _spec_text(axes: ast.expr | None, axis: str, spec: str, parameter: str) -> str:
    """The PartitionSpecs, which the file calls `spec`, that say the same as `axes` of pmap.

    Raises Left where these are no literals that count from the front.
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
