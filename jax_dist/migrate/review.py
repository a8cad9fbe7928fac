"""Lines to review: those that read a changed value and did not run, and comments on pmap.

A changed value is one without the device axis of pmap. The old program runs with a marker around
each: `__ran__("a.py", 12, state)`, which notes the line and returns it. Lines keep their numbers.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax_dist.lint.findings import Edit, apply_edits
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import FileMigration

_ON_PMAP = re.compile(r"#.*\bpmap(ped|'d)?\b")

# By line: the bytes [start, end) of the reads of changed values on it.
ChangedReads: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]


class Line(NamedTuple):
    """A line to review."""

    path: str
    line: int  # of the file before if it reads a changed value; of the file after if a comment
    text: str


def is_read(node: ast.AST) -> bool:
    """Return whether a node is an expression that is read, so that `f(node)` can replace it."""
    return isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


def changed_reads(module: Module, nodes: Collection[ast.AST]) -> ChangedReads:
    """Return the spans of the reads among `nodes` that can be put inside of `__ran__(...)`.

    Of `x` and `x.y`, if both are among the nodes, only the outer one is; and none in a notebook, an
    f-string or a pattern, where no call can be written or positions are not known.
    """
    source = module.source
    if not source.path.endswith(".py") or source.written(source.code) != source.code:
        return {}
    spans_by_line: dict[int, list[tuple[int, int]]] = {}
    for node in (x for x in nodes if is_read(x) and module.holds(x)):
        around = list(module.ancestors(node))
        is_in_text = any(isinstance(outer, ast.JoinedStr | ast.pattern) for outer in around)
        if not is_in_text and not any(outer in nodes for outer in around):
            span = module.span(node)
            spans_by_line.setdefault(source.position(span[0]).line, []).append(span)
    return {line: sorted(spans) for line, spans in sorted(spans_by_line.items())}


def mark(file: FileMigration, path: str) -> bytes:
    """Return the old text with `state` as `__ran__("a.py", 12, state)`, for `changed_reads`."""
    edits: list[Edit] = []
    for line, spans in file.changed_reads.items():
        for start, end in spans:
            edits += [Edit(start, start, f"__ran__({path!r}, {line}, "), Edit(end, end, ")")]
    return apply_edits(file.before, edits)


def comments_on_pmap(file: FileMigration) -> Iterator[Line]:
    """Yield the lines of a new text with a comment that speaks of pmap."""
    lines = file.after.decode("utf-8", "replace").splitlines() if file.path.endswith(".py") else ()
    for number, text in enumerate(lines, 1):
        if not file.is_new and _ON_PMAP.search(text):
            yield Line(file.path, number, text.strip())
