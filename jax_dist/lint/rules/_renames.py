"""Uses and imports of names that left jax, and the new names in their place."""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Safety, Version, Words


@dataclasses.dataclass(frozen=True, slots=True)
class Rename:
    """One name that is gone, or going."""

    old: str  # "jax.tree_map"; of a module, all in it that has no entry of its own
    new: str  # "jax.tree.map"; "" where no one name takes its place
    gone: str = ""  # "0.6.0" of jax, or "flax 0.6.0"; "" where it is not known, or only deprecated
    hint: str = ""  # what to do, where that is not to use `new`
    needs: Version = (0,)  # the first jax with the new name
    imported: str = ""  # what `from ... import` takes in its place, where that is not `new`
    safe: Literal["everywhere", "annotation", "with"] = "everywhere"  # elsewhere it is unsafe
    deprecated: str = ""  # "0.8.0", where it is not gone

    @property
    def message(self) -> str:
        if self.gone:
            state = f"was removed in {'' if ' ' in self.gone else 'jax '}{self.gone}"
        else:
            state = f"is deprecated since jax {self.deprecated}" if self.deprecated else "is gone"
        return f"{self.old} {state}: {self.hint or f'use {self.new}'}"


# Of one use of an old name: how far its fix may be trusted, and what else changes there, such as
# the names of arguments. None: the new name cannot take its place.
Adapted: TypeAlias = tuple[Safety, Sequence[Edit]] | None
_Adapt: TypeAlias = Callable[[Module, Rename, ast.expr], Adapted]

_ORDER = (Safety.SAFE, Safety.UNSAFE, Safety.DISPLAY)
# `import jax` does not load these.
_LOADED_APART = (
    "jax.extend.backend",
    "jax.extend.core",
    "jax.extend.linear_util",
    "jax.example_libraries.optimizers",
    "jax.example_libraries.stax",
)


def mentions(table: Sequence[Rename]) -> Callable[[Words], bool]:
    """Return a test of words: whether code may name or import a name of the table."""
    names: dict[bytes, list[bytes]] = {}  # by their last part
    for entry in table:
        name = entry.old.encode()
        names.setdefault(name.rpartition(b".")[2], []).append(name)
    lasts = frozenset(names)  # the intersection of two sets looks at the smaller one only
    return lambda words: any(
        words.may_name(name) for last in lasts & words.all for name in names[last]
    )


def renamed(module: Module, table: Sequence[Rename], adapt: _Adapt | None = None) -> Findings:
    """Yield a finding for each import of a name of the table, and each `a.b.name`.

    A use of an imported name is not reported again. Nor is what is ready for the name to be
    missing, nor a name that the file itself puts there: `jax.tree_map = jax.tree.map`.

    Args:
      module: the file.
      table: the names.
      adapt: tells what a use needs where the new name is not used as the old one.
    """
    assigned = module.once(_assigned)
    entries = {entry.old: entry for entry in table if entry.old not in assigned}
    renames = _Renames(module, entries, adapt)
    yield from renames.in_imports()
    yield from renames.in_attributes()


def _assigned(module: Module) -> set[str]:
    """Return the names of jax that the file itself sets or deletes."""
    stores = (each for each in module.nodes(ast.Attribute) if not isinstance(each.ctx, ast.Load))
    return {f"{module.qualified_name(each.value)}.{each.attr}" for each in stores}


def _by_place(module: Module, entry: Rename, node: ast.expr) -> Adapted:
    """Return what the table says of the place at which a node stands."""
    if entry.safe == "annotation":
        is_safe = _in_annotation(module, node)
    elif entry.safe == "with":
        call = module.call_of(node)
        is_safe = call is not None and isinstance(module.parent(call), ast.withitem)
    else:
        is_safe = True
    return Safety.SAFE if is_safe else Safety.UNSAFE, ()


def _in_annotation(module: Module, node: ast.AST) -> bool:
    below = node
    for around in module.ancestors(node):
        if isinstance(around, ast.arg | ast.AnnAssign):
            return below is around.annotation
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            return below is around.returns
        below = around
    return False


class _Renames:
    """The names of a table in one file."""

    def __init__(self, module: Module, entries: Mapping[str, Rename], adapt: _Adapt | None):
        self._module = module
        self._entries = entries
        self._adapt = adapt or _by_place
        # Other files may import a name from here, and use it as before.
        self._needs_uses = adapt is not None
        self._is_shared = adapt is not None and module.source.path.endswith("__init__.py")
        self._fixes: dict[ast.ImportFrom, dict[ast.alias, tuple[Fix | None, Version]]] = {}

    def in_attributes(self) -> Findings:
        module = self._module
        roots = sorted({old.partition(".")[0] for old in self._entries})
        for name in (each for root in roots for each in module.used_names(root)):
            entry = self._entry_for(name)
            if entry is None:
                continue
            for use in module.uses(name):
                node = use  # and then the part of `jax.old.name.more` that is the old name itself
                for _ in range(name.count(".") - entry.old.count(".")):
                    node = node.value if isinstance(node, ast.Attribute) else node
                if _spells(module, node, entry.old) and not is_guarded(module, node):
                    yield Found(node, entry.message, self._attribute_fix(node, entry), entry.needs)

    def in_imports(self) -> Findings:
        module = self._module
        for scope, name, binding in module.imports():
            alias = binding.node
            statement = module.parent(alias)
            if not isinstance(alias, ast.alias):
                continue
            target = alias.name if isinstance(statement, ast.Import) else binding.target
            entry = self._entry_for(target)
            if entry is None or is_guarded(module, statement):
                continue
            fix, needs = None, entry.needs
            if not entry.new:
                fix = self._without_import(alias, target, module.reads(scope, name))
            elif isinstance(statement, ast.ImportFrom):
                if statement not in self._fixes:
                    self._fixes[statement] = self._fixes_of(statement)
                fix, needs = self._fixes[statement].get(alias, (None, needs))
            elif isinstance(statement, ast.Import) and alias.asname and entry.old == target:
                edit = Edit(*module.span(alias), f"{entry.new} as {alias.asname}")
                fix = Fix(f"import {entry.new}", Safety.SAFE, (edit,))
            yield Found(alias, entry.message, fix, needs)

    def _entry_for(self, name: str) -> Rename | None:
        """Return the entry of the name itself, or of the nearest module around it."""
        while name and name not in self._entries:
            name = name.rpartition(".")[0]
        return self._entries.get(name)

    def _attribute_fix(self, node: ast.expr, entry: Rename) -> Fix | None:
        new = entry.new
        if not new:
            return None
        text, imports = self._module.name_for(new, node)
        adapted = self._adapt(self._module, entry, node)
        if text.startswith("_") or adapted is None:
            return None  # by the plain name the file means something else
        if text == new:
            homes = (home for home in _LOADED_APART if f"{new}.".startswith(f"{home}."))
            imports = (*imports, *(f"import {home}" for home in homes))
        safety, more = adapted
        edits = (Edit(*self._module.span(node), text), *more)
        return Fix(f"use {new}", safety, edits, imports)

    def _without_import(self, alias: ast.alias, target: str, reads: list[ast.Name]) -> Fix | None:
        """Rename all that is read of a module that is gone, and import it no more."""
        fixes: list[Fix] = []
        for read in reads:
            use = self._module.parent(read)
            entry = self._entries.get(f"{target}.{getattr(use, 'attr', '')}")
            fix = self._attribute_fix(use, entry) if entry and isinstance(use, ast.expr) else None
            if fix is None or fix.safety is not Safety.SAFE:
                return None
            fixes.append(fix)
        statement = self._module.parent(alias)
        if not fixes or not isinstance(statement, ast.Import | ast.ImportFrom):
            return None
        edits = [*_removals(self._module, statement, {alias}), *(fix.edits[0] for fix in fixes)]
        imports = tuple(dict.fromkeys(line for fix in fixes for line in fix.imports))
        return Fix("use what took its place", Safety.SAFE, tuple(edits), imports)

    def _fixes_of(self, statement: ast.ImportFrom) -> dict[ast.alias, tuple[Fix | None, Version]]:
        """Return a fix for each name that moves; those that are equally safe move together."""
        module = self._module
        moves: dict[Safety, dict[ast.alias, str]] = {}
        needs: dict[Safety, Version] = {}
        more: dict[Safety, list[Edit]] = {}
        for alias in statement.names:
            target = f"{statement.module}.{alias.name}"
            entry = self._entry_for(target)
            if entry is None or not entry.new or self._is_shared:
                continue
            reads = module.reads(module.scope(statement), alias.asname or alias.name)
            uses = [self._adapt(module, entry, read) for read in reads]
            seen = [use for use in uses if use is not None]
            if len(seen) < len(uses) or (self._needs_uses and not uses):
                continue
            safety = max((use[0] for use in seen), key=_ORDER.index, default=Safety.SAFE)
            new = entry.imported or entry.new + target[len(entry.old) :]
            moves.setdefault(safety, {})[alias] = new
            more.setdefault(safety, []).extend(edit for _, edits in seen for edit in edits)
            needs[safety] = max(entry.needs, needs.get(safety, (0,)))
        fixes: dict[ast.alias, tuple[Fix | None, Version]] = {}
        for safety, moved in moves.items():
            edits = _edits_of_from(module, statement, moved)
            title = f"import {', '.join(dict.fromkeys(moved.values()))}"
            fix = Fix(title, safety, (*edits, *more[safety])) if edits is not None else None
            fixes |= dict.fromkeys(moved, (fix, needs[safety]))
        return fixes


def _spells(module: Module, node: ast.expr, old: str) -> bool:
    """Return whether the node says the old name as an attribute; other files' aliases do not."""
    home = old.rpartition(".")[0]
    return isinstance(node, ast.Attribute) and module.qualified_name(node.value) == home


def _edits_of_from(
    module: Module, statement: ast.ImportFrom, moved: Mapping[ast.alias, str]
) -> list[Edit] | None:
    """Import names from elsewhere, under the names that the file knows them by.

    `moved` has the dotted names that take the places of some. None where a comment would be lost
    or the line holds more.
    """
    indent, _ = module.margins(statement)
    if indent.strip():
        return None  # after a semicolon or a colon
    edits: list[Edit] = []
    by_home: dict[str, dict[ast.alias, str]] = {}
    for alias, name in moved.items():
        home, _, last = name.rpartition(".")
        bound = alias.asname or alias.name
        text = last if last == bound else f"{last} as {bound}"
        if home == statement.module:
            edits.append(Edit(*module.span(alias), text))
        else:
            by_home.setdefault(home, {})[alias] = text
    lines = [
        f"{f'from {home} ' if home else ''}import {', '.join(names.values())}"
        for home, names in by_home.items()
    ]
    start, end = module.span(statement)
    leaving = {alias for names in by_home.values() for alias in names}
    if len(leaving) == len(statement.names):
        edits.append(Edit(start, end, f"\n{indent}".join(lines)))
    elif leaving:
        edits.append(Edit(start, start, "".join(f"{line}\n{indent}" for line in lines)))
        edits += _removals(module, statement, leaving)
    has_comment = any(b"#" in module.source.code[edit.start : edit.end] for edit in edits)
    return None if has_comment else edits


def removal(module: Module, statement: ast.stmt) -> Edit:
    """Take out a statement with its line; `pass` stands for it where its block would be empty."""
    field = module.scopes.fields[statement]
    is_alone = len(getattr(module.parent(statement), field)) == 1
    shares_line = any(map(str.strip, module.margins(statement)))
    if is_alone or shares_line or field != "body":
        return Edit(*module.span(statement), "pass")
    return module.line_edit(statement)


def _removals(
    module: Module, statement: ast.Import | ast.ImportFrom, gone: set[ast.alias]
) -> list[Edit]:
    """Take names out of an import, each with the comma that it no longer needs."""
    spans = [module.span(alias) for alias in statement.names]
    kept = [number for number, alias in enumerate(statement.names) if alias not in gone]
    if not kept:
        return [removal(module, statement)]
    places = sorted(set(range(len(spans))) - set(kept))
    edits = [Edit(spans[each][0], spans[each + 1][0], "") for each in places if each < kept[-1]]
    if kept[-1] < len(spans) - 1:
        edits.append(Edit(spans[kept[-1]][1], spans[-1][1], ""))
    return edits


_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})
_ASKED = ("hasattr(", "version", "TYPE_CHECKING")


def is_guarded(module: Module, node: ast.AST) -> bool:
    """Return whether the code around `node` is ready for the name to be missing.

    It is in a `try` that catches the error, or in its handlers, or in a branch that asks for the
    name or for jax's version.
    """
    for around in module.ancestors(node):
        match around:
            case ast.Try(handlers=handlers) if any(map(_catches, handlers)):
                return True
            case ast.If(test=test) | ast.IfExp(test=test):
                if any(word in module.text(test) for word in _ASKED):
                    return True
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)
