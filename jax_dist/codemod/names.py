"""How a migrated file writes the functions that it gets: of jax_dist, or of its own helpers."""

import ast
import dataclasses
from typing import Protocol

from jax_dist.checker.model import new_imports
from jax_dist.checker.model.findings import Edit
from jax_dist.checker.model.semantic_model import Module
from jax_dist.codemod import helper_module
from jax_dist.codemod.helper_module import Home
from jax_dist.codemod.results import Left


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """A name as it is written at one place, and what it needs."""

    text: str
    imports: tuple[str, ...] = ()  # at the module's level
    edits: tuple[Edit, ...] = ()  # imports inside of functions


class Namer(Protocol):
    """Gives the names of one target in one file."""

    title: str  # of what takes the place of jax.pmap
    source: str  # the module that it comes from

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        """How to write a function at a place: "pmap", "device_put_replicated". Raises Left."""
        ...

    def import_as(self, bound: str) -> str | None:
        """The statement that binds the new pmap to a name; None where no import can."""
        ...


class LibraryNames:
    """The functions of jax_dist."""

    title = "jax_dist.pmap"
    source = "jax_dist"

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        text, imports = module.name_for(f"jax_dist.{function}", at)
        return _within_reach(module, at, text, imports)

    def import_as(self, bound: str) -> str | None:
        return f"from jax_dist import pmap{'' if bound == 'pmap' else f' as {bound}'}"


class HelperNames:
    """The functions of the helper module of one file.

    Args:
      home: where it is.
    """

    title: str = "mapped"

    def __init__(self, home: Home):
        self.home = home
        self.source: str = home.module
        self.used: set[str] = set()  # all that was asked for

    def named(self, module: Module, function: str, at: ast.AST) -> Name:
        function = "mapped" if function == "pmap" else function
        if self.home.is_inside:
            name = self._inside(module, function, at)
        else:
            name = self._imported(module, function, at)
        self.used.add(function)
        return name

    def import_as(self, bound: str) -> str | None:
        if self.home.is_inside:
            return None
        self.used.add("mapped")
        alias = "" if bound == "mapped" else f" as {bound}"
        return f"from {self.home.module} import mapped{alias}"

    def _inside(self, module: Module, function: str, at: ast.AST) -> Name:
        import_within(module, at)
        if not isinstance(module.once(_anchor), ast.Import | ast.ImportFrom):
            raise Left(
                "the file imports jax inside of a function or block, and has no place for helpers",
                "Give the path of a module for them: --helpers PATH.",
            )
        taken = _taken(module, frozenset(self.used | {function}))
        if taken:
            raise Left(
                f"the file has its own {taken[0]}, a name that its helpers need",
                f"Rename {taken[0]}, or give the path of a module for the helpers: --helpers PATH.",
            )
        return Name(function)

    def _imported(self, module: Module, function: str, at: ast.AST) -> Name:
        target = f"{self.home.module}.{function}"
        text = _bound_to(module, target) or _free_name(module, function)
        alias = "" if text == function else f" as {text}"
        line = f"from {self.home.module} import {function}{alias}"
        return _within_reach(module, at, text, (line,))


def _within_reach(module: Module, at: ast.AST, text: str, imports: tuple[str, ...]) -> Name:
    """The imports stand where jax is imported: in the same function, in the same `try`."""
    beside = import_within(module, at) if imports else None
    if beside is None:
        return Name(text, imports)
    start, end = module.span(beside)
    row = module.source.line_text(start)
    indent = row[: len(row) - len(row.lstrip())]
    before = row[: module.source.position(start).column - 1].strip()
    behind = module.source.line_text(end)[module.source.position(end).column - 1 :].strip()
    if before or not (behind == "" or behind.startswith("#")):
        lead = "; "
    else:  # below the line, so that a comment stays with the import that it is about
        end = module.source.code.index(behind.encode(), end) + len(behind.encode())
        lead = f"\n{indent}"
    return Name(text, edits=tuple(Edit(end, end, f"{lead}{line}") for line in imports))


def _anchor(module: Module) -> ast.stmt | None:
    return new_imports.anchor(module.tree)


def _taken(module: Module, functions: frozenset[str]) -> list[str]:
    """The names of helpers, and of what these need, that mean something else in a file."""
    known = module.once(_known)
    if functions not in known:
        known[functions] = _looked_up(module, helper_module.bound_names(functions))
    return known[functions]


def _known(module: Module) -> dict[frozenset[str], list[str]]:
    """What `_taken` found already."""
    del module
    return {}


def _looked_up(module: Module, wanted: dict[str, str]) -> list[str]:
    """Of names, each with what an import means by it or "" for a definition, those taken."""
    ours = _defined_by_us(module)
    taken: list[str] = []
    for name, target in wanted.items():
        for binding in module.scopes.module.bindings.get(name, ()):
            same = binding.kind == "import" and _is_same(module.absolute(binding.target), target)
            if not same and not (target == "" and name in ours):
                taken.append(name)
                break
    hidden = (name for name, target in wanted.items() if not target and name not in ours)
    inner = [scope for scope in module.scopes.all if scope is not module.scopes.module]
    taken += (name for name in hidden if any(name in scope.bindings for scope in inner))
    return taken


def _is_same(found: str, target: str) -> bool:
    """`typing.Callable` means what `collections.abc.Callable` does.

    And `Mesh` of `jax.experimental.maps` was that of `jax.sharding`, as everywhere in jax.
    """
    home, _, last = target.rpartition(".")
    if home == "jax.sharding":
        return found.startswith("jax.") and found.endswith(f".{last}")
    return found == target or (home == "collections.abc" and found == f"typing.{last}")


def _defined_by_us(module: Module) -> frozenset[str]:
    """What an earlier migration has put into the file."""
    text = module.source.code.decode()
    if not helper_module.is_ours(text):
        return frozenset()
    return frozenset(helper_module.bound_names(helper_module.present_in(text)))


def _bound_to(module: Module, target: str) -> str:
    """The name by which the module's own level imports something; "" where it does not."""
    for name, bindings in module.scopes.module.bindings.items():
        if len(bindings) == 1 and bindings[0].kind == "import" and bindings[0].target == target:
            return name
    return ""


def _free_name(module: Module, function: str) -> str:
    """A name that nothing in the file has."""
    bound = {name for scope in module.scopes.all for name in scope.bindings}
    wanted = (function, f"{function}_over_devices", f"_{function}_over_devices")
    for name in wanted:
        if name not in bound:
            return name
    raise Left(f"the file has its own {function}", f"Rename {function}, then migrate again.")


def import_within(module: Module, at: ast.AST) -> ast.stmt | None:
    """The import by which a place knows jax, where it stands in a function or block.

    None at the module's level.

    Raises:
      Left: only type checkers see the import.
    """
    root: ast.AST = at
    while isinstance(root, ast.Attribute):
        root = root.value
    found = module.scope(root).lookup(root.id) if isinstance(root, ast.Name) else None
    nodes = [binding.node for binding in found[1] if binding.kind == "import"] if found else []
    if not nodes:
        return None
    statements = sorted(map(module.statement, nodes), key=lambda each: each.lineno)
    plain = any(module.parent(each) is module.tree for each in statements)
    if plain:
        return None
    for around in module.ancestors(statements[0]):
        if isinstance(around, ast.If) and "TYPE_CHECKING" in module.text(around.test):
            raise Left("jax is imported for type checkers only")
    return statements[0]
