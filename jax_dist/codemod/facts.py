"""What must be known before a pmap can be written as one `jax.jit(jax.shard_map(...))`.

`jax.pmap` finds out at each call how many devices its arguments want, in which processes these are,
and where arrays lie. A `jit(shard_map)` has all that fixed where it is written. So a place is
written so only where the text shows that there is nothing to find out, or the user has said so.
"""

import ast
import dataclasses
import functools

from jax_dist.checker.model import flow, pmaps, scopes
from jax_dist.checker.model.flow import Flow
from jax_dist.checker.model.pmaps import Site
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.codemod import device_counts, names, use_sites
from jax_dist.codemod.context import ProjectContext
from jax_dist.codemod.results import Left


def spec_text(axes: ast.expr | None, axis: str, spec: str, parameter: str) -> str:
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
            texts = [spec_text(part, axis, spec, parameter) for part in parts]
            if isinstance(axes, ast.Tuple):
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            return f"[{', '.join(texts)}]"
        case ast.Dict(keys=keys, values=values) if all(isinstance(k, ast.Constant) for k in keys):
            pairs = zip(keys, values, strict=True)
            texts = [
                f"{ast.unparse(key)}: {spec_text(value, axis, spec, parameter)}"  # type: ignore[arg-type]
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


_FORMS = ("call", "decorator", "partial decorator")


@dataclasses.dataclass(frozen=True, slots=True)
class Promises:
    """What the user says of the program."""

    one_process: bool = False  # it never runs in several
    all_devices: bool = False  # what is mapped has one slice for each device there is


class PmapFacts:
    """Tells for each place of a file what is not known.

    Args:
      module: the file.
      context: its project.
      promises: what need not be shown.
    """

    def __init__(self, module: Module, context: ProjectContext, promises: Promises):
        self._module, self._context, self._promises = module, context, promises
        self._unknown: dict[Site, str] = {}
        sites = [site for site in pmaps.sites(module) if site.form in _FORMS]
        for site in sites:
            self._unknown[site] = self._of_text(site)
        if not promises.all_devices:
            self._check_sizes()

    @property
    def several_processes(self) -> bool:
        """Whether there may be several."""
        return not self._promises.one_process and self._context.sign is not None

    def unfit_place(self, site: Site) -> str:
        """Why a mesh cannot be made, or a function cannot be mapped again, where a place is."""
        return self._of_place(site)

    def unknown(self, site: Site) -> str:
        """The first thing that is not known of a place; "" where all is."""
        return self._unknown.get(site, "pmap is not applied there")

    # --- facts that a place shows by itself

    def _of_text(self, site: Site) -> str:
        sign = None if self._promises.one_process else self._context.sign
        if sign is not None:
            return f"the program may run in several processes: {sign}"
        try:
            if names.import_within(self._module, site.reference) is not None:
                return "jax is imported inside of a function or block"
        except Left as left:
            return left.reason
        for why in self._of_arguments(site), self._of_place(site):
            if why:
                return why
        return self._of_calls(site)

    def _of_arguments(self, site: Site) -> str:
        devices = site.arguments.get("devices")
        is_none = isinstance(devices, ast.Constant) and devices.value is None
        if devices is not None and not is_none and not self._is_all(devices):
            return "its devices are chosen at run time"
        for name in ("static_broadcasted_argnums", "backend", "axis_size"):
            if name in site.arguments:
                return f"it has {name}"
        if site.unknown:
            return f"its arguments come from {site.unknown}"
        return ""

    def _is_all(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and not (node.args or node.keywords)
            and self._module.qualified_name(node.func) == "jax.devices"
        )

    def _of_place(self, site: Site) -> str:
        """Devices may be asked for there, and a function is not compiled again and again."""
        around = self._module.function(site.node)
        if around is None:
            return "it is made while the module is imported, before devices may be asked for"
        for each in self._module.ancestors(site.node):
            if each is around:
                break
            if isinstance(each, ast.For | ast.While):
                return f"it is made in the loop of line {each.lineno}"
        if self._is_lasting(site.fun) and not self._runs_once(around):
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

    def _runs_once(self, around: scopes.Function) -> bool:
        name = getattr(around, "name", "")
        return name == "main" and self._module.function(around) is None

    def _of_calls(self, site: Site) -> str:
        """All calls are seen, by position, with nothing shared but literals."""
        found = self._flow
        lost = use_sites.unseen(self._module, found, site)
        if lost:
            return lost
        made = self._calls_of(site)
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

    @property
    def _flow(self) -> Flow:
        return flow.of(self._module)

    def _calls_of(self, site: Site) -> list[ast.Call]:
        return self._calls.get(site.node, [])

    @functools.cached_property
    def _of_node(self) -> dict[ast.expr, Site]:
        return {site.node: site for site in reversed(self._unknown)}

    @functools.cached_property
    def _calls(self) -> dict[ast.expr, list[ast.Call]]:
        """By the node that is the mapped function."""
        found: dict[ast.expr, list[ast.Call]] = {}
        for call, made_by in self._flow.mapped_calls.items():
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
        for call in self._calls_of(site):
            for position, argument in enumerate(call.args):
                is_shared = shared is not None and shared(position)
                if not is_shared and not self._has_all_devices(argument):
                    text = self._module.text(argument)
                    return f"nothing shows that {text} has a slice for each device"
        return ""

    def _has_all_devices(self, argument: ast.expr) -> bool:
        return all(self._is_whole(origin) for origin in self._flow.origins(argument))

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
