"""The names that new text uses, as the file would write them, and their imports."""

import ast
import dataclasses

from jax_dist.lint.model.semantic_model import Module


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """How a file writes the functions of jax_dist, or of the vendored module, and imports them."""

    source: str  # the module that they come from: "jax_dist", "pkg._mapped"
    pmap: str  # its name for pmap

    def name_for(self, module: Module, function: str, at: ast.AST) -> tuple[str, tuple[str, ...]]:
        """Return how to write a function at a node, and the import statements that this needs."""
        if self.source == "jax_dist":
            return module.name_for(f"jax_dist.{function}", at)
        return self._by_name(module, self.pmap if function == "pmap" else function)

    def import_as(self, bound: str) -> str:
        """Return the statement that imports pmap, or `mapped`, under the name `bound`."""
        return f"from {self.source} import {self.pmap}{_alias(self.pmap, bound)}"

    def _by_name(self, module: Module, function: str) -> tuple[str, tuple[str, ...]]:
        """Return the file's name for a function, or else a free one with its import statement."""
        for name, bindings in module.scopes.module.bindings.items():
            if [binding.target for binding in bindings] == [f"{self.source}.{function}"]:
                return name, ()
        bound = {name for scope in module.scopes.all for name in scope.bindings}
        names = (function, f"{function}_over_devices", f"_{function}_over_devices")
        free_name = next((name for name in names if name not in bound), names[-1])
        return free_name, (f"from {self.source} import {function}{_alias(function, free_name)}",)


LIBRARY = Names("jax_dist", "pmap")


def _alias(name: str, bound: str) -> str:
    return "" if bound == name else f" as {bound}"


def indentation(line: str) -> str:
    """Return the spaces and tabs that a line begins with."""
    return line[: len(line) - len(line.lstrip())]
