"""The vendored module `_mapped`: its text, and where a file finds its copy.

There is one copy at the top of a package, for all its files, and one beside other scripts.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from jax_dist._usage import MisuseError
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate.places import FileMigration
from jax_dist.migrate.verify.recording.calls import VENDORED


def home_of(module: Module) -> tuple[str, str]:
    """Return the path of the copy for a file, and its name there: "_mapped", ".._mapped", ..."""
    path = os.path.abspath(module.source.path)
    folder = os.path.dirname(path)
    top = _package_by_files(folder)
    if path.endswith(".ipynb"):
        return _home_in(folder, "")
    if top and any(node.level for node in module.nodes(ast.ImportFrom)):
        depth = os.path.relpath(folder, top)
        return _home_in(top, "." * (1 if depth == os.curdir else 2 + depth.count(os.sep)))
    package = _package_by_imports(module, folder) or top
    return _home_in(package, f"{os.path.basename(package)}.") if package else _home_in(folder, "")


def new_modules(files: list[FileMigration]) -> Iterator[FileMigration]:
    """Yield the missing copies; raise MisuseError if another file has the name of one."""
    text = Path(__file__).with_name("_mapped.py").read_bytes()  # always the same
    for path in dict.fromkeys(file.needs_module for file in files if file.changed):
        if path and not os.path.exists(path):
            yield FileMigration(os.path.relpath(path), b"", text, is_new=True)
        elif path and b"def mapped(" not in Path(path).read_bytes():
            raise MisuseError(
                f"{os.path.relpath(path)} is a file of the project, and the vendored module needs "
                "that name. Rename it, or use --to jax_dist."
            )


def _package_by_files(folder: str) -> str:
    """Return the outermost folder, from `folder` up, of a package; "" if there is none.

    A folder that cannot be imported by its name, as a checkout of `my-project`, is none.
    """
    top = ""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        if not os.path.basename(folder).isidentifier():
            break
        top, folder = folder, os.path.dirname(folder)
    return top


def _package_by_imports(module: Module, folder: str) -> str:
    """Return the folder around a file that is named as a package it imports; "" if none is."""
    of_names = (bindings for scope in module.scopes.all for bindings in scope.bindings.values())
    targets = [binding.target for bindings in of_names for binding in bindings if binding.target]
    roots = {target.partition(".")[0] for target in targets} - KNOWN
    while (parent := os.path.dirname(folder)) != folder:
        if os.path.basename(folder) in roots:
            return folder
        folder = parent
    return ""


def _home_in(folder: str, prefix: str) -> tuple[str, str]:
    """Return the home in a folder; `prefix` precedes its name in imports: "", "pkg." or dots."""
    return (os.path.join(folder, f"{VENDORED}.py"), f"{prefix}{VENDORED}")
