"""Takes a statement out of a file."""

import ast

from jax_dist.checker.findings import Edit
from jax_dist.checker.modules import Module


def removal(module: Module, statement: ast.stmt) -> Edit:
    """The statement goes with its line; `pass` stands for it where its block would be empty."""
    start, end = module.span(statement)
    block = getattr(module.parent(statement), "body", [])
    if len(block) == 1 or statement not in block:
        return Edit(start, end, "pass")
    code = module.source.code
    line = code.rfind(b"\n", 0, start) + 1
    after = code.find(b"\n", end)
    rest = code[end : after if after >= 0 else None]
    if code[line:start].strip() or rest.strip():
        return Edit(start, end, "pass")  # the line holds more
    return Edit(line, after + 1 if after >= 0 else len(code), "")
