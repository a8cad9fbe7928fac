"""Lines that read a changed value, one without the device axis of pmap, and whether they ran.

The old program runs with a marker around each such value: `__ran__("a.py", 12, state)`, which notes
the line and returns the value. Lines keep their numbers.
"""

import ast
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import FileMigration, Span


@dataclasses.dataclass(frozen=True, slots=True)
class Unreached:
    """A line to review: it reads a changed value, and no run reached it."""

    path: str
    line: int  # of the file before
    text: str


def touched_lines(module: Module, nodes: Collection[ast.AST]) -> Mapping[int, Sequence[Span]]:
    """Return by line the bytes of `nodes`, the expressions that read a changed value."""
    source = module.source
    if not source.path.endswith(".py") or source.written(source.code) != source.code:
        return {}
    lines: dict[int, list[Span]] = {}
    for node in nodes:
        is_read = isinstance(node, ast.expr) and isinstance(
            getattr(node, "ctx", ast.Load()), ast.Load
        )
        if not is_read or not module.holds(node):
            continue
        around = [*module.ancestors(node)]
        is_marked = any(outer in nodes for outer in around)  # a marker around it is enough
        if not is_marked and not any(isinstance(x, ast.JoinedStr | ast.pattern) for x in around):
            span = module.span(node)
            lines.setdefault(source.position(span[0]).line, []).append(span)
    return {line: sorted(spans) for line, spans in sorted(lines.items())}


def mark(file: FileMigration, path: str) -> bytes:
    """Return the old text with markers around the expressions in `file.touched`."""
    spans = {(*span, line) for line, spans in file.touched.items() for span in spans}
    edits = [
        edit
        for start, end, line in spans
        for edit in (Edit(start, start, f"__ran__({path!r}, {line}, "), Edit(end, end, ")"))
    ]
    return apply_edits(file.before, edits)
