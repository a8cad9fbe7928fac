"""The helpers of a migration to plain JAX: their text, made of the parts that are needed.

Of `mapped` there are two small forms, of which sections are taken, and the full one; the other
helpers stand beside them:

- vendored/core.py, for slices of the first dimension, in one process
- vendored/axes.py, for axes, static values and several processes
- vendored/mapped.py, which keeps the whole contract of jax.pmap
- vendored/beside.py

Each is a module that runs as it is, with all of its sections. Comments say what belongs to one:
`#: if NAME` and `#: end` stand around lines, `#: NAME` behind one, and `#: not NAME: ...` is a line
of the text without that section.
"""

import ast
import dataclasses
import functools
import hashlib
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import jax_dist

_FOLDER = Path(__file__).with_name("vendored")
LICENCE = "# SPDX-License-Identifier: 0BSD"
_HEADING = re.compile(r"(?m)^# By jax-dist migrate \S+, ([0-9a-f]{12})\. Yours to keep\.$")
_WITHOUT_MAPPED = '"""Functions that JAX no longer has, by public names of JAX 0.8 or newer."""'

# What `mapped` can do beyond its core, in the order of a signature; "full" is all of it, and more.
PARTS = ("axes", "static", "devices", "again", "processes", "full")
ALL_PARTS = (*PARTS, "dims")  # of `per_device`: other dimensions than 0, and None
_IN_AXES = frozenset(("axes", "static", "processes"))  # these need the second form

_FORMS = ("core.py", "axes.py", "mapped.py")
_OTHERS = "beside.py"


@functools.cache
def functions() -> frozenset[str]:
    """The names that a file may ask for."""
    return frozenset(n for each in _statements(("full",)) for n in each.names if n[0] != "_")


def module(needs: Collection[str], unit: str = "    ") -> str:
    """A module that has some of `functions()`, `mapped` with some of `PARTS`.

    Args:
      needs: names of functions and parts.
      unit: one step of indentation.
    """
    docstring = _docstring(needs) if "mapped" in needs else _WITHOUT_MAPPED
    body = f"{docstring}\n\n{_imports(needs)}\n\n\n{_definitions(needs)}\n"
    body = _indented(body, unit)
    return f"{LICENCE}\n{_heading(body)}\n{body}"


def block(needs: Collection[str], unit: str = "    ", bound: Collection[str] = ()) -> str:
    """The same for the inside of a file: statements of its level, with what they import.

    `bound` are names that the file has already, and by the same meaning.
    """
    body = f"{_imports(needs, bound)}\n\n\n{_definitions(needs, bound)}"
    return f"{LICENCE}\n{_heading(body)}\n{_indented(body.strip(), unit)}"


def bound_names(needs: Collection[str]) -> dict[str, str]:
    """What a block binds: by name, what an import means by it, or "" for a definition."""
    bound = {name: "" for each in _needed(needs) for name in each.names}
    for statement in ast.parse(_imports(needs)).body:
        for alias in statement.names:  # type: ignore[attr-defined] # all are imports
            home = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
            bound[alias.asname or alias.name.partition(".")[0]] = f"{home}{alias.name}"
    return bound


def present_in(text: str) -> frozenset[str]:
    """Those of the functions that a text defines at its level, and the parts that `mapped` has."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name in functions():
            found.add(node.name)
            if node.name == "mapped":
                found |= _parts_of(node)
            elif node.name == "per_device" and len(node.args.args) > 1:
                found.add("dims")
    return frozenset(found)


def _parts_of(mapped: ast.FunctionDef) -> frozenset[str]:
    names = {each.arg for each in mapped.args.kwonlyargs}
    inner = {each.name for each in ast.walk(mapped) if isinstance(each, ast.FunctionDef)}
    if "program" not in inner:
        return frozenset(PARTS)  # the full form, in which it is a class
    signs = {
        "axes": "in_axes" in names,
        "static": "static_broadcasted_argnums" in names,
        "devices": "devices" in names,
        "again": bool(mapped.decorator_list),
        "processes": "groups" in inner,
    }
    return frozenset(name for name, there in signs.items() if there)


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


# --- the sources, and their sections

_AROUND = re.compile(r"\s*#: if ([\w &]+)")
_BEHIND = re.compile(r"(.*?)  #: ([\w &]+)")
_WITHOUT = re.compile(r"(\s*)#: ([\w &]+):(?: (.*))?")


def text_of(name: str, parts: Collection[str]) -> str:
    """One of the sources, with some of its sections.

    Args:
      name: of the file.
      parts: names of sections.
    """
    kept: list[str] = []
    is_in = True
    for line in (_FOLDER / name).read_text(encoding="utf-8").splitlines():
        if found := _AROUND.fullmatch(line):
            is_in = _holds(found[1], parts)
        elif line.strip() == "#: end":
            is_in = True
        elif is_in and (found := _WITHOUT.fullmatch(line)):
            kept += [found[1] + (found[3] or "")] if _holds(found[2], parts) else []
        elif is_in and (found := _BEHIND.fullmatch(line)):
            kept += [found[1]] if _holds(found[2], parts) else []
        elif is_in:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _holds(condition: str, parts: Collection[str]) -> bool:
    """`axes & not static`."""
    words = (word.strip() for word in condition.split("&"))
    return all((word.removeprefix("not ") in parts) != word.startswith("not ") for word in words)


def form(needs: Collection[str]) -> str:
    """The name of the file that has the form of `mapped` with these parts."""
    return _FORMS[2 if "full" in needs else 1 if _IN_AXES & set(needs) else 0]


# --- the sources, taken apart


@dataclasses.dataclass(frozen=True, slots=True)
class _Statement:
    """One of a module's level."""

    names: frozenset[str]  # that it binds
    reads: frozenset[str]
    text: str  # with the comments above it
    is_close: bool  # to the statement above: no blank line between


@functools.cache
def _trees(form: str, parts: frozenset[str]) -> tuple[tuple[list[str], ast.Module], ...]:
    """The lines and trees of a form of `mapped`, and of the file that has the other helpers."""
    others = ("dims",) if parts & {"full", "dims"} else ()
    texts = (text_of(form, parts), text_of(_OTHERS, others))
    return tuple((text.splitlines(), ast.parse(text)) for text in texts)


def _trees_for(needs: Collection[str]) -> tuple[tuple[list[str], ast.Module], ...]:
    return _trees(form(needs), frozenset(needs) & frozenset(ALL_PARTS))


def _docstring(needs: Collection[str]) -> str:
    lines, tree = _trees_for(needs)[0]
    return "\n".join(lines[tree.body[0].lineno - 1 : tree.body[0].end_lineno])


def _statements(needs: Collection[str]) -> list[_Statement]:
    """All that a module may hold, each name once."""
    found: list[_Statement] = []
    known: set[str] = set()
    for lines, tree in _trees_for(needs):
        new = [each for each in _of_level(lines, tree) if known.isdisjoint(each.names)]
        known.update(*(each.names for each in new))
        found += new
    return found


def _of_level(lines: list[str], tree: ast.Module) -> Iterable[_Statement]:
    for node in tree.body[1:]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        while lines[first - 2].startswith("#"):
            first -= 1
        stored = {each.id for each in getattr(node, "targets", ()) if isinstance(each, ast.Name)}
        names = stored or {node.name}  # type: ignore[attr-defined] # a function or a class
        reads = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        text = "\n".join(lines[first - 1 : node.end_lineno])
        is_close = bool(lines[first - 2].strip())
        yield _Statement(frozenset(names), frozenset(reads), text, is_close)


def _needed(needs: Collection[str]) -> list[_Statement]:
    """The statements that define these names, and what those use, in order."""
    wanted = set(needs) & functions()
    found: list[_Statement] = []
    everything = _statements(needs)
    while (some := [each for each in everything if each.names & wanted]) != found:
        found = some
        wanted.update(*(each.reads for each in some))
    return found


def _definitions(needs: Collection[str], bound: Collection[str] = ()) -> str:
    text = ""
    for statement in _needed(needs):
        if statement.names <= set(bound):
            continue
        gap = "\n" if statement.is_close and text else "\n\n\n"
        text += f"{gap if text else ''}{statement.text}"
    return text


def _imports(needs: Collection[str], bound: Collection[str] = ()) -> str:
    """The imports that are used, in the order of the sources."""
    reads = {name for statement in _needed(needs) for name in statement.reads}
    lines: dict[str, set[str]] = {}  # by what an import begins with: the names that it takes
    for _, tree in _trees_for(needs):
        for node in tree.body:
            home = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                name = alias.asname or alias.name.partition(".")[0]
                if name in reads and name not in bound:
                    start = f"{home}import " if home else f"import {ast.unparse(alias)}"
                    lines.setdefault(start, set()).add(ast.unparse(alias) if home else "")
    found = [start + ", ".join(sorted(names)) for start, names in lines.items()]
    groups = [
        sorted((line for line in found if ("jax" in line) == is_jax), key=_import_order)
        for is_jax in (False, True)
    ]
    return "\n\n".join("\n".join(group) for group in groups if group)


def _import_order(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line
