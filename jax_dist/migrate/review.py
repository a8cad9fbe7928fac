"""Lines that read a changed value, one without the device axis of pmap, and whether they ran.

The old program runs with a marker around each such value: `__ran__("a.py", 12, state)`, which notes
the line and returns the value. Lines keep their numbers.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import FileMigration, Span


class Unreached(NamedTuple):
    """A line to review: it reads a changed value, and no run reached it."""

    path: str
    line: int  # of the file before
    text: str


def unreached(file: FileMigration, line: int) -> Unreached:
    """Return a line of the old text as one to review."""
    return Unreached(file.path, line, file.before.decode("utf-8").splitlines()[line - 1].strip())


def is_read(node: ast.AST) -> bool:
    """Return whether a node is an expression that is read, so that `f(node)` can replace it."""
    return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def touched_lines(module: Module, nodes: Collection[ast.AST]) -> Mapping[int, Sequence[Span]]:
    """Return by line the byte spans of the reads among `nodes` that a marker can be put around.

    Not of `x` inside `f(x)` if that is one too; not in a notebook, an f-string or a pattern.
    """
    source = module.source
    is_plain = source.written(source.code) == source.code  # offsets are those in the file
    if not source.path.endswith(".py") or not is_plain:
        return {}
    lines: dict[int, list[Span]] = {}
    for node in nodes:
        if not is_read(node) or not module.holds(node):
            continue
        if not any(
            outer in nodes or isinstance(outer, ast.JoinedStr | ast.pattern)
            for outer in module.ancestors(node)
        ):
            span = module.span(node)
            lines.setdefault(source.position(span[0]).line, []).append(span)
    return {line: sorted(spans) for line, spans in sorted(lines.items())}


def mark(file: FileMigration, path: str) -> bytes:
    """Return the old text with `state` as `__ran__("a.py", 12, state)`, for `file.touched`."""
    edits: list[Edit] = []
    for line, spans in file.touched.items():
        for start, end in spans:
            edits += [Edit(start, start, f"__ran__({path!r}, {line}, "), Edit(end, end, ")")]
    return apply_edits(file.before, edits)
