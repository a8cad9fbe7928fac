"""JXD901: a file that Python cannot parse; the linter itself finds it."""

from collections.abc import Iterator

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, rule


@rule(
    "JXD901",
    "syntax-error",
    what="A file that the running Python cannot parse, or whose bytes are not text.",
    why="Nothing in the file was checked. One cause is syntax that is newer than that Python.",
    instead="Correct the file, or run the linter with the Python that the file is written for.",
    triggers=(),
)
def syntax_error(module: Module) -> Iterator[Found]:
    del module
    yield from ()
