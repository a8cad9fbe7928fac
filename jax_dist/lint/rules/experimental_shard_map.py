"""JXD105: `shard_map` by its old name, or with its old arguments."""

import ast

from jax_dist.lint.model import pmaps
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Rule, Safety, _renames
from jax_dist.lint.rules._renames import Rename

_PARAMETERS = ("mesh", "in_specs", "out_specs", "check_vma")  # behind the function


def _pass_by_keyword(module: Module, use: ast.expr) -> list[Edit] | None:
    """Return the edits that pass the arguments by the names of `jax.shard_map`.

    `shard_map(f, mesh, i, o)` becomes `shard_map(f, mesh=mesh, in_specs=i, out_specs=o)`. None if
    an argument cannot be read, or would need more than its name.
    """
    site = pmaps.read_site(module, use)
    if not site.is_application or site.unknown or len(site.args) > len(_PARAMETERS):
        return None
    if site.fun is None or "auto" in site.arguments:
        return None
    edits: list[Edit] = []
    for parameter, argument in zip(_PARAMETERS, site.args, strict=False):
        start = module.span(argument)[0]
        if module.source.code[:start].rstrip().endswith(b"("):
            return None  # in parentheses of its own
        edits.append(Edit(start, start, f"{parameter}="))
    check_rep = [keyword for keyword in site.keywords if keyword.arg == "check_rep"]
    return [*edits, *(_rename_check_rep(module, keyword) for keyword in check_rep)]


def _rename_check_rep(module: Module, keyword: ast.keyword) -> Edit:
    """Return the edit that makes the keyword `check_rep=` a `check_vma=`."""
    start = module.span(keyword)[0]
    return Edit(start, start + len("check_rep"), "check_vma")


_OLD_NAME = "jax.experimental.shard_map.shard_map"
_OLD = Rename(_OLD_NAME, "jax.shard_map", deprecated="0.8.0", edit_arguments=_pass_by_keyword)


@Rule(
    "JXD105",
    what="`jax.experimental.shard_map.shard_map`, and `check_rep=` or `auto=` passed to "
    "`jax.shard_map`.",
    why="The experimental function is deprecated since jax 0.8.0. `jax.shard_map` takes the mesh "
    "and the specs by keyword only; `check_rep` is `check_vma`, and `auto=` is `axis_names=`, the "
    "other axes. The gradients of code for jax before 0.6 have changed: see JXD303.",
    instead="f = jax.shard_map(g, mesh=mesh, in_specs=in_specs, out_specs=out_specs, "
    "check_vma=False)",
    triggers=(b"shard_map", b"check_rep"),
    since=(0, 6, 1),
)
def experimental_shard_map(module: Module) -> Findings:
    yield from _renames.find_renamed(module, (_OLD,))
    # Several calls of one partial have the same keywords, which may stand in another file.
    sites = pmaps.sites(module, ("jax.shard_map",))
    for keyword in dict.fromkeys(keyword for site in sites for keyword in site.keywords):
        if not module.holds(keyword) or _renames.is_guarded(module, keyword):
            continue
        if keyword.arg == "auto":
            yield Found(keyword, "jax.shard_map has no auto: name the other axes in axis_names")
        if keyword.arg == "check_rep":
            fix = Fix("use check_vma", Safety.SAFE, (_rename_check_rep(module, keyword),))
            yield Found(keyword, "jax.shard_map has no check_rep: it is check_vma", fix)
