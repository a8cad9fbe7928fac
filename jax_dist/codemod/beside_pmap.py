"""What stands beside jax.pmap: removed names, device_put, and the pmaps of other libraries.

The checker's own fixes do the first. `x[0]` of what a mapped function gives stays, for the first
shard (JXD202, JXD203) is another place, and nothing at all inside a trace.
"""

import ast
from collections.abc import Iterator

from jax_dist import _codes
from jax_dist.checker.engine import linter
from jax_dist.checker.model.findings import Code, Edit, Finding, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Version
from jax_dist.codemod import pmap_renames, results
from jax_dist.codemod.names import LibraryNames, Namer
from jax_dist.codemod.results import Left, PlaceResult, PlannedPlace, Status

_RENAMES: tuple[Code, ...] = (
    _codes.REMOVED_SHARDING_CLASS,
    _codes.REMOVED_PMAP_CONFIG,
    _codes.EXPERIMENTAL_SHARD_MAP,
    _codes.PJIT_TO_JIT,
    _codes.PVARY_TO_PCAST,
    _codes.REMOVED_NAME,
    _codes.SPEC_TUPLE_COMPARE,
)
# Not JXD302: what this writes has a mesh of its own, and a mesh of the file may be meant so.
_IDIOMS: tuple[Code, ...] = (_codes.ALL_GATHER_THEN_REDUCE,)

CODES = frozenset(_RENAMES + _IDIOMS)  # all that is asked for


def places_of_rules(
    module: Module, target: Version | None, *, idiomatic: bool
) -> list[PlannedPlace]:
    """The places of a file that rules find and mend.

    Args:
      module: the file.
      target: the oldest jax that the code must run on; None: the newest.
      idiomatic: whether slow idioms go too.
    """
    unsafe = _IDIOMS if idiomatic else ()
    found: list[PlannedPlace] = []
    for finding in linter.check_module(module, frozenset(_RENAMES + unsafe), target):
        fix = finding.fix if _is_wanted(finding.fix, finding.code, unsafe) else None
        found.append(PlannedPlace(_outcome(finding, fix), finding.span, fix))
    return found


def _is_wanted(fix: Fix | None, code: Code, unsafe: tuple[Code, ...]) -> bool:
    if fix is None:
        return False
    return fix.safety is Safety.SAFE or (fix.safety is Safety.UNSAFE and code in unsafe)


def _outcome(finding: Finding, fix: Fix | None) -> PlaceResult:
    status: Status = "left" if fix is None else "done"
    by_hand = "" if fix is not None or finding.fix is None else finding.fix.title
    place, what = finding.start, finding.line_text.strip()
    return PlaceResult(
        finding.path,
        place.line,
        place.cell,
        finding.code,
        status,
        what,
        finding.message,
        by_hand,
    )


# Not flax.jax_utils.replicate and unreplicate: they work on what mapped functions take and give,
# and only the installed flax says whether a Python number in a state becomes weakly typed.
REMOVED: dict[str, Code] = {
    "jax.device_put_replicated": _codes.REMOVED_DEVICE_PUT_REPLICATED,
    "jax.device_put_sharded": _codes.REMOVED_DEVICE_PUT_SHARDED,
}
_FIRST = ("x", "shards")


def places_of_puts(module: Module) -> Iterator[tuple[str, ast.expr]]:
    """`(name, reference)` of each use of a function that was removed."""
    for name in REMOVED:
        for node in module.uses(name):
            yield name, node


def fix_of_put(module: Module, name: str, node: ast.expr, namer: Namer) -> Fix:
    """The fix that calls what takes its place.

    Args:
      module: the file.
      name: of the function.
      node: where it is named.
      namer: says how the new name is written.

    Raises:
      Left: it is not called, or in another way.
    """
    _check(module, node)
    new = namer.named(module, name.removeprefix("jax."), node)
    edit = Edit(*module.span(node), pmap_renames.renamed(module.text(node), new.text))
    return Fix(f"replace {name}", Safety.UNSAFE, tuple(sorted((edit, *new.edits))), new.imports)


def _check(module: Module, node: ast.expr) -> None:
    call = module.parent(node)
    words = call.keywords if isinstance(call, ast.Call) and call.func is node else ()
    if any(word.arg in _FIRST or word.arg is None for word in words):
        raise Left(
            "its first argument is given by name, and has another name in the replacement",
            "Give it by position, then migrate again.",
        )
    if isinstance(call, ast.Compare):
        raise Left(
            "the function itself is compared",
            "Decide by hand which of the two functions is meant.",
        )


_OF_LIBRARIES = {  # and what takes the place in plain JAX, by hand
    "equinox.filter_pmap": ("filter_pmap", "equinox.filter_shard_map"),
    "flax.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
    "flax.experimental.nnx.pmap": ("nnx_pmap", "flax.nnx.shard_map"),
}
_OF_NNX_ALONE = ("transform_metadata", "graph", "graph_updates")


def places_of_other_pmaps(module: Module, *, to_library: bool) -> Iterator[PlannedPlace]:
    """What becomes of each use of them.

    Args:
      module: the file.
      to_library: whether the new text may use jax_dist, which has a function for each.
    """
    for name in _OF_LIBRARIES:
        for node in module.uses(name):
            try:
                fix = _of_library(module, node, name, to_library=to_library)
                yield results.done(module, node, _codes.PMAP_CALL, fix)
            except Left as left:
                yield results.left(module, node, _codes.PMAP_CALL, left)


def _of_library(module: Module, node: ast.expr, name: str, *, to_library: bool) -> Fix:
    ours, by_hand = _OF_LIBRARIES[name]
    if not to_library:
        raise Left(
            f"{name} maps functions of modules, and plain JAX has no such function",
            f"Use {by_hand}, or migrate with --to jax_dist.",
        )
    call = module.parent(node)
    words = [word.arg for word in call.keywords] if isinstance(call, ast.Call) else []
    unknown = [word for word in words if word in _OF_NNX_ALONE]
    if unknown and ours == "nnx_pmap":
        raise Left(
            f"jax_dist.{ours} takes no {', '.join(unknown)}",
            "Leave it out, then migrate again; or use flax.nnx.shard_map.",
        )
    new = LibraryNames().named(module, ours, node)
    edits = (Edit(*module.span(node), new.text), *new.edits)
    return Fix(f"use jax_dist.{ours}", Safety.SAFE, tuple(sorted(edits)), new.imports)
