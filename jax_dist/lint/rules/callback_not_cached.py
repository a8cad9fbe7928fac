"""JXD405: a callback in a program."""

from jax_dist.lint.rules import Findings, Found, Module, Rule

_CALLBACKS = ("jax.pure_callback", "jax.experimental.io_callback")
_CALLBACKS += ("jax.debug.callback", "jax.debug.print")


@Rule(
    "JXD405",
    what="`jax.pure_callback`, `jax.experimental.io_callback`, `jax.debug.callback` and "
    "`jax.debug.print`.",
    why="Through jax 0.10.2 a program with a callback is never written to the persistent cache: "
    "every process compiles it again (0 entries on jax 0.10.2, 1 on 0.12.0.1). "
    "https://github.com/jax-ml/jax/pull/38405",
    instead="Return the value, and print it outside of the program.",
    triggers=(b"pure_callback", b"io_callback", b"debug"),
    default=False,
)
def callback_not_cached(module: Module) -> Findings:
    for node in module.uses(*_CALLBACKS):
        name = (module.qualified_name(node) or "").rpartition(".")[2]
        yield Found(node, f"{name} keeps a program out of the persistent cache up to jax 0.10.2")
