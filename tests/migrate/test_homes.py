"""Where the vendored module lies, and which imports stay."""

import pathlib

import pytest

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions

_USE = "\nf = jax.pmap(abs)\n"
_HOMES = {
    "a script": ({"a.py": f"import jax\n{_USE}"}, "_mapped.py", "from _mapped import mapped"),
    "relative imports": (
        {"pkg/__init__.py": "", "pkg/sub/__init__.py": "", "pkg/b.py": "",
         "pkg/sub/a.py": f"import jax\nfrom .. import b\n{_USE}b.x\n"},
        "pkg/_mapped.py",
        "from .._mapped import mapped",
    ),
    "its own package by name": (
        {"pkg/__init__.py": "", "pkg/b.py": "", "pkg/a.py": f"import jax\nimport pkg.b\n{_USE}"},
        "pkg/_mapped.py",
        "from pkg._mapped import mapped",
    ),
    "a package without files that say so": (
        {"pkg/b.py": "", "pkg/a.py": f"import jax\nfrom pkg import b\n{_USE}b.x\n"},
        "pkg/_mapped.py",
        "from pkg._mapped import mapped",
    ),
    "a script in a package": (
        {"pkg/__init__.py": "", "pkg/a.py": f"import jax\n{_USE}if __name__ == 'a':\n    f\n"},
        "pkg/_mapped.py",
        "from pkg._mapped import mapped",
    ),
    "a checkout whose name is no name of a package": (
        {"my-project/__init__.py": "", "my-project/a.py": f"import jax\nfrom b import c\n{_USE}"},
        "my-project/_mapped.py",
        "from _mapped import mapped",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _HOMES)
def test_the_module_lies_where_the_file_finds_it(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    texts, path, line = _HOMES[name]
    monkeypatch.chdir(tmp_path)
    for file, text in texts.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    files = migration.migrate(sorted(texts), MigrationOptions(to="vendored"))

    assert [file.path for file in files if file.is_new] == [path]
    assert any(line in file.after.decode() for file in files)


def test_an_alias_of_another_file_changes_where_it_is_defined(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    alias = "import functools\nimport {0}\n\npmap = functools.partial({0}.pmap, axis_name='i')\n"
    (tmp_path / "constants.py").write_text(alias.format("jax"))
    (tmp_path / "a.py").write_text("import constants\n\nf = constants.pmap(abs)\n")

    user, definer = migration.migrate(["a.py", "constants.py"], MigrationOptions())

    assert user.places[0].reason == "an alias, which changes where it is defined"
    assert not user.changed
    assert definer.after.decode() == alias.format("jax_dist")
