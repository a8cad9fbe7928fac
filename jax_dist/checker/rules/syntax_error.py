"""JXD901: a file that Python cannot parse."""

import platform
from collections.abc import Iterator

from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Page, rule

PAGE = Page(
    code="JXD901",
    name="syntax-error",
    what="Reports a file that the running Python cannot parse, or whose bytes are not text.",
    why="Nothing in the file was checked. One cause is syntax that is newer than the running "
    "Python.",
    example="def f(:\n    pass\n",
    instead="Correct the file, or run the checker with the Python that the file is written for.",
    fix="None: the linter cannot know what was meant.",
    since="Any jax.",
    source="The parser of the running Python.",
)


def message(reason: str) -> str:
    """The sentence of a finding."""
    return f"Python {platform.python_version()} cannot parse this file: {reason}"


@rule(PAGE, triggers=())
def check(module: Module) -> Iterator[Found]:
    """A module that exists has been parsed; `linter.check` makes the finding."""
    del module
    yield from ()
