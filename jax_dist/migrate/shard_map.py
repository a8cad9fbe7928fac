"""One `jax.pmap` as `jax.jit(jax.shard_map(...))` over all devices of one process.

Whether that does what the calls need is for `pmap_facts`, or for the flow of the values, to say.
"""

import ast
import dataclasses
from collections.abc import Collection

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.pmaps import Site
from jax_dist.lint.model.semantic_model import PARTIAL
from jax_dist.migrate import codegen
from jax_dist.migrate.codegen import CallText, Texts, Value
from jax_dist.migrate.pmap_facts import FORMS, PmapFacts, is_default, is_none
from jax_dist.migrate.results import Left

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
    keeps_spec: bool = False  # on one device too, results have the spec that pmap's have

    @classmethod
    def of(
        cls,
        site: Site,
        texts: Texts,
        facts: PmapFacts,
        *,
        without: Collection[str] = (),
    ) -> "DirectPlan":
        """The plan for a place.

        Args:
          site: the place.
          texts: the text around it.
          facts: what is known of the place.
          without: arguments of pmap that are left out.

        Raises:
          Left: an argument cannot be read, or has no counterpart.
        """
        module = texts.module
        if site.form not in FORMS or site.fun is None:
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
        for name in given:
            if name not in _KNOWN:
                raise Left(f"shard_map has nothing like pmap's {name}")
        written = {name: facts.text_of(site, name) for name in given}
        names, slices = facts.named_calls(site).names, facts.slices(site)
        in_axes, out_axes = given.get("in_axes"), given.get("out_axes")
        own = f"{texts.style.quote}{facts.free_axis}{texts.style.quote}"
        axis = written.get("axis_name", own)
        spec = texts.named("jax.sharding.PartitionSpec")
        is_plain = is_default(in_axes) and is_default(out_axes)
        if names and not (is_default(in_axes) and site.form == "call"):
            raise Left("a call gives arguments by name")
        keeps_spec = bool(facts.reader_of_specs)
        if keeps_spec and not is_default(out_axes):
            raise Left("its results have several specs, by which the program decides")
        of_all = "" if slices is None else f"{texts.named('jax.devices')}()[:{slices}]"
        return cls(
            site,
            texts,
            axis=axis,
            in_specs=_spec_text(in_axes, axis, spec, "in_axes"),
            out_specs=_spec_text(out_axes, axis, spec, "out_axes"),
            in_axes="" if is_plain else written.get("in_axes", ""),
            out_axes="" if is_plain else written.get("out_axes", ""),
            donated=written.get("donate_argnums", ""),
            devices=written.get("devices", of_all),
            names=names,
            keeps_spec=keeps_spec,
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
        value = CallText(texts.named("jax.jit"), [mapped], self._of_jit, comments)
        return Edit(*module.span(whole), texts.written(value, whole))

    def _decorator_edit(self) -> Edit:
        """`@jax.jit`, then `@partial(jax.shard_map, ...)`, then `@per_device`, each on its line."""
        site, texts, module = self.site, self.texts, self.texts.module
        used = (module.qualified_name(each.func) for each in site.partials if module.holds(each))
        own = (name for name in used if name in PARTIAL)
        partial = texts.named(next(own, None) or "functools.partial")
        bound = lambda name, keywords: CallText(partial, [name], keywords) if keywords else name
        lines = [
            bound(texts.named("jax.jit"), self._of_jit),
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
    def _of_jit(self) -> list[tuple[str, Value]]:
        given: list[tuple[str, Value]] = []
        if self.keeps_spec:
            named = self.texts.named("jax.sharding.NamedSharding")
            given.append(("out_shardings", CallText(named, [self.mesh, self.out_specs])))
        return given + ([("donate_argnums", self.donated)] if self.donated else [])


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
