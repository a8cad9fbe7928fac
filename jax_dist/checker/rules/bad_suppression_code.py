"""JXD902: a comment that should switch a rule off, but names none."""

from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
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


@rule(PAGE, triggers=())
def check(module: Module) -> Iterator[Found]:
    """Nothing: `suppress.applied` makes the findings."""
    del module
    yield from ()
