"""Writes a program that tells more of its run: which statements ran, and what host edits gave.

A statement gets a line above it; the expression of a host edit, such as `unreplicate(x)`, becomes
`__jd__.host(3, lambda v: unreplicate(v), x)`. All else stays, and the lines in their order.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_dist.codemod.verify.host_edits import HostForm
from jax_dist.codemod.verify.program_text import (
    ProgramText,
    Spot,
    first_line,
    is_future,
    is_text,
)

_RECORD_HELPER = "__import__('_jax_dist_recording.start').start.record_helper(globals())\n"
_VALUE = "__jd_value__"


@dataclass(frozen=True, slots=True)
class Marked:
    """The marked text of one file."""

    text: str
    spots: tuple[Spot, ...]  # statements that tell that they ran
    added: tuple[int, ...]  # lines before that have one more line above them, in order

    def line_before(self, line: int) -> int:
        """The line of the program without marks that a line of this one was."""
        return line - sum(above + number < line for number, above in enumerate(self.added))


def marked(
    path: str, text: str, lines: Sequence[int], first: int, hosts: Mapping[int, HostForm]
) -> Marked:
    """Marks one file.

    Args:
      path: its name, for the spots.
      text: what it holds, with `\\n` at the ends of lines.
      lines: of the statements that are to tell that they ran.
      first: the number of the first spot.
      hosts: the expressions whose values are to be told, by number; of the syntax tree of `text`,
        as `host_edits.find` gives them.
    """
    program, spots = ProgramText(text), []
    for line in lines:
        start = _statement(program, line)
        if start is not None:
            indent, at = start
            spots.append(Spot(first + len(spots), path, line, line))
            program.replace(at, at, f"{indent}__jd__.ran({spots[-1].number})\n")
    for number, form in hosts.items():
        _tell(program, number, form)
    program.import_start()
    return Marked(program.edited, tuple(spots), tuple(program.added()))


def _statement(program: ProgramText, line: int) -> tuple[str, int] | None:
    """The indentation and the start of the innermost statement at a line."""
    found = [
        each
        for each in ast.walk(program.tree)
        if isinstance(each, ast.stmt) and first_line(each) <= line <= (each.end_lineno or 0)
    ]
    if not found or is_future(found[-1]) or is_text(found[-1]):
        return None
    statement = max(found, key=lambda each: (first_line(each), -(each.end_lineno or 0)))
    start = program.line_of(statement)
    indent = program.between(start, start + statement.col_offset)
    if indent.strip():  # something stands before it: `if x: f()`
        return None
    return indent, start


def _tell(program: ProgramText, number: int, form: HostForm) -> None:
    """The function around a value, which keeps its place; lines of what goes stay as empty ones."""
    (start, stop), (inner, end) = program.span(form.node), program.span(form.of)
    before, after = program.between(start, inner), program.between(end, stop)
    head = f"__jd__.host({number}, lambda {_VALUE}: {form.around(_VALUE)}, "
    program.replace(start, inner, head + "\n" * before.count("\n"))
    program.replace(end, stop, "\n" * after.count("\n") + ")")


def with_helper_recorded(data: bytes) -> bytes:
    """A file in which the helper `mapped` of `--to jax` is recorded, where the file has it.

    It may lie inside a script, which nobody imports, so the script itself has to tell.
    """
    if b"def mapped(" not in data or b"class _Program" not in data:
        return data
    try:
        body = ast.parse(data).body
    except (SyntaxError, ValueError):
        return data
    ends = [
        each.end_lineno
        for each in body
        if isinstance(each, ast.FunctionDef) and each.name == "mapped"
    ]
    if not ends:
        return data
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[: ends[-1]], _RECORD_HELPER.encode(), *lines[ends[-1] :]])
