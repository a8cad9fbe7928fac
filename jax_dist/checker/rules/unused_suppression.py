"""JXD900: a comment that switches a rule off where the rule says nothing."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD900",
    name="unused-suppression",
    what="Reports codes in `# noqa: JXD...`, `# jax-dist: ignore[...]` and `# jax-dist: "
    "ignore-file[...]` that suppress nothing. Codes of other tools are ignored, and so is a "
    "`# noqa` without codes.",
    why="It would hide a new finding on that line.",
    example="step = jax.jit(update)  # noqa: JXD001\n",
    instead="step = jax.jit(update)\n",
    fix="Safe: only the comment changes; other codes and words in it stay.",
    since="Any jax.",
    source="The comments of the file, compared with its findings. Only rules that are on count.",
)


@rule(PAGE, triggers=())
def check(module: Module) -> Iterator[Found]:
    """Nothing: `suppress.applied` makes the findings, once all others are there."""
    del module
    yield from ()
