"""JXD900, JXD902: comments that switch a rule off, without an effect."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

UNUSED = Page(
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


@rule(UNUSED, triggers=())
def unused_suppression(module: Module) -> Iterator[Found]:
    """Nothing: `suppress.applied` makes the findings, once all others are there."""
    del module
    yield from ()


UNKNOWN = Page(
    code="JXD902",
    name="bad-suppression-code",
    what="Reports `# noqa: JXD...`, `# jax-dist: ignore[...]` and `# jax-dist: ignore-file[...]` "
    "with a code or name that no rule has, and `# jax-dist:` before any other word.",
    why="The comment was meant to suppress a rule, but has no effect.",
    example="step = jax.pmap(update)  # jax-dist: ignore[pmap-cal]\n",
    instead="step = jax.pmap(update)  # jax-dist: ignore[pmap-call]\n",
    fix="None: the linter cannot know which rule was meant; the message names the closest one.",
    since="Any jax.",
    source="The list of rules, `jax-dist rule --all`.",
)


@rule(UNKNOWN, triggers=())
def bad_suppression_code(module: Module) -> Iterator[Found]:
    """Nothing: `suppress.applied` makes the findings."""
    del module
    yield from ()
