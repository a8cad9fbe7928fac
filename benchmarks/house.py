"""How large the house is: rooms, files, names, functions, and what one use of it loads.

    python benchmarks/house.py

A room is a sub-package. `one importer` counts modules that exactly one other module imports, rules
and subcommands apart, which are found by name. A function's length counts its lines from `def` on,
docstring included. What a use loads is counted in a process of its own.
"""

import ast
import collections
import dataclasses
import io
import pathlib
import statistics
import subprocess
import sys
import tokenize

_ROOT = pathlib.Path(__file__).parents[1]
_PACKAGE = "jax_dist"
_FOUND_BY_NAME = ("jax_dist.checker.rules.", "jax_dist.commands.")

_PMAP = "import numpy as np, jax_dist; jax_dist.pmap(lambda x: 2 * x)(np.ones((1, 2)))"
_FILE = "import jax\nf = jax.pmap(lambda x: x)\n"
_USES = {
    "import jax_dist": "import jax_dist",
    "a call of pmap": _PMAP,
    "a lint of two lines": (
        "import sys; from jax_dist.commands import cli; cli.main(['lint', '--quiet', sys.argv[1]])"
    ),
    "a migration of two lines": (
        "import sys; from jax_dist.commands import cli; cli.main(['migrate', sys.argv[1]])"
    ),
}


@dataclasses.dataclass(frozen=True)
class File:
    """One module, parsed."""

    name: str  # dotted
    lines: int
    comments: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.rpartition(".")[0]


def files() -> list[File]:
    """All modules of the package, by name; an `__init__.py` counts as `room.__init__`."""
    found = []
    for path in sorted((_ROOT / _PACKAGE).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = sum(token.type == tokenize.COMMENT for token in tokens)
        name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        found.append(File(name, text.count("\n"), comments, ast.parse(text)))
    return found


def importers(modules: list[File]) -> dict[str, set[str]]:
    """By module: who imports it."""
    names = {each.name for each in modules}
    found: dict[str, set[str]] = {name: set() for name in names}
    for each in modules:
        for node in ast.walk(each.tree):
            for target in _imported(node):
                for name in (target, target.rpartition(".")[0]):
                    if name in names:
                        found[name].add(each.name)
                        break
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def lengths(modules: list[File]) -> list[int]:
    """Lines of each function, methods and inner ones too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (node.end_lineno or 0) - node.lineno + 1
        for each in modules
        for node in ast.walk(each.tree)
        if isinstance(node, kinds)
    ]


def classes(modules: list[File]) -> dict[str, list[str]]:
    """By the name of a class without an underscore: the modules that define one."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for each in modules:
        for node in each.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(each.name)
    return found


def public_names(modules: list[File]) -> int:
    """Functions and classes at the top of modules, without an underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tops = [node for each in modules for node in each.tree.body if isinstance(node, kinds)]
    return sum(not node.name.startswith("_") for node in tops)


def loaded(code: str) -> int:
    """How many modules of the package a program has loaded when it ends."""
    count = (
        f"import sys; sys.stderr.write(str(sum(m.startswith({_PACKAGE!r}) for m in sys.modules)))"
    )
    case = _ROOT / "build" / "house_case.py"
    case.parent.mkdir(exist_ok=True)
    case.write_text(_FILE)
    run = subprocess.run(
        (sys.executable, "-c", f"{code}\n{count}", str(case)),
        capture_output=True,
        text=True,
        check=True,
        cwd=_ROOT,
    )
    return int(run.stderr.splitlines()[-1])


def main() -> None:
    modules = files()
    rooms: dict[str, list[File]] = collections.defaultdict(list)
    for each in modules:
        rooms[each.room].append(each)
    for room, members in sorted(rooms.items()):
        print(f"{room:<40}{len(members):5} files{sum(each.lines for each in members):8,} lines")
    alone = [
        name
        for name, who in importers(modules).items()
        if len(who) == 1 and not name.startswith(_FOUND_BY_NAME)
    ]
    each_length = sorted(lengths(modules))
    lines = sum(each.lines for each in modules)
    several = {name: homes for name, homes in classes(modules).items() if len(homes) > 1}
    print(f"\nmodules {len(modules)}, lines {lines:,}, one importer {len(alone)}")
    print(f"public top-level names {public_names(modules)}")
    p90 = each_length[int(len(each_length) * 0.9)]
    print(f"functions {len(each_length):,}, mean {statistics.mean(each_length):.1f}, 90 % {p90}")
    comments = 100 * sum(each.comments for each in modules) / lines
    print(f"comments per 100 lines {comments:.1f}")
    print(f"class names with several meanings {len(several)}: {', '.join(sorted(several))}")
    for use, code in _USES.items():
        print(f"modules loaded by {use}: {loaded(code)}")


if __name__ == "__main__":
    main()
