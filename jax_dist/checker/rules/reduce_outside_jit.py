"""JXD205: reductions of what a mapped function returned, outside jit."""

import ast
from collections.abc import Iterator

from jax_dist.checker.model import flow
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.model.stacking import Kind
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD205",
    name="reduce-outside-jit",
    what="Finds `jnp.sum`, `mean`, `max` and similar reductions of the result of a mapped "
    "function, outside any traced function.",
    why="Each is a program over the whole mesh, compiled and dispatched separately. With several "
    "processes it may fail, or change its meaning, because the array is now global. JAX's "
    "guide says that such reductions may be silently wrong; in one process we could not "
    "reproduce it (496.0 both ways, jax 0.10.2).",
    example="losses = jax.pmap(step)(batch)\nloss = jnp.mean(losses)\n",
    instead="losses = jax.pmap(step)(batch)\nloss = np.mean(jax.device_get(losses))\n",
    fix="None: the text does not show whether the mean of this process or of all is wanted.",
    since="jax 0.8.0: the result of a mapped function is one global array.",
    source="https://docs.jax.dev/en/latest/migrate_pmap.html; not reproduced in one process.",
    default=False,
)

_REDUCTIONS = tuple(
    f"jax.numpy.{name}"
    for name in ("sum", "mean", "max", "min", "prod", "std", "var", "average", "median", "all")
)


@rule(PAGE, triggers=(b"*pmap*",), since=(0, 8, 0))
def check(module: Module) -> Iterator[Found]:
    values = flow.of(module)
    if not values.mapped_calls:
        return
    for call in module.calls(*_REDUCTIONS):
        if not call.args or isinstance(module.function(call), ast.Lambda):
            continue  # a lambda is written for something that may trace it
        found = values.origins(call.args[0])
        if all(origin.kind is Kind.MAPPED and not origin.on_host for origin in found):
            message = "a reduction over devices outside jit may be slow, or wrong in many processes"
            yield Found(call, message)
