"""The functions that put values on devices and take them off again, which pmap code lives with."""

import ast
from collections.abc import Iterator

from jax_dist.checker.findings import Code, Edit, Fix, Safety
from jax_dist.checker.modules import Module
from jax_dist.migrating import emitted
from jax_dist.migrating.layout import Style
from jax_dist.migrating.outcomes import Left
from jax_dist.migrating.texts import Texts

_REPLICATE = "flax.jax_utils.replicate"
CODES: dict[str, Code] = {
    "jax.device_put_replicated": "JXD101",
    "jax.device_put_sharded": "JXD102",
    _REPLICATE: "JXD201",
    "flax.jax_utils.unreplicate": "JXD202",
}
_OURS = {
    "jax.device_put_replicated": "jax_dist.device_put_replicated",
    "jax.device_put_sharded": "jax_dist.device_put_sharded",
    _REPLICATE: "jax_dist.device_put_replicated",
    "flax.jax_utils.unreplicate": "jax_dist.unreplicate",
}
_PLAIN = {
    "jax.device_put_replicated": emitted.PUT_REPLICATED,
    "jax.device_put_sharded": emitted.PUT_SHARDED,
    _REPLICATE: emitted.PUT_REPLICATED,
    "flax.jax_utils.unreplicate": emitted.FIRST_SLICE,
}
_FIRST = {"x": 0, "shards": 0, "tree": 0}


def places(module: Module) -> Iterator[tuple[str, ast.expr]]:
    """`(name, reference)` of each use of one of them."""
    for name in CODES:
        for node in module.uses(name):
            yield name, node


def to_jax(module: Module, name: str, node: ast.expr, style: Style) -> Fix:
    """The fix that calls a function which the file gets. Raises Left."""
    _check(module, node)
    texts = Texts(module, node, style)
    edit = Edit(*module.span(node), texts.helper(_PLAIN[name]))
    return Fix(f"replace {name}", Safety.UNSAFE, (edit,), texts.imports, texts.definitions)


def to_jax_dist(module: Module, name: str, node: ast.expr) -> Fix:
    """The fix that calls ours. Raises Left."""
    _check(module, node)
    text, imports = module.name_for(_OURS[name], node)
    edits = [Edit(*module.span(node), text)]
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
    return Fix(f"replace {name}", Safety.UNSAFE, tuple(edits), imports)


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
