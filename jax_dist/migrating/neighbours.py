"""What other files of a project say of a file's names, as far as words tell."""

import ast
import functools
import os
import re
from collections.abc import Iterator

from jax_dist.checker.modules import Module

_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_MOST = 5000  # files of one project that are looked at


def is_said(module: Module, name: str) -> bool:
    """Whether another file of the project names this file, and `name` too."""
    return any(
        name.encode() in words and not _has_its_own(path, name)
        for path, words in module.once(_importers)
    )


def uses_result(module: Module, name: str) -> str:
    """The file that calls `name` and does something with what it returns; "" where none does."""
    for path, words in module.once(_importers):
        if name.encode() in words and any(_uses(path, name)):
            return os.path.basename(path)
    return ""


def _uses(path: str, name: str) -> Iterator[bool]:
    tree = _parsed(path)
    if tree is None:
        yield True
        return
    statements = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in statements:
            called = node.func
            yield (isinstance(called, ast.Name) and called.id == name) or (
                isinstance(called, ast.Attribute) and called.attr == name
            )


@functools.lru_cache(maxsize=1024)
def _has_its_own(path: str, name: str) -> bool:
    """Whether a file means a function of its own wherever it says the name."""
    tree = _parsed(path)
    if tree is None:
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=said) | ast.Constant(value=str(said)):
                pass
            case ast.alias(name=imported, asname=renamed):
                said = renamed if imported != name else imported
            case _:
                continue
        if said == name:
            return False
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in tree.body)


def _parsed(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return None


def _importers(module: Module) -> tuple[tuple[str, frozenset[bytes]], ...]:
    """The other files that say this file's name."""
    path = os.path.abspath(module.source.path)
    stem = os.path.splitext(os.path.basename(path))[0].encode()
    files = _words(_root(os.path.dirname(path)))
    return tuple((each, words) for each, words in files if each != path and stem in words)


def _root(folder: str) -> str:
    """The outermost folder in a row that is a package; the folder itself where it is none."""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        parent = os.path.dirname(folder)
        if parent == folder or not os.path.isfile(os.path.join(parent, "__init__.py")):
            break
        folder = parent
    return folder


@functools.lru_cache(maxsize=2)  # the files of one project are asked about one another
def _words(root: str) -> tuple[tuple[str, frozenset[bytes]], ...]:
    found: list[tuple[str, frozenset[bytes]]] = []
    for path in _files(root):
        try:
            with open(path, "rb") as file:
                found.append((path, frozenset(_WORD.findall(file.read()))))
        except OSError:
            continue
    return tuple(found)


def _files(root: str) -> Iterator[str]:
    is_package = os.path.isfile(os.path.join(root, "__init__.py"))
    count = 0
    for folder, folders, names in os.walk(root):
        folders[:] = (
            sorted(each for each in folders if not each.startswith(".")) if is_package else []
        )
        for name in sorted(names):
            if name.endswith(".py") and count < _MOST:
                count += 1
                yield os.path.join(folder, name)
