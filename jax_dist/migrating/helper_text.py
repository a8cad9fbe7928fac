"""The text of the helper module that a migration to plain JAX writes, or of a part of it.

All of it is cut from one file, `vendored/mapped.py`: the functions that are asked for, and what
these use.
"""

import ast
import dataclasses
import functools
import hashlib
import re
from collections.abc import Collection
from pathlib import Path

import jax_dist

_SOURCE = Path(__file__).with_name("vendored") / "mapped.py"
LICENCE = "# SPDX-License-Identifier: 0BSD"
_HEADING = re.compile(r"(?m)^# By jax-dist migrate \S+, ([0-9a-f]{12})\. Yours to keep\.$")
_WITHOUT_MAPPED = '"""Functions that JAX no longer has, by public names of JAX 0.8 or newer."""'


def functions() -> frozenset[str]:
    """The names that a file may ask for."""
    return frozenset(name for part in _parts() for name in part.names if not name.startswith("_"))


def module(names: Collection[str], unit: str = "    ") -> str:
    """A module that has these functions.

    Args:
      names: some of `functions()`.
      unit: one step of indentation.
    """
    docstring = _docstring() if "mapped" in names else _WITHOUT_MAPPED
    body = f"{docstring}\n\n{_imports(names)}\n\n\n{_definitions(names)}\n"
    body = _indented(body, unit)
    return f"{LICENCE}\n{_heading(body)}\n{body}"


def block(names: Collection[str], unit: str = "    ", bound: Collection[str] = ()) -> str:
    """The same for the inside of a file: statements of its level, with what they import.

    Args:
      names: some of `functions()`.
      unit: one step of indentation.
      bound: names that the file has already, and by the same meaning.
    """
    body = f"{_imports(names, bound)}\n\n\n{_definitions(names, bound)}"
    return f"{LICENCE}\n{_heading(body)}\n{_indented(body.strip(), unit)}"


def bound_names(names: Collection[str]) -> dict[str, str]:
    """What a block binds: by name, what an import means by it, or "" for a definition."""
    bound = {name: "" for part in _needed(names) for name in part.names}
    for statement in ast.parse(_imports(names)).body:
        for alias in statement.names:  # type: ignore[attr-defined] # all are imports
            home = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            bound[alias.asname or alias.name.partition(".")[0]] = f"{home}{alias.name}"
    return bound


def present_in(text: str) -> frozenset[str]:
    """Those of the functions that a text defines at its level."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    found = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return functions() & found


def is_ours(text: str) -> bool:
    """Whether a migration has written a text; it may have been changed since."""
    return _HEADING.search(text) is not None


def is_unchanged(text: str) -> bool:
    """Whether nobody has changed it since, other than by a formatter."""
    found = _HEADING.search(text)
    return found is not None and found[1] == _digest(text[found.end() :])


def _heading(body: str) -> str:
    return f"# By jax-dist migrate {jax_dist.__version__}, {_digest(body)}. Yours to keep."


def _digest(text: str) -> str:
    """The same whatever a formatter makes of lines, quotes, commas and parentheses."""
    plain = re.sub(r"[\s'\"(),\\]", "", text)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def _indented(text: str, unit: str) -> str:
    """The text with another step of indentation; what hangs within a docstring hangs as far."""
    lines = text.splitlines()
    base = dict.fromkeys(range(len(lines)), 0)  # by line: spaces that a docstring begins with
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            base |= dict.fromkeys(range(node.lineno, node.end_lineno or 0), node.col_offset)
    for number, line in enumerate(lines):
        spaces = len(line) - len(line.lstrip(" "))
        steps = (base[number] or spaces) // 4
        lines[number] = unit * steps + line[4 * steps :] if spaces >= 4 * steps else line
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


# --- the source, taken apart


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One statement of the module's level."""

    names: frozenset[str]  # that it binds
    reads: frozenset[str]
    text: str  # with the comments above it
    is_close: bool  # to the part above: no blank line between


@functools.cache
def _tree() -> tuple[list[str], ast.Module]:
    text = _SOURCE.read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text)


@functools.cache
def _parts() -> tuple[_Part, ...]:
    lines, tree = _tree()
    return tuple(
        _part(lines, node)
        for node in tree.body[1:]
        if not isinstance(node, ast.Import | ast.ImportFrom)
    )


def _part(lines: list[str], node: ast.stmt) -> _Part:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    while lines[first - 2].startswith("#"):
        first -= 1
    nodes = list(ast.walk(node))
    stored = {each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)}
    reads = {each.id for each in nodes if isinstance(each, ast.Name)}
    text = "\n".join(lines[first - 1 : node.end_lineno])
    names = stored or {node.name}  # type: ignore[attr-defined] # a function or a class
    return _Part(frozenset(names), frozenset(reads), text, bool(lines[first - 2].strip()))


def _docstring() -> str:
    lines, tree = _tree()
    return "\n".join(lines[tree.body[0].lineno - 1 : tree.body[0].end_lineno])


def _needed(names: Collection[str]) -> list[_Part]:
    """The parts that define these names, and what those use, in order."""
    wanted = set(names)
    size = 0
    while size != len(wanted):
        size = len(wanted)
        for part in _parts():
            if part.names & wanted:
                wanted |= part.reads
    return [part for part in _parts() if part.names & wanted]


def _definitions(names: Collection[str], bound: Collection[str] = ()) -> str:
    text = ""
    for part in _needed(names):
        if part.names <= set(bound):
            continue
        gap = "\n" if part.is_close and text else "\n\n\n"
        text += f"{gap if text else ''}{part.text}"
    return text


def _imports(names: Collection[str], bound: Collection[str] = ()) -> str:
    """The imports that are used, in the order of the source."""
    reads = {name for part in _needed(names) for name in part.reads}
    kept: list[tuple[int, str]] = []
    _, tree = _tree()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            used = [each for each in node.names if each.name in reads and each.name not in bound]
            if used:
                names_ = ", ".join(map(ast.unparse, used))
                home = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                line = f"{home}import {names_}"
                kept.append(("jax" in line, line))
    groups = [[line for is_jax, line in kept if is_jax == group] for group in (False, True)]
    return "\n\n".join("\n".join(group) for group in groups if group)
