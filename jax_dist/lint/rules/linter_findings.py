"""JXD900, JXD901, JXD902: what the linter itself says of a file; no check of a module finds it."""

from collections.abc import Iterator

from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Page, rule


def _nothing(module: Module) -> Iterator[Found]:
    """`suppressions.applied` and `linter.check` make the findings."""
    del module
    yield from ()


UNUSED = Page(
    code="JXD900",
    name="unused-suppression",
    summary="a suppression that suppresses nothing",
    cost="it would hide a new finding",
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
_unused_suppression = rule(UNUSED, triggers=())(_nothing)

SYNTAX_ERROR = Page(
    code="JXD901",
    name="syntax-error",
    summary="a file that Python cannot parse",
    cost="nothing in it was checked",
    what="Reports a file that the running Python cannot parse, or whose bytes are not text.",
    why="Nothing in the file was checked. One cause is syntax that is newer than the running "
    "Python.",
    example="def f(:\n    pass\n",
    instead="Correct the file, or run the checker with the Python that the file is written for.",
    fix="None: the linter cannot know what was meant.",
    since="Any jax.",
    source="The parser of the running Python.",
)
_syntax_error = rule(SYNTAX_ERROR, triggers=())(_nothing)

UNKNOWN = Page(
    code="JXD902",
    name="bad-suppression-code",
    summary="a suppression with an unknown code",
    cost="it suppresses nothing",
    what="Reports `# noqa: JXD...`, `# jax-dist: ignore[...]` and `# jax-dist: ignore-file[...]` "
    "with a code or name that no rule has, and `# jax-dist:` before any other word.",
    why="The comment was meant to suppress a rule, but has no effect.",
    example="step = jax.pmap(update)  # jax-dist: ignore[pmap-cal]\n",
    instead="step = jax.pmap(update)  # jax-dist: ignore[pmap-call]\n",
    fix="None: the linter cannot know which rule was meant; the message names the closest one.",
    since="Any jax.",
    source="The list of rules, `jax-dist rule --all`.",
)
_bad_suppression_code = rule(UNKNOWN, triggers=())(_nothing)
