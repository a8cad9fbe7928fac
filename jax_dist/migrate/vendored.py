"""The vendored module `_mapped`: its text, and where a file finds its copy.

There is one copy at the top of a package, for all its files, and one beside other scripts.
"""

import ast
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from jax_dist.lint.model import sources
from jax_dist.lint.model.semantic_model import KNOWN, Module
from jax_dist.migrate.places import FileMigration
from jax_dist.migrate.verify.recording.calls import VENDORED

_FILE = f"{VENDORED}.py"


def locate(module: Module) -> tuple[str, str]:
    """Return the path of the vendored module for a file, and the name to import it by.

    Such as `("/src/pkg/_mapped.py", "pkg._mapped")`: it stands at the top of the file's package, or
    beside a script. In a package with relative imports the name is "..._mapped".
    """
    path = os.path.abspath(module.source.path)
    folder = os.path.dirname(path)
    package = _package_by_files(folder)
    if package and any(node.level for node in module.nodes(ast.ImportFrom)):  # relative imports
        depth = folder.removeprefix(package).count(os.sep)  # below the package
        return os.path.join(package, _FILE), "." * (depth + 1) + VENDORED
    # The imports may show an outer folder, where `pkg/tools` has no `__init__.py`.
    package = _package_by_imports(module, folder) or package
    prefix = f"{os.path.basename(package)}." if package else ""
    return os.path.join(package or folder, _FILE), prefix + VENDORED


def new_modules(files: list[FileMigration]) -> Iterator[FileMigration]:
    """Yield the vendored modules that changed files import and that do not exist yet."""
    text = Path(__file__).with_name("_mapped.py").read_bytes()  # always the same
    for path in dict.fromkeys(file.needs_module for file in files if file.changed):
        if path and not os.path.exists(path):
            yield FileMigration(os.path.relpath(path), b"", text, is_new=True)


def _package_by_files(folder: str) -> str:
    """Return the outermost package around the files of a folder: its path, or "" without one."""
    # An identifier: the folder may be a checkout of `my-project`.
    is_package = lambda path: (
        os.path.basename(path).isidentifier() and os.path.isfile(os.path.join(path, "__init__.py"))
    )
    packages = [*itertools.takewhile(is_package, sources.folders_above(folder))]
    return packages[-1] if packages else ""


def _package_by_imports(module: Module, folder: str) -> str:
    """Return `/src/pkg` for a file in `/src/pkg/tools` that imports `pkg.utils`; "" for none."""
    scopes = module.scopes.all
    bindings = (b for scope in scopes for same_name in scope.bindings.values() for b in same_name)
    # Without "", as which a relative import would name the folder /.
    roots = {b.target.partition(".")[0] for b in bindings if b.target} - {*KNOWN, ""}
    return next((x for x in sources.folders_above(folder) if os.path.basename(x) in roots), "")
