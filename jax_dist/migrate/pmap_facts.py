"""What is known of a place that applies `jax.pmap`, and what of it `jit(shard_map)` cannot do.

`jax.pmap` finds out at each call how many devices its arguments want, in which processes these are,
and where arrays lie. A `jit(shard_map)` has all that fixed where it is written, and raises where a
call does not fit. So the facts tell whether a run has shown that there is nothing to find out, or
will show it, or the user has said so.
"""

import ast
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from jax_dist.lint.model import functions, pmaps, scopes, traced
from jax_dist.lint.model.import_graph import outermost_package
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.stacking import lists_devices
from jax_dist.migrate import (
    codegen,
    error_handlers,
    forks,
    imports,
    named_calls,
    site_parts,
    state_reads,
)
from jax_dist.migrate.named_calls import NamedCalls
from jax_dist.migrate.results import Left, ProjectContext

if TYPE_CHECKING:
    from jax_dist.migrate.recorded_flow import FileFlow

FORMS = ("call", "decorator", "partial decorator")
_ASKING = frozenset(
    ("jax.devices", "jax.local_devices", "jax.device_count", "jax.local_device_count")
)
# What must come before devices are asked for.
_SETTING = re.compile(
    rb"XLA_FLAGS|XLA_PYTHON_CLIENT|JAX_PLATFORM|JAX_NUM_CPU|CUDA_VISIBLE|distributed\.initialize"
    rb"|jax_platform|jax_num_cpu_devices|set_cpu_device_count|dotenv"
    # What is set by a name, or by several, that the text does not show.
    rb"|\benviron\s*(?:\|=|\.(?:update|__setitem__)\()|\bputenv\(\s*[^\"'\s]"
    rb"|\benviron(?:\.setdefault\(\s*[^\"'\s]|\[(?![\"'][^\"'\n]*[\"']\])[^]\n]*\]\s*=[^=])"
)


# What gives names values by their text.
_REFLECTION = re.compile(rb"\b(?:exec|eval|globals|locals|vars)\s*\(|__dict__|\bsys\.modules\[")


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
        self._named: dict[Site, NamedCalls] = {}
        self._settings: dict[tuple[str, str, str], str] = {}
        self._states: dict[Site, str] = {}

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

    @functools.cached_property
    def free_axis(self) -> str:
        """A name for the axis of a pmap that has none, by which the program knows no axis."""
        return self._context.free_axis(self._module)

    @property
    def reader_of_specs(self) -> str:
        """A place of the program that decides by the spec of an array's sharding; or ""."""
        return self._context.reader_of_specs(self._module)

    def slices(self, site: Site) -> int | None:
        """How many slices its calls have, if fewer than there are devices, and that is known."""
        return self._flow.slices(site) if self._flow else None

    def named_calls(self, site: Site) -> NamedCalls:
        """Its calls that give arguments by name."""
        if site not in self._named:
            self._named[site] = named_calls.of(self._flow, site) if self._flow else NamedCalls()
        return self._named[site]

    def text_of(self, site: Site, name: str) -> str:
        """An argument of pmap as this file writes it, also where another file gives it.

        As in `constants.pmap(f)`, of which `constants` says `partial(jax.pmap, axis_name=AXIS)`:
        then it is `constants.AXIS`.

        Raises:
          Left: it would mean something else here, or nothing.
        """
        module, value = self._module, site.arguments[name]
        if module.holds(value):
            return module.text(value)
        project, reference = self._context.project, site.reference
        if isinstance(value, ast.Constant):
            return ast.unparse(value)
        home = imports.definer(module, project, reference)
        other = None if home is None else project.opened(home)
        if isinstance(value, ast.Name) and isinstance(reference, ast.Attribute) and other:
            bound = other.scopes.module.bindings.get(value.id, ()) if other.holds(value) else ()
            prefix = module.qualified_name(reference.value) or ""
            here = os.path.dirname(os.path.abspath(module.source.path))
            if len(bound) == 1 and home == project.file(prefix, here):
                return f"{module.text(reference.value)}.{value.id}"
        raise Left(f"another file gives {name} of pmap")

    def unknown(self, site: Site, but: str = "") -> str:
        """The first thing that is not known of a place; "" where all is.

        Args:
          site: the place.
          but: an argument of pmap that does not count.
        """
        if site.form not in FORMS:
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
        if setting := self._setting(site.reference):
            return f"{setting} may give {self._module.text(site.reference)} another meaning"
        if why := self._unfit_place(site) or (self._flow.misfit(site) if self._flow else ""):
            return why
        if (
            why := self.named_calls(site).why_not
            or error_handlers.around(self._module, self._context, site)
            or forks.around(self._module, self._context, site)
            or self._unlike_jit(site)
        ):
            return why
        return "" if self._is_tried else self._of_calls(site)

    def _setting(self, reference: ast.expr) -> str:
        """A place that may give another function the name of one, as a test does; "" if none."""
        module, name = self._module, scopes.last_name(reference)
        if isinstance(reference, ast.Attribute) and _of_jax(module, reference.value):
            return ""  # `jax.pmap`: for which all of the file is looked through
        own = os.path.abspath(module.source.path)
        home = imports.definer(module, self._context.project, reference) or own
        if (own, home, name) not in self._settings:
            self._settings[own, home, name] = self._first_setting(own, home, name)
        return self._settings[own, home, name]

    def _first_setting(self, own: str, home: str, name: str) -> str:
        context, stem = self._context, os.path.splitext(os.path.basename(home))[0]
        of_home = rb"\b%b\s*,|[\"'][\w.]*\b%b\.%b[\"']" % ((stem.encode(),) * 2 + (name.encode(),))
        by_text = rb"setattr\(\s*[\w.]*" + of_home
        if home != own:  # an alias, by whatever name of its module
            by_text += rb"|[\"']%b[\"']|\.%b\s*=[^=]|sys\.modules\[" % ((name.encode(),) * 2)
            twins = [
                p for p in context.graph.files if os.path.basename(p) == os.path.basename(home)
            ]
            if len(twins) > 1 and not outermost_package(os.path.dirname(home)):
                return next(os.path.relpath(path) for path in twins if path != home)
        for path in {own: None, home: None}:
            if place := context.first(_REFLECTION, within=path):
                return place
        return context.first(re.compile(by_text))

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
        if state := self.state_of(site):
            return f"the function that it maps may be mapped again, when {state} is another one"
        if self._module.function(site.node) is None:
            return self._too_early(site)
        if self._flow is not None and self._flow.is_mapped_once(site):
            return ""
        if not self._may_map_again(site):
            return ""
        return "the function that it maps may be mapped again, and would be compiled again"

    def state_of(self, site: Site) -> str:
        """What a function reads and the project sets, if it may be mapped again; "" if nothing.

        Then jax.pmap runs the program that it traced before.
        """
        if site not in self._states:
            self._states[site] = self._state_of(site)
        return self._states[site]

    def _state_of(self, site: Site) -> str:
        if site.fun is None:
            return ""
        is_twice = site_parts.is_mapped_twice(self._module, site)
        if is_twice or self._may_map_again(site) or self._is_mapped_elsewhere(site):
            return state_reads.first(self._module, self._context, site.fun)
        return ""

    def _may_map_again(self, site: Site) -> bool:
        return site_parts.may_map_again(self._module, site) and not self._is_own_method(site)

    def _is_mapped_elsewhere(self, site: Site) -> bool:
        """Whether another file may map the same function, of which jax.pmap has one trace."""
        name, own = scopes.last_name(site.fun), os.path.abspath(self._module.source.path)
        home = imports.definer(self._module, self._context.project, site.fun) if name else None
        word, graph = re.compile(rb"\b%b\b" % name.encode()), self._context.graph
        return bool(name) and any(
            path not in (home, own) and graph.are_connected(path, home or own) and word.search(data)
            for path, data in self._context.mapping.items()
        )

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
                spans = (module.span(e) for e in ast.walk(node) if isinstance(e, scopes.Function))
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

    def _unlike_jit(self, site: Site) -> str:
        """What jit or a mesh refuses, and pmap takes; "" where the text shows nothing of it."""
        if self._may_be_none(site.arguments.get("axis_name")):
            return "its axis_name may be None"
        function = pmaps.definition(self._module, site.fun)
        donated = site_parts.donated(site) or ()
        if function is not None and function.args.vararg is None:
            count = len([*function.args.posonlyargs, *function.args.args])
            count -= isinstance(site.fun, ast.Attribute)  # `self.step`
            if any(number >= count for number in donated):
                return f"it donates argument {max(donated)} of {count}"
        return ""

    def _may_be_none(self, given: ast.expr | None) -> bool:
        """Whether a name or a field may hold None, by its default or by what sets it."""
        module, waiting, seen = self._module, [given], set()
        while waiting:
            each = waiting.pop()
            if each is not given and is_none(each):
                return True
            if each in seen or not isinstance(each, ast.Name | ast.Attribute):
                continue
            seen.add(each)
            if not module.holds(each):
                continue
            waiting += module.values(each) or ()
            function = module.function(each) if isinstance(each, ast.Name) else None
            while function is not None:
                pairs = functions.defaults(function.args)
                waiting += [default for one, default in pairs if one.arg == scopes.last_name(each)]
                function = module.function(function)
        return False

    def _name(self, site: Site) -> str:
        """What the text calls the mapped function."""
        statement = self._module.statement(site.node)
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement]
        names = (getattr(e, "name", scopes.last_name(e)) for e in targets)
        return next(names, "") if len(targets) == 1 else ""

    def _of_calls(self, site: Site) -> str:
        """What of the calls that are seen does not fit, whatever is promised; "" where all do."""
        shared = shared_positions(site)
        if shared is None:
            return "its in_axes are not literal"
        named = self._module.once(_named_calls)  # also where it is handed on
        if line := named.get(self._name(site)):
            return f"line {line} calls it with named arguments"
        for call in pmaps.mapped_calls(self._module, site):
            if traced.around(self._module, call) is not None:
                return f"line {call.lineno} runs it under a transformation"
            if call.keywords:
                return f"line {call.lineno} calls it with named arguments"
            for position, argument in enumerate(call.args):
                if shared(position) and not isinstance(argument, ast.Constant):
                    return f"line {argument.lineno} shares an array that may lie elsewhere"
        return ""


def _named_calls(module: Module) -> dict[str, int]:
    """By the name of what is called with named arguments: a line."""
    calls = (each for each in module.nodes(ast.Call) if each.keywords)
    found = {scopes.last_name(each.func): each.lineno for each in calls}
    return {name: line for name, line in found.items() if name}


def _of_jax(module: Module, node: ast.expr) -> bool:
    return (module.qualified_name(node) or "").split(".")[0] == "jax"


def is_none(node: ast.expr | None) -> bool:
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
