"""Where a file uses what it imports: the names and attributes, widened only where a rule asks."""

import ast
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_dist.checker.model.semantic_model import Meaning, Module

PARTIAL = frozenset({"functools.partial", "jax.tree_util.Partial", "jax.util.partial"})


class Uses:
    """The uses of imported names in one file.

    Args:
      module: the file.
    """

    def __init__(self, module: "Module"):
        self._module = module
        self._known: dict[str, dict[str, list[ast.expr]]] = {}  # by what is widened

    def of(self, name: str) -> list[ast.expr]:
        """The widest names and attributes that mean `name`."""
        root = _root(name)
        found = list(self._elsewhere.get(name, ()))
        for start in self._loads.get(root, ()) if root in KNOWN else ():
            if name == start or name.startswith(f"{start}."):
                found += self._widened(root, start).get(name, ())
        return found

    def names(self, root: str) -> set[str]:
        """All names with this root that the file uses."""
        starts = self._loads.get(root, ()) if root in KNOWN else ()
        found = {name for start in starts for name in self._widened(root, start)}
        return found.union(name for name in self._elsewhere if _root(name) == root)

    @functools.cached_property
    def _loads(self) -> dict[str, dict[str, list[tuple["Meaning", list[ast.Name]]]]]:
        """By root ("jax") and by meaning ("jax.numpy"): names that mean something imported."""
        found: dict[str, dict[str, list[tuple[Meaning, list[ast.Name]]]]] = {}
        meaning_of_name, bound = self._module.meaning_of_name, self._bound_to_imports
        for scope in self._module.scopes.all:
            for name in bound.intersection(scope.loads):
                meaning = meaning_of_name(scope, name)
                if meaning is not None:
                    of_root = found.setdefault(_root(meaning.name), {})
                    of_root.setdefault(meaning.name, []).append((meaning, scope.loads[name]))
        return found

    def _widened(self, root: str, start: str) -> dict[str, list[ast.expr]]:
        """By meaning: what the names that mean `start` are the beginnings of."""
        if start not in self._known:
            found: dict[str, list[ast.expr]] = {}
            for meaning, loads in self._loads[root][start]:
                for load in loads:
                    node, name = self._widest(load, meaning)
                    found.setdefault(name, []).append(node)
            self._known[start] = found
        return self._known[start]

    @functools.cached_property
    def _elsewhere(self) -> dict[str, list[ast.expr]]:
        """The same for names of other files, which may mean anything."""
        found: dict[str, list[ast.expr]] = {}
        for root in (each for each in self._loads if each not in KNOWN):
            for start in self._loads[root]:
                for name, nodes in self._widened(root, start).items():
                    found.setdefault(name, []).extend(nodes)
        return found

    @functools.cached_property
    def _bound_to_imports(self) -> set[str]:
        """Names that may mean something imported; the others need no look."""
        names: set[str] = set()
        makers = set(_PARTIAL_NAMES)  # that are called as `partial` is
        aliases: list[tuple[str, str]] = []
        made: list[tuple[str, ast.Call]] = []
        for scope in self._module.scopes.all:
            for name, bindings in scope.bindings.items():
                for binding in bindings:
                    value = binding.value
                    if binding.kind == "import":
                        names.add(name)
                        if not binding.target.startswith(_NO_PARTIAL):
                            makers.add(name)
                    elif isinstance(value, ast.Call):
                        made.append((name, value))
                    elif isinstance(value, ast.Name | ast.Attribute):
                        aliases += ((name, root) for root in _roots(value))
                        if _last_name(value) in _PARTIAL_NAMES:
                            makers.add(name)
        for name, call in made:
            if _last_name(call.func) in makers:
                aliases += ((name, root) for root in _roots(call))
        grown = -1
        while grown != len(names):
            grown = len(names)
            names.update(name for name, root in aliases if root in names)
        if self._module.scopes.module.star_imports:
            names.update(name for scope in self._module.scopes.all for name in scope.loads)
        return names

    def _widest(self, node: Any, meaning: "Meaning") -> tuple[ast.expr, str]:
        """`jax.lax.psum`, where `jax` stands; called for every name that was imported."""
        canonical, attribute = self._module.canonical, ast.Attribute
        parents = self._module.scopes.parents
        around = parents[node]
        while around.__class__ is attribute and not meaning.partials:
            node, meaning = around, canonical(f"{meaning.name}.{around.attr}")
            around = parents[node]
        return node, meaning.name


def _root(name: str) -> str:
    return name.partition(".")[0]


# What may hand on `functools.partial` is called one of these, or is imported; not from here.
_PARTIAL_NAMES = frozenset(name.rpartition(".")[2] for name in PARTIAL)
_NO_PARTIAL = ("jax.numpy", "jax.lax", "jax.random", "numpy", "optax")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _roots(value: ast.expr) -> list[str]:
    """The names on which an alias may rest: of `partial(jax.pmap, x)` both."""
    if isinstance(value, ast.Call):
        return [*_roots(value.func), *(_roots(value.args[0]) if value.args else [])]
    while isinstance(value, ast.Attribute):
        value = value.value
    return [value.id] if isinstance(value, ast.Name) else []


# Packages whose own source is never asked: their names are what the rules speak of.
KNOWN = frozenset(
    (
        "abc",
        "absl",
        "chex",
        "collections",
        "dataclasses",
        "distrax",
        "equinox",
        "flax",
        "functools",
        "haiku",
        "itertools",
        "jax",
        "jax_dist",
        "jaxlib",
        "logging",
        "math",
        "matplotlib",
        "ml_collections",
        "numpy",
        "optax",
        "orbax",
        "os",
        "pytest",
        "random",
        "re",
        "rlax",
        "scipy",
        "sys",
        "tensorflow",
        "tensorflow_datasets",
        "time",
        "torch",
        "tqdm",
        "typing",
        "unittest",
    )
)
