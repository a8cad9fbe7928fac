"""JXD105: `jax.experimental.shard_map`, and its old arguments."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import pmaps
from jax_dist.checker.model.findings import Edit, Fix, Safety
from jax_dist.checker.model.pmaps import TransformUse
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, _renames, rule

PAGE = Page(
    code="JXD105",
    name="experimental-shard-map",
    what="Finds `jax.experimental.shard_map.shard_map`, and `check_rep=` or `auto=` passed to "
    "`jax.shard_map`.",
    why="The experimental function is deprecated. `jax.shard_map` takes the mesh and the specs "
    "only by keyword, and has renamed `check_rep` to `check_vma`: the old keyword is a "
    "TypeError. `auto=` was removed in jax 0.8.0; `axis_names=` names the other axes of the "
    "mesh.",
    example="from jax.experimental.shard_map import shard_map\n\n"
    "f = shard_map(g, mesh, in_specs, out_specs, check_rep=False)\n",
    instead="from jax import shard_map\n\n"
    "f = shard_map(g, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)\n",
    fix="Safe if every use in the file is a call or a decorator whose arguments can all be seen: "
    "since jax 0.6.1 both names are one function. Display-only with `auto=`. None if the "
    "function is passed on, or imported by other files. Code that ran before jax 0.6 with "
    "`check_rep=True` has different gradients since then, under either name: see JXD303.",
    since="jax 0.6.1: `jax.shard_map`; 0.8.0: the experimental one is deprecated.",
    source="https://docs.jax.dev/en/latest/changelog.html#jax-0-8-0-october-15-2025",
)

_OLD = "jax.experimental.shard_map.shard_map"
_NEW = "jax.shard_map"
_PARAMETERS = ("mesh", "in_specs", "out_specs", "check_rep")  # behind the function
_MOVED = "jax.experimental.shard_map is deprecated since jax 0.8.0: use jax.shard_map"


@rule(
    PAGE,
    triggers=(
        b"experimental.shard_map",
        b"experimental import shard_map",
        b"check_rep",
        b"auto=",
    ),
    since=(0, 6, 1),
    needs=(0, 6, 1),
)
def check(module: Module) -> Iterator[Found]:
    for alias, reads in _renames.imports_of(module, _OLD):
        yield Found(alias, _MOVED, _import_fix(module, alias, reads))
    for use in _renames.spelled(module, _OLD):
        yield Found(use, _MOVED, _attribute_fix(module, use))
    for use in module.uses(_NEW):
        yield from _old_keywords(module, use)


def _old_keywords(module: Module, use: ast.expr) -> Iterator[Found]:
    used = pmaps.application(module, use)
    for keyword in used.keywords if used else ():
        if _renames.is_guarded(module, keyword):
            continue
        if keyword.arg == "check_rep":
            fix = Fix("use check_vma", Safety.SAFE, (_renamed(module, keyword, "check_vma"),))
            yield Found(keyword, "jax.shard_map has no check_rep: it is check_vma", fix)
        elif keyword.arg == "auto":
            yield Found(keyword, "jax.shard_map has no auto: name the other axes in axis_names")


def _renamed(module: Module, keyword: ast.keyword, name: str) -> Edit:
    start = module.span(keyword)[0]
    return Edit(start, start + len(keyword.arg or ""), name)


def _attribute_fix(module: Module, use: ast.expr) -> Fix | None:
    text, imports = module.name_for(_NEW, use)
    arguments = _argument_edits(module, use)
    if arguments is None or text.startswith("_"):
        return None
    edits = (Edit(*module.span(use), text), *arguments)
    return Fix("use jax.shard_map", _safety(module, [use]), edits, imports)


def _import_fix(module: Module, alias: ast.AST, reads: list[ast.Name]) -> Fix | None:
    """The import and all its uses: half of it would not run."""
    statement = module.parent(alias)
    arguments = [_argument_edits(module, read) for read in reads]
    if not isinstance(statement, ast.ImportFrom) or not arguments or None in arguments:
        return None
    if module.source.path.endswith("__init__.py"):
        return None  # other files may import it from here
    number = next(n for n, each in enumerate(statement.names) if each is alias)
    edits = _renames.edits_of_from(module, statement, {number: _NEW})
    if edits is None:
        return None
    inner = tuple(edit for each in arguments for edit in each or ())
    return Fix("import jax.shard_map", _safety(module, reads), (*edits, *inner))


def _safety(module: Module, uses: list[ast.Name] | list[ast.expr]) -> Safety:
    for use in uses:
        used = pmaps.application(module, use)
        if used is not None and any(keyword.arg == "auto" for keyword in used.keywords):
            return Safety.DISPLAY
    return Safety.SAFE


def _argument_edits(module: Module, use: ast.expr) -> list[Edit] | None:
    """Puts names before arguments, and renames keywords; None where not all is seen."""
    used = pmaps.application(module, use)
    if used is None or len(used.args) > len(_PARAMETERS) or _unseen(used):
        return None
    edits: list[Edit] = []
    for parameter, argument in zip(_PARAMETERS, used.args, strict=False):
        start = module.span(argument)[0]
        if module.source.code[:start].rstrip().endswith(b"("):
            return None  # in parentheses of its own
        edits.append(Edit(start, start, f"{_keyword(parameter)}="))
    for keyword in used.keywords:
        if keyword.arg == "check_rep":
            edits.append(_renamed(module, keyword, "check_vma"))
        elif keyword.arg == "auto":
            edits += _auto_edits(module, keyword, used)
    return edits


def _unseen(used: TransformUse) -> bool:
    if used.fun is None or isinstance(used.fun, ast.Starred):
        return True
    if any(isinstance(argument, ast.Starred) for argument in used.args):
        return True
    return any(keyword.arg in (None, "f") for keyword in used.keywords)


def _keyword(parameter: str) -> str:
    return "check_vma" if parameter == "check_rep" else parameter


def _auto_edits(module: Module, keyword: ast.keyword, used: TransformUse) -> list[Edit]:
    """A sketch: all axes of the mesh but these."""
    meshes = [each.value for each in used.keywords if each.arg == "mesh"] or list(used.args[:1])
    mesh = module.text(meshes[0]) if meshes else "mesh"
    text = f"axis_names=set({mesh}.axis_names) - {module.text(keyword.value)}"
    return [Edit(*module.span(keyword), text)]
