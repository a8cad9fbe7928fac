"""JXD105, JXD106, JXD107: functions that moved, and whose calls change with them."""

import ast
from collections.abc import Iterator, Sequence
from typing import Literal

from jax_dist.lint.model import traced
from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, _renames, rule
from jax_dist.lint.rules._renames import Rename

_SHARD_MAP = Page(
    code="JXD105",
    name="experimental-shard-map",
    summary="`jax.experimental.shard_map`, `check_rep=`, `auto=`",
    cost="TypeError, or a deprecation warning",
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

_OLD_SHARD_MAP = "jax.experimental.shard_map.shard_map"
_PARAMETERS = ("mesh", "in_specs", "out_specs", "check_rep")  # behind the function


@rule(
    _SHARD_MAP,
    triggers=(
        b"experimental.shard_map",
        b"experimental import shard_map",
        b"check_rep",
        b"auto=",
    ),
    since=(0, 6, 1),
    needs=(0, 6, 1),
)
def _experimental_shard_map(module: Module) -> Iterator[Found]:
    moved = "jax.experimental.shard_map is deprecated since jax 0.8.0: use jax.shard_map"
    for alias, reads in _renames.imports_of(module, _OLD_SHARD_MAP):
        yield Found(alias, moved, _import_of_shard_map(module, alias, reads))
    for use in _renames.spelled(module, _OLD_SHARD_MAP):
        text, imports = module.name_for("jax.shard_map", use)
        arguments = _argument_edits(module, use)
        fix = None
        if arguments is not None and not text.startswith("_"):
            edits = (Edit(*module.span(use), text), *arguments)
            fix = Fix("use jax.shard_map", _safety(module, [use]), edits, imports)
        yield Found(use, moved, fix)
    for use in module.uses("jax.shard_map"):
        used = traced.application(module, use)
        for keyword in used.keywords if used else ():
            if keyword.arg not in ("check_rep", "auto") or _renames.is_guarded(module, keyword):
                continue
            if keyword.arg == "auto":
                yield Found(keyword, "jax.shard_map has no auto: name the other axes in axis_names")
            else:
                fix = Fix("use check_vma", Safety.SAFE, (_check_vma(module, keyword),))
                yield Found(keyword, "jax.shard_map has no check_rep: it is check_vma", fix)


def _check_vma(module: Module, check_rep: ast.keyword) -> Edit:
    start = module.span(check_rep)[0]
    return Edit(start, start + len("check_rep"), "check_vma")


def _import_of_shard_map(module: Module, alias: ast.AST, reads: list[ast.Name]) -> Fix | None:
    """The import and all its uses: half of it would not run."""
    statement = module.parent(alias)
    arguments = [_argument_edits(module, read) for read in reads]
    if not isinstance(statement, ast.ImportFrom) or not arguments or None in arguments:
        return None
    if module.source.path.endswith("__init__.py"):
        return None  # other files may import it from here
    number = next(n for n, each in enumerate(statement.names) if each is alias)
    edits = _renames.edits_of_from(module, statement, {number: "jax.shard_map"})
    if edits is None:
        return None
    inner = tuple(edit for each in arguments for edit in each or ())
    return Fix("import jax.shard_map", _safety(module, reads), (*edits, *inner))


def _safety(module: Module, uses: list[ast.Name] | list[ast.expr]) -> Safety:
    for use in uses:
        used = traced.application(module, use)
        if used is not None and "auto" in used.words:
            return Safety.DISPLAY
    return Safety.SAFE


def _argument_edits(module: Module, use: ast.expr) -> list[Edit] | None:
    """Puts names before arguments, and renames keywords; None where not all is seen."""
    used = traced.application(module, use)
    if used is None or not used.is_known or len(used.args) > len(_PARAMETERS):
        return None
    if not used.by_position or any(isinstance(each, ast.Starred) for each in used.args):
        return None
    edits: list[Edit] = []
    for parameter, argument in zip(_PARAMETERS, used.args, strict=False):
        start = module.span(argument)[0]
        if module.source.code[:start].rstrip().endswith(b"("):
            return None  # in parentheses of its own
        name = "check_vma" if parameter == "check_rep" else parameter
        edits.append(Edit(start, start, f"{name}="))
    for keyword in used.keywords:
        if keyword.arg == "check_rep":
            edits.append(_check_vma(module, keyword))
        elif keyword.arg == "auto":  # a sketch: all axes of the mesh but these
            meshes = [used.words["mesh"]] if "mesh" in used.words else used.args[:1]
            mesh = module.text(meshes[0]) if meshes else "mesh"
            text = f"axis_names=set({mesh}.axis_names) - {module.text(keyword.value)}"
            edits.append(Edit(*module.span(keyword), text))
    return edits


_PJIT = Page(
    code="JXD106",
    name="pjit-to-jit",
    summary="`pjit` in place of `jax.jit`",
    cost="a deprecation warning; it will be removed",
    what="Finds `pjit` and `with_sharding_constraint` from `jax.experimental.pjit`.",
    why="`pjit` is deprecated since jax 0.8.0, and is `jax.jit` with one difference: it reads a "
    "`PartitionSpec` in its shardings with the mesh of `with mesh:`. `jax.jit` needs `with "
    "jax.set_mesh(mesh):` for that, and raises a RuntimeError otherwise (jax 0.10.2). "
    "`with_sharding_constraint` was removed from this module.",
    example="from jax.experimental.pjit import pjit\n\nf = pjit(g, donate_argnums=0)\n",
    instead="from jax import jit as pjit\n\nf = pjit(g, donate_argnums=0)\n",
    fix="Safe without shardings, with shardings that are clearly a `NamedSharding`, and for "
    "`with_sharding_constraint`. Display-only with shardings that are made elsewhere, because "
    "they may be specs. None with a `PartitionSpec`: the mesh has to be set in another way. "
    "None for old arguments and for uses as a value.",
    since="jax 0.8.0: deprecated.",
    source="https://docs.jax.dev/en/latest/changelog.html#jax-0-8-0-october-15-2025",
)

OF_PJIT: tuple[Rename, ...] = (
    Rename("jax.experimental.pjit.pjit", "jax.jit", deprecated="0.8.0", needs=(0, 4, 14)),
    Rename(
        "jax.experimental.pjit.with_sharding_constraint",
        "jax.lax.with_sharding_constraint",
        needs=(0, 4, 7),
    ),
    Rename("jax.experimental.pjit.AUTO", "", "0.10.1", "give the shardings"),
    Rename(
        "jax.experimental.pjit.FROM_GDA", "", "0.4.11", "give it a jax.Array, and no in_shardings"
    ),
)
_SAME = frozenset(
    {
        *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
        *("keep_unused", "device", "backend", "inline", "compiler_options"),
    }
)
_SHARDINGS = frozenset({"in_shardings", "out_shardings"})


@rule(_PJIT, triggers=(b"experimental.pjit", b"experimental import pjit"))
def _pjit_to_jit(module: Module) -> Iterator[Found]:
    yield from _renames.renamed(module, OF_PJIT, _judge)


def _judge(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety | None:
    """The least that holds of all uses."""
    if entry.new != "jax.jit":
        # `with_sharding_constraint(x, axis_resources=s)`: the argument is called shardings now.
        calls = filter(None, map(module.call_of, nodes))
        has_old = any(each.arg != "shardings" for call in calls for each in call.keywords)
        return None if has_old else Safety.SAFE
    verdicts = [_verdict(module, node) for node in nodes]
    if None in verdicts:
        return None
    return Safety.DISPLAY if Safety.DISPLAY in verdicts else Safety.SAFE


def _verdict(module: Module, node: ast.expr) -> Safety | None:
    used = traced.application(module, node)
    if used is None or used.args or not (used.is_known and used.by_position):
        return None
    names = {keyword.arg for keyword in used.keywords}
    if not names <= _SAME | _SHARDINGS:
        return None
    values = [keyword.value for keyword in used.keywords if keyword.arg in _SHARDINGS]
    kinds = {kind for value in values for kind in _kinds(module, value)}
    if "spec" in kinds:
        return None
    return Safety.DISPLAY if "unknown" in kinds else Safety.SAFE


def _kinds(module: Module, value: ast.expr) -> Iterator[Literal["spec", "sharding", "unknown"]]:
    """What a tree of shardings holds."""
    match value:
        case ast.Tuple() | ast.List():
            for element in value.elts:
                yield from _kinds(module, element)
        case ast.Constant(value=None):
            return
        case ast.Call():
            name = module.qualified_name(value.func) or ""
            is_sharding = name == "jax.sharding.NamedSharding"
            yield "spec" if name in traced.SPECS else "sharding" if is_sharding else "unknown"
        case ast.Name():
            known = [each for each in module.values(value) or () if not isinstance(each, ast.Name)]
            if not known:
                yield "unknown"
            for each in known:
                yield from _kinds(module, each)
        case _:
            yield "unknown"


_PVARY = Page(
    code="JXD107",
    name="pvary-to-pcast",
    summary="`lax.pvary` in place of `lax.pcast`",
    cost="AttributeError since jax 0.10",
    what="Finds `jax.lax.pvary`, under any alias, and its imports.",
    why="It was removed: jax 0.10.2 raises an AttributeError.",
    example="import jax\n\nx = jax.lax.pvary(x, 'i')\n",
    instead="import jax\n\nx = jax.lax.pcast(x, 'i', to='varying')\n",
    fix="Safe for calls, and for an import if all of its uses are calls: the same operation under "
    "its new name. None if the function is passed on.",
    since="jax 0.8.2: deprecated in favour of `pcast`; 0.10.0: removed.",
    source="https://docs.jax.dev/en/latest/changelog.html",
)


@rule(_PVARY, triggers=(b"*pvary*",), needs=(0, 8, 2))
def _pvary_to_pcast(module: Module) -> Iterator[Found]:
    message = "jax.lax.pvary was removed in jax 0.10.0: use jax.lax.pcast(x, axis, to='varying')"
    for alias, reads in _renames.imports_of(module, "jax.lax.pvary"):
        yield Found(alias, message, _import_of_pcast(module, alias, reads))
    for use in _renames.spelled(module, "jax.lax.pvary"):
        call, end = _varying(module, use), module.span(use)[1]
        edits = (Edit(end - len("pvary"), end, "pcast"), call) if call else ()
        yield Found(use, message, Fix("use jax.lax.pcast", Safety.SAFE, edits) if edits else None)


def _import_of_pcast(module: Module, alias: ast.AST, reads: list[ast.Name]) -> Fix | None:
    """The import, and all calls: the new function wants one more argument."""
    calls = [call for read in reads if (call := _varying(module, read)) is not None]
    if not isinstance(alias, ast.alias) or len(calls) < len(reads):
        return None
    edit = Edit(*module.span(alias), f"pcast as {alias.asname or 'pvary'}")
    return Fix("import jax.lax.pcast", Safety.SAFE, (edit, *calls))


def _varying(module: Module, function: ast.expr) -> Edit | None:
    """Adds `to='varying'` behind the last argument of a call of `function`."""
    match module.call_of(function):
        case (
            ast.Call(args=[_, ast.expr() as last], keywords=[])
            | ast.Call(args=[_], keywords=[ast.keyword(arg="axis_name") as last])
        ) if not isinstance(last, ast.Starred | ast.GeneratorExp):
            quote = "'" if b"'" in module.source.code else '"'
            end = module.span(last)[1]
            return Edit(end, end, f", to={quote}varying{quote}")
    return None
