"""What one `jax.pmap` says, in the words of `jit(shard_map)`: specs, axes, devices, as text."""

import ast
import dataclasses
from typing import Any

from jax_dist.checker import pmaps
from jax_dist.checker.modules import Module
from jax_dist.checker.pmaps import Site
from jax_dist.migrating import specs
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.texts import Texts

_KNOWN = {
    "axis_name",
    "in_axes",
    "out_axes",
    "static_broadcasted_argnums",
    "devices",
    "axis_size",
    "donate_argnums",
}
_UNNAMED_AXIS = "devices"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The pieces of the new text; texts are Python."""

    axis: str  # the name of the mesh axis: "'batch'"
    in_specs: str
    out_specs: str
    in_axes: str = ""  # of the helper that takes the mapped axes off; "" where all are 0
    out_axes: str = ""
    bare: bool = False  # no mapped axis is left to take off: the function is mapped as it is
    static: tuple[int, ...] = ()
    jit_keywords: tuple[tuple[str, str], ...] = ()
    devices: str = ""  # "": all of them
    lazily: bool = False  # at import the devices must not be asked for yet
    keywords: bool = False  # named arguments are mapped too

    @property
    def is_plain(self) -> bool:
        """Whether it says no more than the axis."""
        more = self.in_axes or self.out_axes or self.static or self.jit_keywords or self.devices
        return not (more or self.bare or self.keywords)


def plan(module: Module, site: Site, texts: Texts) -> Plan:
    """Reads the arguments of one application of pmap.

    Raises:
      Left: an argument cannot be read, or shard_map has nothing like it.
    """
    _check_arguments(site)
    home = _Home(module, site)
    given = {name: value for name, value in site.arguments.items() if not _is_none(name, value)}
    static = specs.integers(given.get("static_broadcasted_argnums"), "static_broadcasted_argnums")
    keywords = takes_keywords(module, site)
    lazily = "devices" not in given and module.function(site.node) is None
    _check_combination(static, keywords=keywords, lazily=lazily)
    if lazily and "axis_size" in given:
        raise Left(
            "axis_size is given while the module is imported, when the devices are not known yet",
            "Give the devices themselves: devices=jax.devices()[:axis_size].",
        )
    in_axes = specs.without(given.get("in_axes"), static, "in_axes")
    out_axes = given.get("out_axes")
    axis = home.text(given["axis_name"]) if "axis_name" in given else texts.quoted(_UNNAMED_AXIS)
    spec = texts.named("jax.sharding.PartitionSpec")
    in_specs = specs.spec_text(home.text, in_axes, axis, spec, "in_axes")
    plain = specs.is_default(in_axes) and specs.is_default(out_axes)
    in_axes_text = "" if plain or in_axes is None else specs.axes_text(home.text, in_axes)
    if keywords and in_axes is not None:  # the pair (positional, named)
        in_specs = f"({in_specs}, {spec}({axis}))"
        in_axes_text = in_axes_text and f"({in_axes_text}, 0)"
    jit_keywords = [("static_argnums", _numbers(static))] if static else []
    if "donate_argnums" in given:
        jit_keywords.append(("donate_argnums", home.text(given["donate_argnums"])))
    return Plan(
        axis=axis,
        in_specs=in_specs,
        out_specs=specs.spec_text(home.text, out_axes, axis, spec, "out_axes"),
        in_axes=in_axes_text,
        out_axes="" if plain or out_axes is None else specs.axes_text(home.text, out_axes),
        static=static,
        jit_keywords=tuple(jit_keywords),
        devices=_devices(given, home, texts),
        lazily=lazily,
        keywords=keywords,
    )


def takes_keywords(module: Module, site: Site) -> bool:
    """Whether this file calls the mapped function with named arguments: pmap maps them over 0."""
    return any(call.keywords for call in pmaps.mapped_calls(module, site))


def _check_arguments(site: Site) -> None:
    if site.unknown:
        raise Left(
            f"the arguments of pmap come from {site.unknown}",
            "Write them out at the call, then migrate again.",
        )
    for name, value in site.arguments.items():
        if name not in _KNOWN and not (isinstance(value, ast.Constant) and value.value is None):
            raise Left(
                f"shard_map has nothing like pmap's {name}",
                'Give the devices themselves: devices=jax.devices("gpu").'
                if name == "backend"
                else "Use jax_dist.pmap, which takes all arguments of jax.pmap.",
            )


def _check_combination(static: tuple[int, ...], *, keywords: bool, lazily: bool) -> None:
    if any(number < 0 for number in static):
        raise Left(
            "static_broadcasted_argnums counts from the end",
            "Count from the front, then migrate again.",
        )
    if keywords and (static or lazily):
        what = "has static arguments" if static else "is made while the module is imported"
        raise Left(
            f"the mapped function is called with named arguments, and {what}",
            "Pass all arguments by position, then migrate again.",
        )


class _Home:
    """The text of arguments here, though a partial in another file may have bound them."""

    def __init__(self, module: Module, site: Site):
        self._module, self._reference = module, site.reference
        meaning = module.meaning(site.reference)
        self._home = module if meaning is None or meaning.home is None else meaning.home

    def text(self, node: Any) -> str:
        if self._module.holds(node):
            self._check_names(node)
            return self._module.text(node)
        text = self._home.text(node)
        if all(isinstance(each, ast.Constant | ast.Tuple | ast.Load) for each in ast.walk(node)):
            return text
        if isinstance(node, ast.Name) and isinstance(self._reference, ast.Attribute):
            return f"{self._module.text(self._reference.value)}.{text}"
        raise Left(
            f"another file binds an argument of pmap: {text}",
            "Call jax.pmap itself here, with all its arguments, then migrate again.",
        )

    def _check_names(self, node: ast.expr) -> None:
        """What a partial bound elsewhere in the file must mean the same here."""
        here = self._module.scope(self._reference)
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load):
                there = self._module.scope(name).lookup(name.id)
                seen = here.lookup(name.id)
                if (there and there[0]) is not (seen and seen[0]) and not _within(node, there):
                    raise Left(f"the name {name.id} means something else where pmap is applied")


def _within(node: ast.expr, found: Any) -> bool:
    """Whether a scope is made inside the expression: a comprehension, a lambda."""
    return found is not None and any(each is found[0].node for each in ast.walk(node))


def _is_none(name: str, value: ast.expr) -> bool:
    """`devices=None` is as good as nothing; `in_axes=None` is not."""
    return name not in ("in_axes", "out_axes") and (
        isinstance(value, ast.Constant) and value.value is None
    )


def _numbers(numbers: tuple[int, ...]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else repr(numbers)


def _devices(given: dict[str, ast.expr], home: _Home, texts: Texts) -> str:
    devices = home.text(given["devices"]) if "devices" in given else ""
    if "axis_size" not in given:
        return devices
    if devices and not devices.isidentifier():
        raise Left("devices and axis_size are both given", "Give the devices that are meant.")
    return f"{devices or texts.named('jax.devices') + '()'}[:{home.text(given['axis_size'])}]"
