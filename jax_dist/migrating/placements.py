"""The functions that stack values on devices, which pmap code lives with and JAX has removed."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model.findings import Code, Edit, Fix, Safety
from jax_dist.checker.model.semantic_model import Module
from jax_dist.migrating import renaming
from jax_dist.migrating.names import Namer
from jax_dist.migrating.outcomes import Left

_REPLICATE = "flax.jax_utils.replicate"
REMOVED: dict[str, Code] = {
    "jax.device_put_replicated": "JXD101",
    "jax.device_put_sharded": "JXD102",
}
OF_FLAX: dict[str, Code] = {_REPLICATE: "JXD201", "flax.jax_utils.unreplicate": "JXD202"}
_NEW = {
    "jax.device_put_replicated": "device_put_replicated",
    "jax.device_put_sharded": "device_put_sharded",
    _REPLICATE: "device_put_replicated",
    "flax.jax_utils.unreplicate": "unreplicate",
}
_FIRST = {"x": 0, "shards": 0, "tree": 0}


def places(module: Module, codes: dict[str, Code]) -> Iterator[tuple[str, ast.expr]]:
    """`(name, reference)` of each use of one of these functions."""
    for name in codes:
        for node in module.uses(name):
            yield name, node


def fix(module: Module, name: str, node: ast.expr, namer: Namer) -> Fix:
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
    new = namer.named(module, _NEW[name], node)
    edits = [Edit(*module.span(node), renaming.renamed(module.text(node), new.text)), *new.edits]
    imports = new.imports
    if name == _REPLICATE:
        call = module.parent(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            raise Left(
                "replicate is passed on as a value, without its devices",
                "Pass `lambda x: jax_dist.device_put_replicated(x, jax.local_devices())`.",
            )
        if len(call.args) + len(call.keywords) == 1 and call.args:
            devices, more = module.name_for("jax.local_devices", node)
            end = module.span(call.args[0])[1]
            edits.append(Edit(end, end, f", {devices}()"))
            imports += more
    return Fix(f"replace {name}", Safety.UNSAFE, tuple(sorted(edits)), imports)


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
