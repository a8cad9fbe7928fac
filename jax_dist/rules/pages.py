"""The pages of the rules, by code."""

import dataclasses
from typing import TypeAlias

Code: TypeAlias = str


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """What one rule says; each field is a heading of its page."""

    code: Code
    name: str
    what: str
    why: str
    instead: str
    fix: str

    def __str__(self) -> str:
        parts = (("What", self.what), ("Why", self.why), ("Instead", self.instead))
        body = "\n\n".join(f"{heading}\n  {text}" for heading, text in (*parts, ("Fix", self.fix)))
        return f"{self.code} {self.name}\n\n{body}"


_ALL = (
    Page(
        code="JXD002",
        name="jit-of-pmap",
        what="`jax.jit`, `lax.scan`, `lax.while_loop` or `jax.grad` around a `jax.pmap`.",
        why="With several processes, a traced `jax.pmap` sees the devices of its own process only: "
        "its collectives reduce over these, with no error.",
        instead="`jax_dist.rewrite` around the whole function, or `jax_dist.pmap` in it.",
        fix="`jax_dist.rewrite` moves each pmap onto one mesh over all processes.",
    ),
    Page(
        code="JXD301",
        name="all-gather-then-reduce",
        what="`lax.all_gather` whose result is only reduced: mean, sum, max, a weighted sum.",
        why="Every device receives and keeps the blocks of all others, to add them up. A reduction "
        "moves less, and needs the memory of one block.",
        instead="`lax.pmean`, `lax.psum`, `lax.pmax` or `lax.pmin` of the local reduction.",
        fix="`jax_dist.rewrite` does it where it can show that the numbers stay the same, to the "
        "order of summation.",
    ),
    Page(
        code="JXD303",
        name="grad-psum-with-vma",
        what="In a `shard_map` with `check_vma=True`, the default: a gradient by an argument that "
        "all devices share, then `psum` or `pmean` of it.",
        why="There the gradient is already summed over the devices; a psum multiplies it by their "
        "number, and a pmean leaves the sum, N times what pmap gives.",
        instead="`check_vma=False`, or `lax.pcast(w, axis, to='varying')` before the gradient.",
        fix="None: the two programs look alike, and only you know which was meant. "
        "`jax_dist.pmap` and `jax_dist.rewrite` never make such a program.",
    ),
    Page(
        code="JXD401",
        name="captured-array",
        what="An array that a traced function takes from around it (a closure, a global, `self`) "
        "and not from its arguments.",
        why="Its values become part of the program: the program is as large as the array, compiles "
        "slowly, and has another key in the persistent cache whenever a value differs.",
        instead="Pass it as an argument.",
        fix="`jax_dist.rewrite` and `jax_dist.pmap` lift it to an argument, and place it once.",
    ),
    Page(
        code="JXD402",
        name="custom-partitioning-outside-shard-map",
        what="A primitive of `custom_partitioning` in a program of several devices.",
        why="The program holds the address of a Python object, so its key in the persistent cache "
        "differs in each process and nothing is reused.",
        instead="A `jax.shard_map` around the function that `partition` returns.",
        fix="`jax_dist.rewrite` puts it there, with the specs that the compiler would choose.",
    ),
)
PAGES = {page.code: page for page in _ALL}
