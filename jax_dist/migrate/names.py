"""The names that new text uses, and where their imports go.

A name is written as the file would write it, and its import stands where the file knows jax from:
in the same function, in the same `try`.
"""

import ast
import dataclasses
from typing import Protocol

from jax_dist.lint.model.findings import Edit
from jax_dist.lint.model.semantic_model import Module
from jax_dist.migrate.places import Left
from jax_dist.migrate.vendored import Home


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A name as it is written at one place, and what it needs."""

    text: str
    imports: tuple[str, ...] = ()  # at the module's level
    edits: tuple[Edit, ...] = ()  # imports inside of functions


class Namer(Protocol):
    """Provides the functions of a target."""

    title: str  # of its pmap
    source: str  # the module that it comes from

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        """Return how to write a function at a place. Raises Left."""
        ...

    def import_as(self, bound: str) -> str:
        """Return the line that imports its pmap under a name."""
        ...


class LibraryNames:
    """The functions of jax_dist."""

    title = "jax_dist.pmap"
    source = "jax_dist"

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        text, imports = module.name_for(f"jax_dist.{function}", at)
        return within_reach(module, at, text, imports)

    def import_as(self, bound: str) -> str:
        return f"from jax_dist import pmap{'' if bound == 'pmap' else f' as {bound}'}"


class VendoredNames:
    """The functions of the vendored module of one file."""

    title = "mapped"

    def __init__(self, home: Home):
        self.source: str = home.module
        self.is_used: bool = False  # whether the file needs the module

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        function = "mapped" if function == "pmap" else function
        self.is_used = True
        target = f"{self.source}.{function}"
        for name, bindings in module.scopes.module.bindings.items():
            if [binding.target for binding in bindings] == [target]:
                return Name(name)
        bound = {name for scope in module.scopes.all for name in scope.bindings}
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        text = next((name for name in names if name not in bound), names[-1])
        alias = "" if text == function else f" as {text}"
        return within_reach(module, at, text, (f"from {self.source} import {function}{alias}",))

    def import_as(self, bound: str) -> str:
        self.is_used = True
        return f"from {self.source} import mapped{'' if bound == 'mapped' else f' as {bound}'}"


def within_reach(module: Module, at: ast.AST, text: str, imports: tuple[str, ...]) -> Name:
    """Return a name whose imports stand where jax is imported. Raises Left."""
    beside = _local_import(module, at) if imports else None
    if beside is None:
        return Name(text, imports)
    start, end = module.span(beside)
    row = module.source.line_text(start)
    before = row[: module.source.position(start).column - 1].strip()
    behind = module.source.line_text(end)[module.source.position(end).column - 1 :].strip()
    if before or not (behind == "" or behind.startswith("#")):
        lead = "; "
    else:  # below the line, so that a comment stays with the import that it is about
        end = module.source.code.index(behind.encode(), end) + len(behind.encode())
        lead = f"\n{indentation(row)}"
    return Name(text, edits=tuple(Edit(end, end, f"{lead}{line}") for line in imports))


def _local_import(module: Module, at: ast.AST) -> ast.stmt | None:
    """Return the import in a function or block by which a place knows jax; None: at the top.

    Raises Left if only type checkers see the import.
    """
    root: ast.AST = at
    while isinstance(root, ast.Attribute):
        root = root.value
    binding = module.scope(root).lookup(root.id) if isinstance(root, ast.Name) else None
    nodes = [part.node for part in binding[1] if part.kind == "import"] if binding else []
    if not nodes:
        return None
    statements = sorted(map(module.statement, nodes), key=lambda statement: statement.lineno)
    if any(module.parent(statement) is module.tree for statement in statements):
        return None
    for around in module.ancestors(statements[0]):
        if isinstance(around, ast.If) and "TYPE_CHECKING" in module.text(around.test):
            raise Left("jax is imported for type checkers only", "Import jax at run time.")
    return statements[0]


def indentation(line: str) -> str:
    """Return the spaces and tabs that a line begins with."""
    return line[: len(line) - len(line.lstrip())]
