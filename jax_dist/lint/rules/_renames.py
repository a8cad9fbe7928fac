"""Finds the uses and imports of names that left jax, and puts the new names in their place."""

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from jax_dist.lint.model.findings import Edit, Fix, Safety
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.rules import Found, Version


@dataclasses.dataclass(frozen=True, slots=True)
class Rename:
    """One name that is gone, or going."""

    old: str  # "jax.tree_map"; of a module, all in it that has no entry of its own
    new: str  # "jax.tree.map"; "" where no one name takes its place
    gone: str = (
        ""  # "0.6.0" of jax, or "flax 0.6.0"; "" where that is not known, or it is only deprecated
    )
    hint: str = ""  # what to do where `new` is ""
    needs: Version = (0,)  # the first jax with the new name
    imported: str = ""  # what `from ... import` takes in its place, where that is not `new`
    safe: Literal["everywhere", "annotation", "with"] = "everywhere"  # elsewhere it is unsafe
    deprecated: str = ""  # "0.8.0", where it is not gone
    is_module: bool = False  # the new name is that of a module

    @property
    def state(self) -> str:
        """`"was removed in jax 0.6.0"`."""
        if self.gone:
            return f"was removed in {'' if ' ' in self.gone else 'jax '}{self.gone}"
        return f"is deprecated since jax {self.deprecated}" if self.deprecated else "is gone"

    @property
    def message(self) -> str:
        return f"{self.old} {self.state}: {self.hint or f'use {self.new}'}"


# How far the new name may be trusted in the places where the old one is read; None: not at all.
_Judge: TypeAlias = Callable[[Module, Rename, Sequence[ast.expr]], Safety | None]

_MOST_NAMES = 50  # of one import that is fixed; a fix moves all of them
_NEAR = 50  # statements between two imports that are seen together
_ORDER = (Safety.SAFE, Safety.UNSAFE, Safety.DISPLAY)
# `import jax` does not load these.
_LOADED_APART = ("jax.extend", "jax.example_libraries", "jax.experimental")


def _by_place(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety:
    """Return what the table says of the places at which the nodes stand."""
    match entry.safe:
        case "everywhere":
            safe = True
        case "annotation":
            safe = all(_in_annotation(module, node) for node in nodes)
        case "with":
            calls = (module.parent(node) for node in nodes)
            safe = all(
                isinstance(call, ast.Call) and isinstance(module.parent(call), ast.withitem)
                for call in calls
            )
    return Safety.SAFE if safe else Safety.UNSAFE


def _in_annotation(module: Module, node: ast.AST) -> bool:
    below = node
    for around in module.ancestors(node):
        if isinstance(around, ast.arg | ast.AnnAssign):
            return below is around.annotation
        if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            return below is around.returns
        if isinstance(around, ast.stmt):
            return False
        below = around
    return False


def renamed(module: Module, table: Sequence[Rename], judge: _Judge = _by_place) -> Iterator[Found]:
    """Yield a finding for each import of a name of the table, and each `a.b.name`.

    A use of an imported name is not reported again. Nor is what is ready for the name to be
    missing, nor a name that the file itself puts there: `jax.tree_map = jax.tree.map`.

    Args:
      module: the file.
      table: the names.
      judge: says how safe each fix is.
    """
    renames = _Renames(module, table, judge)
    yield from renames.in_imports()
    yield from renames.in_attributes()


def _assigned(module: Module) -> set[str]:
    """Return the names of jax that the file itself sets or deletes."""
    found: set[str] = set()
    for node in module.scopes.nodes:
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                pass
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str() as name), _]
            ):
                pass
            case _:
                continue
        found.add(f"{module.qualified_name(owner)}.{name}")
    return found


class _Renames:
    """The names of a table in one file."""

    def __init__(self, module: Module, table: Sequence[Rename], judge: _Judge):
        self._module = module
        self._judge = judge
        self._moves: dict[ast.ImportFrom, dict[ast.alias, tuple[str, Version, int]]] = {}
        self._fixes: dict[tuple[ast.ImportFrom, int], tuple[Fix | None, Version]] = {}
        assigned = module.once(_assigned)
        self._entries = {entry.old: entry for entry in table if entry.old not in assigned}

    def in_attributes(self) -> Iterator[Found]:
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

    def in_imports(self) -> Iterator[Found]:
        seen: set[int] = set()
        for scope, name, binding in self._module.imports():
            alias = binding.node
            statement = self._module.parent(alias)
            if not isinstance(alias, ast.alias) or id(alias) in seen:
                continue
            seen.add(id(alias))
            target = alias.name if isinstance(statement, ast.Import) else binding.target
            entry = self._entry_for(target)
            if entry is None or is_guarded(self._module, statement):
                continue
            fix, needs = self._import_fix(statement, alias)
            if not entry.new:
                fix = self._without_import(alias, target, self._module.reads(scope, name))
            yield Found(alias, entry.message, fix, needs)

    def _entry_for(self, name: str) -> Rename | None:
        """Return the entry of the name itself, or of the nearest module around it."""
        while name and name not in self._entries:
            name = name.rpartition(".")[0]
        return self._entries.get(name)

    def _moved(self, target: str) -> str:
        """Return where what is imported from `target` is now; "" where that is not one name."""
        entry = self._entry_for(target)
        if entry is None or not entry.new:
            return ""
        if entry.old == target:
            return entry.imported or entry.new
        return entry.new + target[len(entry.old) :]

    def _attribute_fix(self, node: ast.expr, entry: Rename) -> Fix | None:
        module, new = self._module, entry.new
        if not new:
            return None
        text, imports = module.name_for(new, node)
        safety = self._judge(module, entry, [node])
        if text.startswith("_") or safety is None:
            return None  # by the plain name the file means something else
        if new.startswith(_LOADED_APART):  # an import besides that of its first part
            home = new if entry.is_module else new.rpartition(".")[0]
            if not any(
                (isinstance(each, ast.Import) and any(alias.name == home for alias in each.names))
                or (isinstance(each, ast.ImportFrom) and each.module == home)
                for each in module.tree.body
            ):
                imports = (*imports, f"import {home}")
        return Fix(f"use {new}", safety, (Edit(*module.span(node), text),), imports)

    def _without_import(self, alias: ast.alias, target: str, reads: list[ast.Name]) -> Fix | None:
        """Rename all that is read of a module that is gone, and imports it no more."""
        fixes: list[Fix] = []
        for read in reads:
            use = self._module.parent(read)
            fix = None
            if isinstance(use, ast.Attribute) and f"{target}.{use.attr}" in self._entries:
                fix = self._attribute_fix(use, self._entries[f"{target}.{use.attr}"])
            if fix is None or fix.safety is not Safety.SAFE:
                return None
            fixes.append(fix)
        statement = self._module.parent(alias)
        if not fixes or not isinstance(statement, ast.Import | ast.ImportFrom):
            return None
        if len(statement.names) == 1:
            gone = [removal(self._module, statement)]
        else:
            number = statement.names.index(alias)
            kept = [each for each in range(len(statement.names)) if each != number]
            gone = _removals(self._module, statement, kept)
        edits = (*gone, *(edit for fix in fixes for edit in fix.edits))
        imports = tuple(dict.fromkeys(line for fix in fixes for line in fix.imports))
        return Fix("use what took its place", Safety.SAFE, edits, imports)

    def _import_fix(self, statement: ast.AST, alias: ast.alias) -> tuple[Fix | None, Version]:
        """Return one fix for the names of a statement that move as surely as `alias`, or more so.

        None for a name that stays where others move.
        """
        match statement:
            case ast.ImportFrom(level=0):
                return self._from_fix(statement, alias)
            case ast.Import(names=[_]):
                new = self._moved(alias.name)
                if new and alias.asname and alias.name in self._entries:
                    edit = Edit(*self._module.span(alias), f"{new} as {alias.asname}")
                    needs = self._entries[alias.name].needs
                    return Fix(f"import {new}", Safety.SAFE, (edit,)), needs
        return None, (0,)

    def _from_fix(self, statement: ast.ImportFrom, of: ast.alias) -> tuple[Fix | None, Version]:
        if statement not in self._moves:
            self._moves[statement] = self._moves_of(statement)
        moves = self._moves[statement]
        if of not in moves:
            return None, (0,)
        least = moves[of][2]
        if (statement, least) not in self._fixes:
            # What is less sure than `of` stays for now: it shall not keep the others from moving.
            sure = {alias: move for alias, move in moves.items() if move[2] <= least}
            new = {alias: name for alias, (name, _, _) in sure.items()}
            edits = edits_of_from(self._module, statement, new)
            title = f"import {', '.join(dict.fromkeys(new.values()))}"
            fix = None if edits is None else Fix(title, _ORDER[least], edits)
            needs = max(needs for _, needs, _ in sure.values())
            self._fixes[statement, least] = (fix, needs) if fix else (None, (0,))
        return self._fixes[statement, least]

    def _moves_of(self, statement: ast.ImportFrom) -> dict[ast.alias, tuple[str, Version, int]]:
        """Return the new name of each name that moves, what it needs, and how sure it is."""
        found: dict[ast.alias, tuple[str, Version, int]] = {}
        scope = self._module.scope(statement)
        for alias in statement.names if len(statement.names) <= _MOST_NAMES else ():
            target = f"{statement.module}.{alias.name}"
            new, entry = self._moved(target), self._entry_for(target)
            if not new or entry is None:
                continue
            reads = self._module.reads(scope, alias.asname or alias.name)
            judged = self._judge(self._module, entry, reads)
            if judged is not None:
                found[alias] = new, entry.needs, _ORDER.index(judged)
        return found


def _spells(module: Module, node: ast.expr, old: str) -> bool:
    """Return whether the node says the old name as an attribute; other files' aliases do not."""
    home = old.rpartition(".")[0]
    return isinstance(node, ast.Attribute) and module.qualified_name(node.value) == home


def imports_of(module: Module, name: str) -> Iterator[tuple[ast.AST, list[ast.Name]]]:
    """Yield each import of a name that the file is not ready to miss, with what reads it."""
    for scope, bound, binding in module.imports():
        if binding.target == name and not is_guarded(module, binding.node):
            yield binding.node, module.reads(scope, bound)


def spelled(module: Module, name: str) -> Iterator[ast.expr]:
    """Yield each `a.b.name`; a use of an imported name is part of the finding at its import."""
    for use in module.uses(name):
        if _spells(module, use, name) and not is_guarded(module, use):
            yield use


def edits_of_from(
    module: Module, statement: ast.ImportFrom, moved: Mapping[ast.alias, str]
) -> tuple[Edit, ...] | None:
    """Import names from elsewhere, under the names that the file knows them by.

    `moved` has the dotted names that take the places of some. None where a comment would be lost
    or the line holds more.
    """
    start, end = module.span(statement)
    code = module.source.code
    indent, _ = module.margins(statement)
    if indent.strip():
        return None  # after a semicolon or a colon
    by_home: dict[str, list[str]] = {}
    for alias, name in moved.items():
        home, _, last = name.rpartition(".")
        bound = alias.asname or alias.name
        by_home.setdefault(home, []).append(last if last == bound else f"{last} as {bound}")
    made = (
        f"{f'from {home} ' if home else ''}import {', '.join(names)}"
        for home, names in by_home.items()
    )
    new = [each for each in made if not _is_imported_near(module, statement, each)]
    kept = [number for number, alias in enumerate(statement.names) if alias not in moved]
    if not kept:
        if b"#" in code[start:end]:
            return None  # a comment would be lost
        if not new:
            return (removal(module, statement),)
        return (Edit(start, end, f"\n{indent}".join(new)),)
    removed = _removals(module, statement, kept)
    if any(b"#" in code[edit.start : edit.end] for edit in removed):
        return None
    return (Edit(start, start, "".join(f"{each}\n{indent}" for each in new)), *removed)


def _is_imported_near(module: Module, statement: ast.stmt, line: str) -> bool:
    """Return whether a block imports the same above a statement, or right below it."""
    known = module.memo(_is_imported_near)
    block = module.scopes.block_of(statement)
    if id(block) not in known:
        places = {each: number for number, each in enumerate(block)}
        lines: dict[str, list[int]] = {}
        for each, number in places.items():
            if isinstance(each, ast.Import | ast.ImportFrom):
                lines.setdefault(ast.unparse(each), []).append(number)
        known[id(block)] = places, lines
    places, lines = known[id(block)]
    at = places.get(statement, 0)
    below = itertools.takewhile(
        lambda number: isinstance(block[number], ast.Import | ast.ImportFrom),
        range(at + 1, min(at + _NEAR, len(block))),
    )
    end = max(below, default=at)
    return any(number != at and number <= end for number in lines.get(line, ())[:_NEAR])


def removal(module: Module, statement: ast.stmt) -> Edit:
    """Take out a statement with its line; `pass` stands for it where its block would be empty."""
    start, end = module.span(statement)
    if len(module.scopes.block_of(statement)) == 1 or module.scopes.fields[statement] != "body":
        return Edit(start, end, "pass")
    before, behind = module.margins(statement)
    if before.strip() or behind.strip():
        return Edit(start, end, "pass")  # the line holds more
    return module.line_edit(statement)


def _removals(
    module: Module, statement: ast.Import | ast.ImportFrom, kept: Sequence[int]
) -> list[Edit]:
    """Take names out of the list, each with the comma that it no longer needs."""
    spans = [module.span(alias) for alias in statement.names]
    gone = sorted(set(range(len(spans))) - set(kept))
    edits = [Edit(spans[each][0], spans[each + 1][0], "") for each in gone if each < kept[-1]]
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
    below = node
    for around in module.ancestors(node):
        match around:
            case ast.Try(handlers=handlers, finalbody=always):
                if below not in always and any(map(_catches, handlers)):
                    return True
            case ast.If(test=test) | ast.IfExp(test=test):
                if any(word in module.text(test) for word in _ASKED):
                    return True
        below = around
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)
