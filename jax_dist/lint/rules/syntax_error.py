"""JXD901: a file that Python cannot parse; the linter itself finds it."""

from jax_dist.lint.rules import Findings, Module, Rule


@Rule(
    "JXD901",
    what="A file that the running Python cannot parse, or whose bytes are not text.",
    why="Nothing in the file was checked. One cause is syntax that is newer than that Python.",
    instead="Correct the file, or run the linter with the Python that the file is written for.",
    triggers=(),
)
def syntax_error(module: Module) -> Findings:
    del module  # `linter.Examiner` makes the finding, since without a tree no rule is called
    yield from ()
