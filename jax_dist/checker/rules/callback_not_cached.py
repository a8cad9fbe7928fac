"""JXD405: callbacks, whose programs are not kept in the persistent cache."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD405",
    name="callback-not-cached",
    what="Finds `jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback` and "
    "`jax.debug.print`.",
    why="Through jax 0.10.2 a program with a callback is never written to the persistent cache, "
    "so every process compiles it again (0 entries on jax 0.10.2, 1 on 0.12.0.1).",
    example="@jax.jit\ndef step(x):\n    jax.debug.print('x {}', x)\n    return x + 1\n",
    instead="@jax.jit\ndef step(x):\n    return x + 1  # print the result outside\n",
    fix="None: the text does not show whether the callback is needed.",
    since="Up to jax 0.10.2; jax 0.11.0 keeps such programs.",
    source="https://github.com/jax-ml/jax/pull/38405; measured on jax 0.10.2 and 0.12.0.1.",
    default=False,
)

_CALLBACKS = (
    "jax.pure_callback",
    "jax.experimental.io_callback",
    "jax.debug.callback",
    "jax.debug.print",
)


@rule(PAGE, triggers=(b"*_callback*", b"debug.print", b"debug.callback", b"import debug"))
def check(module: Module) -> Iterator[Found]:
    for node in module.uses(*_CALLBACKS):
        name = (module.qualified_name(node) or "").rpartition(".")[2]
        yield Found(node, f"{name} keeps a program out of the persistent cache up to jax 0.10.2")
