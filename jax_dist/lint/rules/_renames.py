"""Uses and imports of names that left jax, and the new names in their place."""

import ast
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jax_dist.lint.model.semantic_model import once
from jax_dist.lint.new_imports import remove_items
from jax_dist.lint.rules import Edit, Findings, Fix, Found, Module, Safety, Version, Words


@dataclasses.dataclass(frozen=True, slots=True)
class Rename:
    """One name that is gone, or going."""

    old: str  # "jax.tree_map"; of a module, all in it that has no entry of its own
    new: str  # "jax.tree.map"; "" where no one name takes its place
    gone: str = ""  # "0.6.0" of jax, or "flax 0.6.0"; "" where it is not known, or only deprecated
    hint: str = ""  # what to do, where that is not to use `new`
    needs: Version = (0,)  # the first jax with the new name
    deprecated: str = ""  # "0.8.0", where it is not gone
    # Returns the edits that a use of the old name needs beside the new name, such as renamed
    # keywords; None if the new name cannot be used there.
    edit_arguments: Callable[[Module, ast.expr], Sequence[Edit] | None] | None = None

    @property
    def imported(self) -> str:
        """The name that an import takes: not `jax.tree.map`, which would hide Python's `map`."""
        home, _, last = self.new.rpartition(".")
        return f"jax.tree_util.tree_{last}" if home == "jax.tree" else self.new

    @property
    def message(self) -> str:
        """Such as "jax.tree_map was removed in jax 0.6.0: use jax.tree.map"."""
        if self.gone:
            state = f"was removed in {'' if ' ' in self.gone else 'jax '}{self.gone}"
        else:
            state = f"is deprecated since jax {self.deprecated}" if self.deprecated else "is gone"
        return f"{self.old} {state}: {self.hint or f'use {self.new}'}"


_NOT_LOADED_WITH_JAX = ("jax.extend.backend", "jax.extend.core", "jax.extend.linear_util")
_NOT_LOADED_WITH_JAX += ("jax.example_libraries.optimizers", "jax.example_libraries.stax")


def mentions(table: Sequence[Rename]) -> Callable[[Words], bool]:
    """Return a rule's trigger: whether a file, by its words, may use a name of the table."""
    names = [entry.old.encode() for entry in table]
    pairs = [(name.rpartition(b".")[2], name) for name in names]
    return lambda words: any(last in words.all and words.may_name(name) for last, name in pairs)


def find_renamed(module: Module, table: Sequence[Rename]) -> Findings:
    """Yield a finding for each import of an old name of the table, and each `jax.old_name`.

    The uses of an imported name are not reported again. Not reported either are code that handles
    the missing name, and a name that the file sets: `jax.tree_map = jax.tree.map`.
    """
    assigned = _assigned_names(module)
    entries = {entry.old: entry for entry in table if entry.old not in assigned}
    yield from _find_imports(module, entries)
    yield from _find_attributes(module, entries)


@once
def _assigned_names(module: Module) -> set[str]:
    """Return the dotted names that the file sets or deletes, such as "jax.tree_map"."""
    stores = (node for node in module.nodes(ast.Attribute) if not isinstance(node.ctx, ast.Load))
    return {f"{module.qualified_name(node.value)}.{node.attr}" for node in stores}


def _entry_for(entries: Mapping[str, Rename], name: str) -> Rename | None:
    """Return the entry of the name itself, or of the nearest module around it."""
    while name and name not in entries:
        name = name.rpartition(".")[0]
    return entries.get(name)


def _find_attributes(module: Module, entries: Mapping[str, Rename]) -> Findings:
    """Yield a finding for each attribute that writes out an old name, a key of `entries`."""
    for name in module.used_names():
        entry = _entry_for(entries, name)
        if entry is None:
            continue
        for node in module.uses(name):
            # The entry may be for a module: of `jax.old.name`, take the node `jax.old`.
            for _ in range(name.count(".") - entry.old.count(".")):
                node = node.value if isinstance(node, ast.Attribute) else node
            # An alias from another file, `compat.tree_map`, does not write out the old name.
            home = module.qualified_name(node.value) if isinstance(node, ast.Attribute) else None
            is_written_out = home == entry.old.rpartition(".")[0]
            if is_written_out and not is_guarded(module, node):
                yield Found(node, entry.message, _attribute_fix(module, entry, node), entry.needs)


def _attribute_fix(module: Module, entry: Rename, node: ast.expr) -> Fix | None:
    """Return the fix that writes `jax.tree.map` for the node `jax.tree_map`; None if it cannot."""
    argument_edits = entry.edit_arguments(module, node) if entry.edit_arguments else ()
    if not entry.new or argument_edits is None or _may_change_isinstance(module, entry, node):
        return None
    text, imports = module.name_for(entry.new, node)
    if text.startswith("_"):  # `_jax.tree.map`, since `jax` means something else in this file
        return None
    if text == entry.new:  # written in full, and so the module must have been imported
        modules = [name for name in _NOT_LOADED_WITH_JAX if f"{text}.".startswith(f"{name}.")]
        imports = (*imports, *(f"import {name}" for name in modules))
    edits = (Edit(*module.span(node), text), *argument_edits)
    return Fix(f"use {entry.new}", Safety.SAFE, edits, imports)


def _may_change_isinstance(module: Module, entry: Rename, node: ast.AST) -> bool:
    """Return whether `jax.Array` in place of `node`, an old array type, may change what code does.

    `isinstance(x, jax.Array)` is true of more than `KeyArray` was; annotations change nothing.
    """
    if entry.new != "jax.Array":
        return False
    child = node
    for around in module.ancestors(node):
        if isinstance(around, ast.arg | ast.AnnAssign | ast.FunctionDef | ast.AsyncFunctionDef):
            annotation = getattr(around, "annotation", getattr(around, "returns", None))
            return child is not annotation  # which holds the node
        child = around
    return True


def _find_imports(module: Module, entries: Mapping[str, Rename]) -> Findings:
    """Yield a finding for each import of an old name, a key of `entries`."""
    for statement in module.nodes(ast.Import, ast.ImportFrom):
        if getattr(statement, "level", 0):
            continue  # `from .utils import x` imports nothing of jax
        prefix = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        matches = {alias: _entry_for(entries, prefix + alias.name) for alias in statement.names}
        old = {alias: entry for alias, entry in matches.items() if entry is not None}
        if not old or is_guarded(module, statement):
            continue
        is_from = isinstance(statement, ast.ImportFrom)
        fixes = _import_fixes(module, statement, old) if is_from else {}
        needs = max(entry.needs for entry in old.values())  # one fix replaces all of them
        for alias, entry in old.items():
            yield Found(alias, entry.message, fixes.get(alias), needs)


def _import_fixes(
    module: Module, statement: ast.ImportFrom, old: Mapping[ast.alias, Rename]
) -> dict[ast.alias, Fix]:
    """Return the fix that imports new names in place of the `old` ones of a `from` import.

    Each alias that it replaces is a key, all with the same fix. A name stays if there is no new
    one, or if the new one cannot be used wherever the file reads the name.
    """
    new_names: dict[ast.alias, str] = {}
    argument_edits: list[Edit] = []  # such as of keywords that have other names
    for alias, entry in old.items():
        reads = module.reads(module.scope(statement), alias.asname or alias.name)
        if not entry.new or any(_may_change_isinstance(module, entry, read) for read in reads):
            continue
        if entry.edit_arguments:
            edits_by_read = [entry.edit_arguments(module, read) for read in reads]
            if not reads or None in edits_by_read:  # not read here: by files that import it
                continue
            argument_edits += [edit for edits in edits_by_read for edit in edits or ()]
        # Of `from jax.old import name`, the entry may be for "jax.old": then ".name" stays.
        name = f"{statement.module}.{alias.name}"
        new_names[alias] = entry.imported + name.removeprefix(entry.old)
    import_edits = _import_edits(module, statement, new_names) if new_names else None
    if import_edits is None:
        return {}
    title = f"import {', '.join(dict.fromkeys(new_names.values()))}"
    return dict.fromkeys(new_names, Fix(title, Safety.SAFE, (*import_edits, *argument_edits)))


def _import_edits(
    module: Module, statement: ast.ImportFrom, new_names: Mapping[ast.alias, str]
) -> list[Edit] | None:
    """Return the edits that import `new_names` under the names that the file uses.

    Those of other modules get lines above it. None if the import does not begin its line.
    """
    indent, _ = module.margins(statement)
    if indent.strip():
        return None  # after a semicolon or a colon
    edits: list[Edit] = []
    moved: dict[str, dict[ast.alias, str]] = {}  # by new module: "name as alias" of each alias
    for alias, name in new_names.items():
        home, _, last = name.rpartition(".")
        bound_name = alias.asname or alias.name
        text = last if last == bound_name else f"{last} as {bound_name}"
        if home == statement.module:
            edits.append(Edit(*module.span(alias), text))
        else:
            moved.setdefault(home, {})[alias] = text
    lines = [
        f"{f'from {home} ' if home else ''}import {', '.join(names.values())}"
        for home, names in moved.items()
    ]
    start, end = module.span(statement)
    leaving = {alias for names in moved.values() for alias in names}
    if len(leaving) == len(statement.names):  # no name stays
        return [Edit(start, end, f"\n{indent}".join(lines))]
    if leaving:
        edits.append(Edit(start, start, "".join(f"{line}\n{indent}" for line in lines)))
        edits += remove_items(module, statement.names, leaving)
    return edits


_HANDLE_MISSING_NAMES = ("ImportError", "ModuleNotFoundError", "AttributeError", "Exception")
_TESTS_FOR_NAMES = ("hasattr(", "version", "TYPE_CHECKING")


def is_guarded(module: Module, node: ast.AST) -> bool:
    """Return whether code around `node` handles the missing name: by `except`, hasattr, version."""
    for around in module.ancestors(node):
        text, words = "", ()
        if isinstance(around, ast.Try):
            types = [handler.type for handler in around.handlers]
            text = " ".join(module.text(kind) if kind else "Exception" for kind in types)
            words = _HANDLE_MISSING_NAMES
        elif isinstance(around, ast.If | ast.IfExp):
            text, words = module.text(around.test), _TESTS_FOR_NAMES
        if any(word in text for word in words):
            return True
    return False
