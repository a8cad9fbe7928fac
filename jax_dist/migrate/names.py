"""The names that new text uses, and where their imports go.

A name is written as the file would write it, and its import stands where the file knows jax from:
in the same function, in the same `try`.
"""

import ast
import dataclasses

from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.semantic_model import Module


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A name as it is written at one place, and what it needs."""

    text: str
    imports: tuple[str, ...] = ()  # at the module's level
    edits: tuple[Edit, ...] = ()  # imports inside of functions


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The functions of jax_dist, or of the vendored module, as a file writes them."""

    source: str  # the module that they come from: "jax_dist", "pkg._mapped"
    pmap: str  # its name for pmap

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        """Return how to write a function at a place."""
        if self.source == "jax_dist":
            text, imports = module.name_for(f"jax_dist.{function}", at)
        else:
            text, imports = self._by_name(module, self.pmap if function == "pmap" else function)
        beside = _local_import(module, at) if imports else None
        if beside is None:
            return Name(text, imports)
        # Below the line, so that a comment stays with the import that it is about.
        start, end = module.span(beside)
        _, behind = module.margins(beside)
        if not behind.strip() or behind.lstrip().startswith("#"):
            end += len(behind.rstrip().encode())
        lead = f"\n{indentation(module.source.line_text(start))}"
        return Name(text, edits=tuple(Edit(end, end, f"{lead}{line}") for line in imports))

    def import_as(self, bound: str) -> str:
        """Return the line that imports its pmap under a name."""
        return f"from {self.source} import {self.pmap}{_alias(self.pmap, bound)}"

    def _by_name(self, module: Module, function: str) -> tuple[str, tuple[str, ...]]:
        """Return a name that the file has for a function, or one that is free, and its import."""
        for name, bindings in module.scopes.module.bindings.items():
            if [binding.target for binding in bindings] == [f"{self.source}.{function}"]:
                return name, ()
        bound = {name for scope in module.scopes.all for name in scope.bindings}
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        text = next((name for name in names if name not in bound), names[-1])
        return text, (f"from {self.source} import {function}{_alias(function, text)}",)


LIBRARY = Names("jax_dist", "pmap")


def _alias(name: str, bound: str) -> str:
    return "" if bound == name else f" as {bound}"


def _local_import(module: Module, at: ast.AST) -> ast.stmt | None:
    """Return the import in a function or block by which a place knows jax; None: at the top."""
    root: ast.AST = at
    while isinstance(root, ast.Attribute):
        root = root.value
    binding = module.scope(root).lookup(root.id) if isinstance(root, ast.Name) else None
    nodes = [part.node for part in binding[1] if part.kind == "import"] if binding else []
    statements = sorted(map(module.statement, nodes), key=lambda statement: statement.lineno)
    if any(module.parent(statement) is module.tree for statement in statements):
        return None
    return next(iter(statements), None)


def indentation(line: str) -> str:
    """Return the spaces and tabs that a line begins with."""
    return line[: len(line) - len(line.lstrip())]
