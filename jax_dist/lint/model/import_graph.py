"""Which file of a project imports which, since what is taken away in one may be used by another.

All files of a project are seen, also those that nobody asked to migrate. They are not parsed for
their imports; those that may matter are parsed once, for the names that they read.
"""

import ast
import dataclasses
import functools
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import Patterns, UnreadableError


@dataclasses.dataclass(frozen=True, slots=True)
class Imported:
    """What one file takes from another."""

    by: str  # the path of the file that imports
    names: frozenset[str]  # from m import a, b
    is_star: bool  # from m import *
    is_module: bool  # the module itself, so that its names are attributes
    is_relative: bool


_Import: TypeAlias = tuple[int, str, tuple[str, ...]]  # level, module, names; (): import module

# Also in docstrings, where they do no harm.
_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import\b[ \t]*"
    rb"(\([^)]*\)|(?:[^\n\\#;]|\\\r?\n)*)|import[ \t]+((?:[^\n\\#;]|\\\r?\n)*))",
    re.MULTILINE,
)
_BY_NAME = ("import_module", "resolve_name", "__import__")  # what imports by a name
_SAYS_BY_NAME = re.compile("|".join(_BY_NAME).encode())
_REFLECTING = frozenset(("getattr", "getmembers", "vars", "dir"))  # what gives any attribute
_COMMENT = re.compile(rb"#[^\n]*")

_MOST = 20_000  # files of one project; of a larger one, nothing is taken away


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What else the text of a file says of names."""

    attributes: frozenset[str]  # that are read of anything
    names: frozenset[str]  # that are read
    words: frozenset[str]  # in strings
    reflected: frozenset[str]  # of what attributes are read by a name of the run; "": of `loaded`
    loaded: frozenset[str]  # modules whose names only the run knows: how these begin

    def says(self, name: str) -> bool:
        """Whether it reads an attribute of that name, or may do so by a string."""
        return name in self.attributes or name in self.words


class ImportGraph:
    """The imports of the projects that some files belong to.

    Args:
      paths: of the files; () for a file that is judged alone.
      find: the file of a module, by its dotted name, as a file in some folder would import it.
    """

    def __init__(self, paths: Sequence[str], find: Callable[[str, str], str | None]):
        self._paths = tuple(map(os.path.abspath, paths))
        self._find = find
        self.known: dict[Any, Any] = {}  # what others have found in the projects, by who has
        # Of this graph alone: a cache of the class would keep all graphs, and with them all files.
        self.reached: Callable[[str], frozenset[str]] = functools.cache(self._reached)
        self.other_name: Callable[[str], str] = functools.cache(self._other_name)
        self._code = functools.cache(lambda path: _code(path, self.files.get(path, b"")))
        self._imports_in = functools.cache(lambda path: tuple(_imports(self._code(path))))
        self._facts_of = functools.cache(lambda path: _read(self._code(path)))

    @functools.cached_property
    def roots(self) -> tuple[str, ...]:
        """The folders of the projects; those that nothing shows are left out."""
        return tuple(filter(None, dict.fromkeys(map(_project_root, self._paths))))

    @functools.cached_property
    def _alone(self) -> dict[str, str]:
        """The files that belong to no project, by their modules: a path may lead to any."""
        return {stem_of(path): path for path in self._paths if not _project_root(path)}

    @functools.cached_property
    def near(self) -> list[str]:
        """The folders whose files may use those that belong to no project."""
        return _near([*self._alone.values()])

    @functools.cached_property
    def files(self) -> dict[str, bytes]:
        """What each file holds, by its absolute path, in order."""
        wanted: dict[str, None] = {}
        for root in self.roots:
            found = sources.find_files([root], Patterns(sources.EXCLUDED, root)).files
            wanted.update(dict.fromkeys(map(os.path.abspath, found[: _MOST + 1])))
        for folder in self.near:
            wanted.update(dict.fromkeys(_python_in(folder)))
        wanted.update(dict.fromkeys(self._paths))
        held: dict[str, bytes] = {}
        for path in wanted:
            try:
                with open(path, "rb") as file:
                    held[path] = file.read()
            except OSError:
                continue
        return held

    @property
    def is_whole(self) -> bool:
        """Whether all files of the projects were looked at."""
        return len(self.files) <= _MOST

    def users(self, path: str, name: str) -> Iterator[str]:
        """The other files that may mean `name` of a file: by import, `import *`, or attribute."""
        stem = stem_of(path)
        # In the string of a mock, or of an entry point.
        dotted = re.compile(rb"\b%b[.:]%b\b" % (re.escape(stem.encode()), re.escape(name.encode())))
        for imported in self.importers(path):
            facts = self._facts_of(imported.by) if imported.is_module else None
            is_said = facts is not None and (facts.says(name) or stem in facts.reflected)
            if name in imported.names or imported.is_star or is_said:
                yield imported.by
        own_path = f"{stem}.py".encode()
        for other, data in self.files.items():
            if other == path or stem.encode() not in data:
                continue
            if dotted.search(data):
                yield other
            elif name.encode() in data:
                facts = self._facts_of(other)
                is_run = own_path in data or _SAYS_BY_NAME.search(data) is not None
                if facts is None or (is_run and (facts.says(name) or name in facts.names)):
                    yield other

    def loaders(self, path: str, name: str) -> Iterator[str]:
        """The other files that may mean `name` of a file if this is what only the run knows."""
        found = [facts for by, facts in self._loading if _may_load(by, facts, path)]
        is_any = any("" in facts.reflected for facts in found)
        for other, data in self.files.items() if found else ():
            if other != path and (is_any or name.encode() in data):
                facts = None if is_any else self._facts_of(other)
                if facts is None or facts.says(name):
                    yield other

    @functools.cached_property
    def _loading(self) -> list[tuple[str, _Facts]]:
        """The files that import modules whose names only the run knows."""
        files = (path for path, data in self.files.items() if _SAYS_BY_NAME.search(data))
        read = ((path, self._facts_of(path)) for path in files)
        return [(path, facts) for path, facts in read if facts is not None and facts.loaded]

    def readers(self, path: str, attribute: str) -> Iterator[str]:
        """The other files that read an attribute of that name, and may have objects of a file."""
        near = {imported.by for imported in self.importers(path)}
        near |= {target for by in near for target in self._targets(by)}
        for other in sorted(near - {path}):
            facts = self._facts_of(other)
            if facts is None or facts.says(attribute):
                yield other

    def importers(self, path: str) -> list[Imported]:
        """The other files that import a file."""
        found: list[Imported] = []
        stem = stem_of(path).encode()
        for other, data in self.files.items():
            if other != path and stem in data and b"import" in data:
                imported = self._taken(other, path)
                if imported is not None:
                    found.append(imported)
        return found

    def are_connected(self, one: str, other: str) -> bool:
        """Whether one of two files is the other, or leads to it by imports."""
        return one == other or other in self.reached(one) or one in self.reached(other)

    def _reached(self, path: str) -> frozenset[str]:
        """All files that a file imports, and those that they import."""
        seen: set[str] = set()
        waiting = [path]
        while waiting:
            for target in self._targets(waiting.pop()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return frozenset(seen)

    def imports_of(self, path: str) -> Iterator[tuple[str, str, bool]]:
        """`(module, path, is_relative)` of each import that leads to a file of the project."""
        for level, module, names in self._imports_in(path):
            for name in names or ("",):
                target = self._target(path, level, module, name)
                if target is not None:
                    yield module, target, level > 0

    def package_called(self, root: str, folder: str) -> str:
        """The outermost package around a folder, if its files import it as `root`; else ""."""
        package = outermost_package(folder)
        return package if package and root == self.other_name(package) else ""

    def may_be(self, package: str, root: str, path: str) -> bool:
        """Whether a package may be what a file imports as `root`: it has some of what that takes.

        Else it is an installed one, and the folder is only called like it: `baselines/flax`.
        """
        own = self.files.get(os.path.join(package, "__init__.py"), b"")
        if b"import *" in own or b"__getattr__" in own:  # it has names that its text does not hold
            return True
        taken: set[str] = set()
        for level, module, names in self._imports_in(path):
            first, *rest = module.split(".")
            taken.update((rest[:1] or names) if first == root and not level else ())
        bases = [os.path.join(package, part) for part in taken if part.encode() not in own]
        there = (os.path.isdir(base) or module_file(base) is not None for base in bases)
        return len(bases) < len(taken) or not taken or any(there)

    def _other_name(self, package: str) -> str:
        """The name by which files of a package import it, where its folder has another.

        A checkout may be called anything. Three of its files must be imported so, and nothing that
        is not there. "" where that is not so.
        """
        found: dict[str, set[str]] = {}
        others: set[str] = set()  # other packages, some of whose modules are called alike
        own = self.files.get(os.path.join(package, "__init__.py"), b"")
        for path in self.files:
            imports = self._imports_in(path) if path.startswith(f"{package}{os.sep}") else ()
            for level, module, names in imports:
                root, *rest = module.split(".")
                for parts in [rest] if rest else [[name] for name in names]:
                    target = module_file(os.path.join(package, *parts))
                    if level or (target is None and parts[0].encode() in own):
                        continue
                    if target is None:
                        others.add(root)
                    else:
                        found.setdefault(root, set()).add(target)
        names = [root for root, targets in found.items() if len(targets) >= 3]
        is_known = len(names) == 1 and names[0] not in others
        return names[0] if is_known and names[0] != os.path.basename(package) else ""

    def _targets(self, path: str) -> set[str]:
        return {target for _, target, _ in self.imports_of(path) if target in self.files}

    def _taken(self, by: str, path: str) -> Imported | None:
        names: set[str] = set()
        is_star = is_module = is_relative = False
        for level, module, imported in self._imports_in(by):
            for name in imported or ("",):
                target = self._target(by, level, module, name)
                if target != path:
                    continue
                is_relative = is_relative or level > 0
                home = self._target(by, level, module, "")
                if name == "*":
                    is_star = True
                elif name and home == path:
                    names.add(name)
                else:
                    is_module = True
        if not (names or is_star or is_module):
            return None
        return Imported(by, frozenset(names), is_star, is_module, is_relative)

    def _target(self, by: str, level: int, module: str, name: str) -> str | None:
        """The file behind `from module import name`: the submodule of that name, or the module."""
        folder = os.path.dirname(by)
        is_named = name not in ("", "*")
        if level:
            for _ in range(level - 1):
                folder = os.path.dirname(folder)
            base = os.path.join(folder, *filter(None, module.split(".")))
            return (module_file(os.path.join(base, name)) if is_named else None) or module_file(
                base
            )
        within = self._found(f"{module}.{name}", folder) if is_named else None
        return within or self._found(module, folder)

    def _found(self, module: str, folder: str) -> str | None:
        found = self._find(module, folder) or self._alone.get(module)
        if found is not None:
            return found
        root, *rest = module.split(".")
        package = self.package_called(root, folder) if rest else ""
        return module_file(os.path.join(package, *rest)) if package else None


def module_file(base: str) -> str | None:
    """The file of a module or package, by its path without an ending."""
    for path in (f"{base}.py", os.path.join(base, "__init__.py")):
        if os.path.isfile(path):
            return path
    return None


def stem_of(path: str) -> str:
    """The last word by which a file is imported."""
    folder, name = os.path.split(path)
    stem = os.path.splitext(name)[0]
    return os.path.basename(folder) if stem == "__init__" else stem


def _project_root(path: str) -> str:
    """The folder of the project that a file belongs to; "" where nothing shows it."""
    for folder in sources.folders_above(os.path.dirname(path)):
        if any(os.path.exists(os.path.join(folder, mark)) for mark in sources.PROJECT_MARKS):
            return folder
    package = outermost_package(os.path.dirname(path))
    return os.path.dirname(package) if package else ""


def _near(paths: Sequence[str]) -> list[str]:
    """The folders whose files may use those that belong to no project: `tests/` beside `src/`.

    Their own ones and the current one, and what is right below, but not below what all share.
    """
    here = os.getcwd()
    shared = {os.path.expanduser("~"), tempfile.gettempdir(), os.sep}
    folders = {*map(os.path.dirname, paths)}
    if here not in shared and any(path.startswith(os.path.join(here, "")) for path in paths):
        folders.add(here)
    below = (glob.iglob(os.path.join(glob.escape(each), "*", "")) for each in folders - shared)
    found = (os.path.dirname(each) for folder in below for each in folder)
    folders |= {each for each in found if os.path.basename(each) not in sources.EXCLUDED}
    return sorted(folders)


def _python_in(folder: str) -> Iterator[str]:
    for ending in (".py", ".ipynb"):
        found = glob.iglob(os.path.join(glob.escape(folder), f"*{ending}"))
        yield from sorted(filter(os.path.isfile, found))  # no pipe


def outermost_package(folder: str) -> str:
    """The outermost folder in a row that is a package, from a folder on; "" where none is."""
    found = ""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        found, folder = folder, os.path.dirname(folder)
    return found


def _code(path: str, data: bytes) -> bytes:
    """The Python of a file; none where it cannot be read."""
    try:
        if path.endswith(".ipynb"):
            from jax_dist.lint.model import notebooks  # only here: most projects have none

            return notebooks.read_notebook(path, data).python
        return sources.read(path, data).python
    except UnreadableError:
        return b""


def _imports(code: bytes) -> Iterator[_Import]:
    """Without parsing: a project has many more files than matter."""
    for found in _IMPORT.finditer(code):
        home, names, modules = found.groups()
        text = _COMMENT.sub(b"", names or modules or b"").strip(b"()").replace(b"\\", b" ")
        parts = filter(None, map(bytes.split, text.split(b",")))
        listed = [words[0].decode("utf-8", "replace") for words in parts]
        if home is not None:
            name = home.decode().lstrip(".")
            yield len(home) - len(name.encode()), name, tuple(listed)
        else:
            yield from ((0, each, ()) for each in listed)


def _read(code: bytes) -> _Facts | None:
    """None where Python cannot parse it."""
    try:
        tree = sources.parse(code)
    except sources.ParseError:
        return None
    attributes: set[str] = set()
    names: set[str] = set()
    words: set[str] = set()
    reflected: set[str] = set()
    loaded: set[str] = set()
    imported: dict[str, str] = {}  # by the name that it gets: the last word of a module
    kept: dict[str, str] = {}  # by name: the text of a call whose value it gets
    parts: set[ast.AST] = set()  # of which one attribute is read, or which are called
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                for each in aliases:
                    imported[each.asname or each.name] = each.name.rpartition(".")[2]
            case ast.Call(func=called, args=args):
                by = getattr(called, "id", getattr(called, "attr", ""))
                parts.add(called)
                if by == "getattr" and isinstance([*args, None, None][1], ast.Constant):
                    parts.add(args[0])
                elif by in _REFLECTING and args:
                    reflected.add(ast.unparse(args[0]))
                elif by in _BY_NAME and not all(isinstance(each, ast.Constant) for each in args):
                    loaded.add(_beginning(args[0]))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                kept[name] = ast.unparse(call.func)
            case ast.Attribute(attr=name):
                attributes.add(name)
                parts.add(node.value)
                if name == "__dict__":
                    reflected.add(ast.unparse(node.value))
            case ast.Name(id=name, ctx=ast.Load()):
                names.add(name)
                if name in imported and node not in parts:
                    reflected.add(name)  # the module itself: `Fire(train)`
            case ast.Constant(value=str() as text) if text.isidentifier():
                words.add(text)
    modules = {imported.get(each, each.rpartition(".")[2]) for each in reflected}
    if any(by in kept.get(each, each) for each in reflected for by in _BY_NAME):
        modules.add("")
    return _Facts(*map(frozenset, (attributes, names, words, modules, loaded)))


def _beginning(name: ast.expr) -> str:
    """How a name begins, by its text: that of `f"models.{args.model}"` with `models.`."""
    match name:
        case ast.JoinedStr(values=[first, *_]) | ast.BinOp(left=first):
            name = first
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def _may_load(by: str, facts: _Facts, path: str) -> bool:
    """Whether a module that only the run knows may be a file: one beside what loads, or below."""
    place = os.path.splitext(path)[0].replace(os.sep, ".")
    is_near = path.startswith(os.path.join(os.path.dirname(by), ""))
    return is_near and any(f".{each.strip('.')}" in place for each in facts.loaded)
