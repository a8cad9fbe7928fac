"""Finds the uses and imports of names that left jax, and puts the new names in their place."""

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

from jax_dist.checker.model import scopes
from jax_dist.checker.model.findings import Edit, Fix, Safety, removal
from jax_dist.checker.model.semantic_model import Module
from jax_dist.checker.rules import Found, Version


@dataclasses.dataclass(frozen=True, slots=True)
class Rename:
    """One name that is gone, or going."""

    old: str  # "jax.tree_map"; of a module, all in it that has no entry of its own
    new: str  # "jax.tree.map"; "" where no one name takes its place
    gone: str = ""  # "0.6.0"; "" where that is not known, or it is only deprecated
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
            return f"was removed in jax {self.gone}"
        return f"is deprecated since jax {self.deprecated}" if self.deprecated else "is gone"

    @property
    def message(self) -> str:
        return f"{self.old} {self.state}: {self.hint or f'use {self.new}'}"


# How far the new name may be trusted in the places where the old one is read; None: not at all.
Judge: TypeAlias = Callable[[Module, Rename, Sequence[ast.expr]], Safety | None]

_ORDER = (Safety.SAFE, Safety.UNSAFE, Safety.DISPLAY)
# `import jax` does not load these.
_LOADED_APART = ("jax.extend", "jax.example_libraries", "jax.experimental")


def by_place(module: Module, entry: Rename, nodes: Sequence[ast.expr]) -> Safety:
    """What the table says of the places at which the nodes stand."""
    match entry.safe:
        case "everywhere":
            safe = True
        case "annotation":
            safe = all(_in_annotation(module, node) for node in nodes)
        case "with":
            safe = all(_in_with(module, node) for node in nodes)
    return Safety.SAFE if safe else Safety.UNSAFE


def renamed(module: Module, table: Sequence[Rename], judge: Judge = by_place) -> Iterator[Found]:
    """A finding for each import of a name of the table, and for each `a.b.name` that means it.

    A use of an imported name is not reported again. Nor is what is ready for the name to be
    missing, nor a name that the file itself puts there: `jax.tree_map = jax.tree.map`.

    Args:
      module: the file.
      table: the names.
      judge: says how safe each fix is.
    """
    entries = {entry.old: entry for entry in table if not _is_put_there(module, entry.old)}
    yield from _imports(module, entries, judge)
    for name in module.used_names("jax"):
        entry = entry_for(name, entries)
        if entry is None:
            continue
        for use in module.uses(name):
            node = _exact(use, name.count(".") - entry.old.count("."))
            if spells(module, node, entry.old) and not is_guarded(module, node):
                fix = _attribute_fix(module, node, entry, judge)
                yield Found(node, entry.message, fix, entry.needs)


def _is_put_there(module: Module, name: str) -> bool:
    """Whether the file assigns a name of jax, so that the name is there on any version."""
    home, _, last = name.rpartition(".")
    return last in module.once(_assigned).get(home, ())


def _assigned(module: Module) -> dict[str, set[str]]:
    """By what is changed, such as "jax": the attributes that the file sets."""
    found: dict[str, set[str]] = {}
    for node in module.scopes.nodes:
        match node:
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
                pass
            case ast.Call(
                func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=str() as name), _]
            ):
                pass
            case _:
                continue
        home = module.qualified_name(owner)
        if home is not None:
            found.setdefault(home, set()).add(name)
    return found


def entry_for(name: str, entries: dict[str, Rename]) -> Rename | None:
    """The entry of the name itself, or of the nearest module around it."""
    while name not in entries:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return entries[name]


def _exact(node: ast.expr, longer: int) -> ast.expr:
    """The part of `jax.old.name.more` that is the old name itself."""
    for _ in range(longer):
        if not isinstance(node, ast.Attribute):
            break
        node = node.value
    return node


def spells(module: Module, node: ast.expr, old: str) -> bool:
    """Whether the node says the old name as an attribute; other files' aliases do not."""
    return (
        isinstance(node, ast.Attribute)
        and module.qualified_name(node.value) == old.rpartition(".")[0]
    )


def _attribute_fix(module: Module, node: ast.expr, entry: Rename, judge: Judge) -> Fix | None:
    if not entry.new:
        return None
    text, imports = module.name_for(entry.new, node)
    safety = judge(module, entry, [node])
    if text.startswith("_") or safety is None:  # the file means something else by the plain name
        return None
    edit = Edit(*module.span(node), text)
    return Fix(f"use {entry.new}", safety, (edit,), (*imports, *_loads(module, entry)))


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


def _in_with(module: Module, node: ast.AST) -> bool:
    call = module.parent(node)
    return isinstance(call, ast.Call) and isinstance(module.parent(call), ast.withitem)


def _loads(module: Module, entry: Rename) -> tuple[str, ...]:
    """The import that the new name needs besides that of its first part."""
    if not entry.new.startswith(_LOADED_APART):
        return ()
    home = entry.new if entry.is_module else entry.new.rpartition(".")[0]
    for node in module.tree.body:
        if isinstance(node, ast.Import) and any(alias.name == home for alias in node.names):
            return ()
        if isinstance(node, ast.ImportFrom) and node.module == home:
            return ()
    return (f"import {home}",)


def imports_of(module: Module, name: str) -> Iterator[tuple[ast.AST, list[ast.Name]]]:
    """Each import of a name that the file is not ready to miss, with what reads it."""
    for scope, bound, binding in module.imports():
        if binding.target == name and not is_guarded(module, binding.node):
            yield binding.node, module.reads(scope, bound)


def spelled(module: Module, name: str) -> Iterator[ast.expr]:
    """Each `a.b.name`; a use of an imported name is part of the finding at its import."""
    for use in module.uses(name):
        if spells(module, use, name) and not is_guarded(module, use):
            yield use


# --- imports


def _imports(module: Module, entries: dict[str, Rename], judge: Judge) -> Iterator[Found]:
    seen: set[int] = set()
    for scope, name, binding in module.imports():
        alias = binding.node
        statement = module.parent(alias)
        if not isinstance(alias, ast.alias) or id(alias) in seen:
            continue
        seen.add(id(alias))
        target = alias.name if isinstance(statement, ast.Import) else binding.target
        entry = entry_for(target, entries)
        if entry is None or is_guarded(module, statement):
            continue
        fix, needs = _import_fix(module, statement, alias, entries, judge)
        if not entry.new:
            reads = module.reads(scope, name)
            fix = _without_import(module, alias, target, reads, entries, judge)
        yield Found(alias, entry.message, fix, needs)


def _without_import(
    module: Module,
    alias: ast.alias,
    target: str,
    reads: list[ast.Name],
    entries: dict[str, Rename],
    judge: Judge,
) -> Fix | None:
    """Renames all that is read of a module that is gone, and imports it no more."""
    fixes: list[Fix] = []
    for read in reads:
        use = module.parent(read)
        entry = entries.get(f"{target}.{use.attr}") if isinstance(use, ast.Attribute) else None
        fix = _attribute_fix(module, use, entry, judge) if entry is not None else None  # type: ignore[arg-type]
        if fix is None or fix.safety is not Safety.SAFE:
            return None
        fixes.append(fix)
    statement = module.parent(alias)
    if not fixes or not isinstance(statement, ast.Import | ast.ImportFrom):
        return None
    if len(statement.names) == 1:
        gone = [removal(module, statement)]
    else:
        number = statement.names.index(alias)
        kept = [each for each in range(len(statement.names)) if each != number]
        gone = _removals(module, statement, kept, {number: ""})
    edits = (*gone, *(edit for fix in fixes for edit in fix.edits))
    imports = tuple(dict.fromkeys(line for fix in fixes for line in fix.imports))
    return Fix("use what took its place", Safety.SAFE, edits, imports)


def _import_fix(
    module: Module,
    statement: ast.AST,
    alias: ast.alias,
    entries: dict[str, Rename],
    judge: Judge,
) -> tuple[Fix | None, Version]:
    """One fix for the names of a statement that move as surely as `alias`, or more so.

    None for a name that stays where others move.
    """
    if isinstance(statement, ast.ImportFrom) and statement.level == 0:
        return _from_fix(module, statement, alias, entries, judge)
    if isinstance(statement, ast.Import) and len(statement.names) == 1:
        new = _moved(alias.name, entries)
        if new and alias.asname and alias.name in entries:
            edit = Edit(*module.span(alias), f"{new} as {alias.asname}")
            return Fix(f"import {new}", Safety.SAFE, (edit,)), entries[alias.name].needs
    return None, (0,)


def _moved(target: str, entries: dict[str, Rename]) -> str:
    """Where what is imported from `target` is now; "" where that is not one name."""
    entry = entry_for(target, entries)
    if entry is None or not entry.new:
        return ""
    if entry.old == target:
        return entry.imported or entry.new
    return entry.new + target[len(entry.old) :]


def _from_fix(
    module: Module,
    statement: ast.ImportFrom,
    of: ast.alias,
    entries: dict[str, Rename],
    judge: Judge,
) -> tuple[Fix | None, Version]:
    found: dict[int, tuple[str, Version, int]] = {}  # by number: the new name, needs, safety
    scope = module.scope(statement)
    for number, alias in enumerate(statement.names):
        target = f"{statement.module}.{alias.name}"
        new = _moved(target, entries)
        entry = entry_for(target, entries)
        if not new or entry is None:
            continue
        judged = judge(module, entry, module.reads(scope, alias.asname or alias.name))
        if judged is not None:
            found[number] = new, entry.needs, _ORDER.index(judged)
    _, _, least = found.get(statement.names.index(of), ("", (0,), -1))
    # What is less sure than `of` stays for now, so that it does not keep the others from moving.
    found = {number: each for number, each in found.items() if each[2] <= least}
    moved = {number: new for number, (new, _, _) in found.items()}
    edits = edits_of_from(module, statement, moved) if moved else None
    if edits is None:
        return None, (0,)
    title = f"import {', '.join(dict.fromkeys(moved.values()))}"
    needs = max(needs for _, needs, _ in found.values())
    return Fix(title, _ORDER[least], edits), needs


def edits_of_from(
    module: Module, statement: ast.ImportFrom, moved: dict[int, str]
) -> tuple[Edit, ...] | None:
    """Imports names from elsewhere, under the names that the file knows them by.

    Args:
      module: the file.
      statement: what imports them now.
      moved: which of its names, by number, and the dotted names that take their places.

    Returns:
      The edits, or None where a comment would be lost or the line holds more.
    """
    start, end = module.span(statement)
    code = module.source.code
    new = [each for each in _statements(statement, moved) if not _has(module, statement, each)]
    kept = [number for number in range(len(statement.names)) if number not in moved]
    line = code.rfind(b"\n", 0, start) + 1
    indent = code[line:start].decode()
    if indent.strip():
        return None  # after a semicolon or a colon
    if not kept:
        if b"#" in code[start:end]:
            return None  # a comment would be lost
        if not new:
            return (removal(module, statement),)
        return (Edit(start, end, f"\n{indent}".join(new)),)
    removed = _removals(module, statement, kept, moved)
    if any(b"#" in code[edit.start : edit.end] for edit in removed):
        return None
    return (Edit(start, start, "".join(f"{each}\n{indent}" for each in new)), *removed)


def _has(module: Module, statement: ast.stmt, line: str) -> bool:
    """Whether another import beside a statement is that line: above it, or right below."""
    block = scopes.block_of(module, statement) or []
    imports = (ast.Import, ast.ImportFrom)
    place = next((n for n, each in enumerate(block) if each is statement), 0)
    below = itertools.takewhile(lambda each: isinstance(each, imports), block[place + 1 :])
    near = [each for each in (*block[:place], *below) if isinstance(each, imports)]
    return line in map(ast.unparse, near)


def _statements(statement: ast.ImportFrom, moved: dict[int, str]) -> list[str]:
    by_home: dict[str, list[str]] = {}
    for number, new in moved.items():
        alias = statement.names[number]
        home, _, last = new.rpartition(".")
        bound = alias.asname or alias.name
        by_home.setdefault(home, []).append(last if last == bound else f"{last} as {bound}")
    return [
        f"from {home} import {', '.join(names)}" if home else f"import {', '.join(names)}"
        for home, names in by_home.items()
    ]


def _removals(
    module: Module, statement: ast.Import | ast.ImportFrom, kept: list[int], moved: dict[int, str]
) -> list[Edit]:
    """Takes names out of the list, each with the comma that it no longer needs."""
    spans = [module.span(alias) for alias in statement.names]
    edits = [Edit(spans[each][0], spans[each + 1][0], "") for each in moved if each < kept[-1]]
    if kept[-1] < len(spans) - 1:
        edits.append(Edit(spans[kept[-1]][1], spans[-1][1], ""))
    return edits


_CAUGHT = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"})
_ASKED = ("hasattr(", "version", "TYPE_CHECKING")


def is_guarded(module: Module, node: ast.AST) -> bool:
    """Whether the code around `node` is ready for the name to be missing.

    It is in a `try` that catches the error, or in its handlers, or in a branch that asks for the
    name or for jax's version.
    """
    below = node
    for around in module.ancestors(node):
        if isinstance(around, ast.Try) and any(_catches(each) for each in around.handlers):
            if below not in around.finalbody:
                return True
        elif isinstance(around, ast.If | ast.IfExp) and _asks(module, around.test):
            return True
        below = around
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in _CAUGHT for kind in kinds)


def _asks(module: Module, test: ast.expr) -> bool:
    text = module.text(test)
    return any(word in text for word in _ASKED)
