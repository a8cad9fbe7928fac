"""A parsed file: what its names mean, and where each meaning is used.

Names and attributes are looked at only where a rule asks for what they may mean.
"""

import ast
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

from jax_dist.lint.findings import Edit
from jax_dist.lint.model import scopes, sources
from jax_dist.lint.model.reaching import LIMIT, NameFlow
from jax_dist.lint.model.scopes import Binding, NameScope
from jax_dist.lint.model.sources import Source

_LONGEST_CHAIN = 50  # of aliases, `b = a; c = b`
PARTIAL = frozenset({"functools.partial", "jax.tree_util.Partial", "jax.util.partial"})

_Key = TypeVarTuple("_Key")
_Result = TypeVar("_Result")
_Node = TypeVar("_Node", bound=ast.AST)

# Takes a dotted name; returns what another file of the project means by it, or None.
_Elsewhere: TypeAlias = "Callable[[str], Meaning | None]"


@dataclasses.dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of an expression: a dotted name, perhaps with arguments bound by `partial`."""

    name: str  # "jax.pmap"
    args: tuple[ast.expr, ...] = ()  # bound after the function itself
    keywords: tuple[ast.keyword, ...] = ()
    is_partial: bool = False


class Module:
    """One file, parsed and resolved.

    Args:
      source: the text; ParseError is raised if Python cannot parse it.
      name: the dotted name under which the project imports it; "" where that is not known.
      elsewhere: looks up names of other files of the project.
    """

    def __init__(self, source: Source, name: str = "", elsewhere: _Elsewhere = lambda _: None):
        self.source = source
        self.name = name
        self.tree: ast.Module = sources.parse(source.python)
        self.scopes: scopes.Scopes = scopes.build(self.tree)
        self.scope: Callable[[ast.AST], NameScope] = self.scopes.scope
        self.statement: Callable[[ast.AST], ast.stmt] = self.scopes.statement
        self.ancestors: Callable[[ast.AST], Iterator[ast.AST]] = self.scopes.ancestors
        self._flow = functools.cache(functools.partial(NameFlow, self.scopes))
        self._look_up_elsewhere = elsewhere
        self._chain_length = 0  # of the aliases that are followed now
        self._meanings: dict[tuple[NameScope, str], Meaning | None] = {}  # by scope that binds it
        self._canonical: dict[str, Meaning] = {}  # by dotted name, such as "compat.pmap"
        self.results: dict[Callable[..., Any], dict[Any, Any]] = {}  # of functions kept by `once`

    def offset(self, line: int, column: int) -> int:
        """Return the offset of `ast`'s line (from 1) and column (bytes, from 0)."""
        return self.source.line_starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """Return the bytes `[start, end)` of a node, without parentheses around it."""
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno, node.end_col_offset)

    def text(self, node: Any) -> str:
        """Return the code of a node, without parentheses around it."""
        start, end = self.span(node)
        return self.source.code[start:end].decode()

    def margins(self, node: Any) -> tuple[str, str]:
        """Return the text before a node on its first line, and after it on its last line."""
        (start, end), code = self.span(node), self.source.code
        first_line, line_end = code.rfind(b"\n", 0, start) + 1, code.find(b"\n", end)
        after = code[end:line_end] if line_end >= 0 else code[end:]
        return code[first_line:start].decode(), after.decode()

    def line_edit(self, node: Any) -> Edit:
        """Return the edit that removes all lines on which a node stands."""
        code = self.source.code
        line_end = code.find(b"\n", self.span(node)[1])
        return Edit(self.offset(node.lineno, 0), line_end + 1 if line_end >= 0 else len(code), "")

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node around; the tree itself for a statement of the module."""
        return self.scopes.parents[node]

    def holds(self, node: Any) -> bool:
        """Return whether a node is of this file; arguments of partials may be of other files."""
        return node is self.tree or node in self.scopes.parents

    def call_of(self, node: ast.AST) -> ast.Call | None:
        """Return the call `node(...)`, where what is called is the node itself."""
        call = self.parent(node)
        return call if isinstance(call, ast.Call) and call.func is node else None

    def function(self, node: ast.AST) -> scopes.Function | None:
        """Return the innermost function around the node; None at the module's level."""
        scope: NameScope | None = self.scope(node)
        while scope is not None and not isinstance(scope.node, scopes.Function):
            scope = scope.parent
        return None if scope is None else scope.node  # type: ignore[return-value]

    @functools.cached_property
    def _by_class(self) -> dict[type, list[Any]]:
        """All nodes but names, by their class."""
        by_class: dict[type, list[Any]] = {}
        for node in self.scopes.nodes:
            by_class.setdefault(node.__class__, []).append(node)
        return by_class

    def nodes(self, *kinds: type[_Node]) -> Iterator[_Node]:
        """Yield all nodes of some classes, in no order; not of ast.Name."""
        for kind in kinds:
            yield from self._by_class.get(kind, ())

    def is_inside(self, node: ast.AST | None, around: ast.AST) -> bool:
        """Return whether a node stands in another, at any depth."""
        return node is not None and any(parent is around for parent in self.ancestors(node))

    def builtin(self, node: ast.expr) -> str | None:
        """Return such as "len" if a name means Python's own; None for anything else."""
        if isinstance(node, ast.Name) and self.scope(node).lookup(node.id) is None:
            return node.id
        return None

    def qualified_name(self, node: ast.expr) -> str | None:
        """Return such as `"jax.pmap"` for that or an alias; None if unknown, or a partial."""
        meaning = self.meaning(node)
        return None if meaning is None or meaning.is_partial else meaning.name

    def meaning(self, node: ast.expr) -> Meaning | None:
        """Return what an expression means, with arguments bound by `partial`; None if unknown."""
        if isinstance(node, ast.Name):
            return self.meaning_of_name(self.scope(node), node.id)
        if isinstance(node, ast.Attribute):
            base = self.meaning(node.value)
            if base is None or base.is_partial:
                return None
            return self.canonical(f"{base.name}.{node.attr}")
        if isinstance(node, ast.Call):
            return self._meaning_of_partial(node)
        return None

    def meaning_of_name(self, scope: NameScope, name: str) -> Meaning | None:
        """Return what a load of `name` in `scope` means; None unless all its bindings agree."""
        scope_and_bindings = scope.lookup(name)
        if scope_and_bindings is None:
            return None
        binding_scope, bindings = scope_and_bindings
        key = (binding_scope, name)
        if key not in self._meanings:
            self._meanings[key] = None  # ends a circle of aliases, `a = b; b = a`
            if self._chain_length < _LONGEST_CHAIN:
                self._chain_length += 1
                self._meanings[key] = self._common_meaning(binding_scope, bindings)
                self._chain_length -= 1
        return self._meanings[key]

    def canonical(self, name: str) -> Meaning:
        """Return the meaning of such as "compat.pmap", followed through the project's files."""
        if name not in self._canonical:
            self._canonical[name] = Meaning(name)  # ends a circle of imports
            is_library = name.partition(".")[0] in KNOWN
            in_project = None if is_library else self._look_up_elsewhere(name)
            self._canonical[name] = in_project or Meaning(name)
        return self._canonical[name]

    def _common_meaning(self, scope: NameScope, bindings: list[Binding]) -> Meaning | None:
        """Return the meaning of a name that `scope` binds; None if its bindings differ.

        `jax = None` does not count: it is in the `except ImportError` of an optional import.
        """
        common: Meaning | None = None
        for binding in bindings:
            meaning = None
            if binding.kind == "import":
                meaning = self.canonical(self.absolute(binding.target))
            elif binding.kind in ("def", "class") and scope.node is self.tree and self.name:
                meaning = Meaning(f"{self.name}.{binding.node.name}")  # type: ignore[attr-defined]
            elif binding.kind == "assign" and binding.value is not None:
                if isinstance(binding.value, ast.Constant) and binding.value.value is None:
                    continue
                meaning = self.meaning(binding.value)
            if meaning is None or common not in (None, meaning):
                return None
            common = meaning
        return common

    def absolute(self, target: str) -> str:
        """Return the absolute name of a relative import: "pkg.utils.f" for "..utils.f" here."""
        is_package = os.path.basename(self.source.path) == "__init__.py"
        package = self.name if is_package else self.name.rpartition(".")[0]
        try:
            return importlib.util.resolve_name(target, package)
        except ImportError:  # it leads above the outermost package that is known
            return target

    def _meaning_of_partial(self, node: ast.Call) -> Meaning | None:
        """Return `Meaning("jax.pmap", (f,))` of `partial(jax.pmap, f)`; None for any other call."""
        if not isinstance(node.func, ast.Name | ast.Attribute) or not node.args:
            return None
        if isinstance(node.args[0], ast.Starred) or self.qualified_name(node.func) not in PARTIAL:
            return None
        inner = self.meaning(node.args[0])
        if inner is None:
            return None
        args = (*inner.args, *node.args[1:])
        keywords = (*inner.keywords, *node.keywords)
        return Meaning(inner.name, args, keywords, is_partial=True)

    def name_for(self, name: str, at: ast.AST) -> tuple[str, tuple[str, ...]]:
        """Return how to write the dotted `name` at a node, and the import statements it needs.

        Below `from jax import lax as L`, that is `("L.psum", ())` for "jax.lax.psum", and
        `("jax.numpy.sum", ("import jax",))` for "jax.numpy.sum".
        """
        scope = self.scope(at)
        parts = name.split(".")
        for length in range(len(parts), 0, -1):  # "jax.lax.psum", "jax.lax", "jax"
            prefix = Meaning(".".join(parts[:length]))
            for alias in self._imported_as.get(prefix.name, ()):
                if self.meaning_of_name(scope, alias) == prefix:  # no parameter hides it here
                    return ".".join((alias, *parts[length:])), ()
        root = parts[0]
        if self.meaning_of_name(scope, root) == Meaning(root):  # imported in a function around
            return name, ()
        if scope.lookup(root) is None:
            return name, (f"import {root}",)
        return f"_{name}", (f"import {root} as _{root}",)  # `jax` means something else here

    @functools.cached_property
    def _imported_as(self) -> dict[str, list[str]]:
        """The names of the imports at module level: `{"jax.numpy": ["jnp"], "jax": ["jax"]}`."""
        names: dict[str, list[str]] = {}
        for name, bindings in self.scopes.module.bindings.items():
            for target in dict.fromkeys(binding.target for binding in bindings if binding.target):
                names.setdefault(target, []).append(name)
        return names

    @functools.cached_property
    def _uses(self) -> dict[str, list[ast.expr]]:
        """Nodes of the longest names, by meaning: `{"jax.lax.psum": [lax.psum]}`, not `lax`."""
        uses: dict[str, list[ast.expr]] = {}
        parents = self.scopes.parents
        names = ((scope, *item) for scope in self.scopes.all for item in scope.loads.items())
        for scope, name, loads in names:
            meaning_of_name = self.meaning_of_name(scope, name)
            if meaning_of_name is None:
                continue
            for load in loads:
                node: Any = load
                meaning = meaning_of_name
                # From `jax` outwards to `jax.lax`, `jax.lax.psum`.
                while not meaning.is_partial and isinstance(parents[node], ast.Attribute):
                    node = parents[node]
                    meaning = self.canonical(f"{meaning.name}.{node.attr}")
                uses.setdefault(meaning.name, []).append(node)
        return uses

    def uses(self, *names: str) -> list[ast.expr]:
        """Return every name or attribute that means one of `names` or a partial of it, in order."""
        nodes = (node for name in names for node in self._uses.get(name, ()))
        return sorted(nodes, key=scopes.place)

    def used_names(self) -> list[str]:
        """Return the meanings of all names that the file uses, such as "jax.lax.psum", sorted."""
        return sorted(self._uses)

    def calls(self, *names: str) -> list[ast.Call]:
        """Return every call of what means one of `names`, in order; not through partials."""
        calls = map(self.call_of, self.uses(*names))
        return [call for call in calls if call is not None and self.qualified_name(call.func)]

    def reads(self, scope: NameScope, name: str) -> list[ast.Name]:
        """Return every load of what `scope` binds to `name`, in order."""
        return self.scopes.loads.get((scope, name), [])

    def reads_of(self, value: ast.AST, name: str) -> Sequence[ast.Name]:
        """Return the loads that may see what an assignment or a def binds to a name, in order."""
        scope, binding = self.scopes.bound.get((value, name), (None, None))
        if scope is None or binding is None or name in scope.outer:
            return ()
        if len(scope.bindings[name]) == 1:
            return self.reads(scope, name)
        return self._flow(scope, name).seen_by.get(binding, ())

    def reaching(self, node: ast.Name) -> list[Binding] | None:
        """Return the bindings that may hold at a read; None if there are none or too many."""
        scope_and_bindings = self.scope(node).lookup(node.id)
        if scope_and_bindings is None:
            return None
        scope, bindings = scope_and_bindings
        return bindings if len(bindings) == 1 else self._flow(scope, node.id).reads.get(node)

    def class_of_self(self, node: ast.Attribute) -> ast.ClassDef | None:
        """Return the class around `self.x`; None for an attribute of anything else."""
        if not isinstance(node.value, ast.Name) or node.value.id != "self":
            return None
        classes = (parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef))
        return next(classes, None)

    @functools.cached_property
    def _self_attributes(self) -> dict[tuple[ast.ClassDef, str, type], list[ast.Attribute]]:
        """Every `self.x` by its class, "x" and context (Load, Store or Del), in order."""
        attributes: dict[tuple[ast.ClassDef, str, type], list[ast.Attribute]] = {}
        for node in sorted(self.nodes(ast.Attribute), key=scopes.place):
            owner = self.class_of_self(node)
            if owner is not None:
                attributes.setdefault((owner, node.attr, node.ctx.__class__), []).append(node)
        return attributes

    def self_attributes(
        self, owner: ast.ClassDef, name: str, context: type[ast.Load] | type[ast.Store]
    ) -> list[ast.Attribute]:
        """Return all reads, or stores, of `self.name` in a class; [] for more than LIMIT stores."""
        attributes = self._self_attributes.get((owner, name, context), [])
        return attributes if len(attributes) <= LIMIT or context is ast.Load else []

    def attribute_values(self, node: ast.Attribute) -> list[ast.expr]:
        """Return each `value` of `self.x = value` in the class; [] if they are more than LIMIT."""
        owner = self.class_of_self(node)
        stores = [] if owner is None else self.self_attributes(owner, node.attr, ast.Store)
        assignments = [self.parent(store) for store in stores]
        plain = [node for node in assignments if isinstance(node, ast.Assign | ast.AnnAssign)]
        return [assignment.value for assignment in plain if assignment.value is not None]

    def values(self, node: ast.expr) -> list[ast.expr] | None:
        """Return the values that a name or `self.x` may have where it is read.

        For `self.x` they are all that its class assigns. None if not all are known, as those of a
        parameter or of the target of a loop are not. None also for any other expression.
        """
        if isinstance(node, ast.Attribute):
            return self.attribute_values(node)
        if not isinstance(node, ast.Name):
            return None
        bindings = self.reaching(node)
        if bindings is None or any(binding.kind != "assign" for binding in bindings):
            return None
        return [binding.value for binding in bindings if binding.value is not None]

    def value(self, node: ast.expr) -> ast.expr | None:
        """Return the only one of `values`; None where there are several, or not all are known."""
        values = self.values(node)
        return values[0] if values and len(values) == 1 else None


def once(function: Callable[[Module, *_Key], _Result]) -> Callable[[Module, *_Key], _Result]:
    """Return `function` with its results cached in the module that is its first argument."""

    @functools.wraps(function)
    def cached(module: Module, *key: *_Key) -> _Result:
        results = module.results.setdefault(function, {})
        if key not in results:
            results[key] = function(module, *key)
        return results[key]

    return cached


# Packages whose source is never read: the rules know their names.
_PACKAGES = """
abc absl chex collections dataclasses distrax equinox flax functools haiku itertools jax jax_dist
jaxlib logging math matplotlib ml_collections numpy optax orbax os pytest random re rlax scipy sys
tensorflow tensorflow_datasets time torch tqdm typing unittest
"""
KNOWN = frozenset(_PACKAGES.split())
