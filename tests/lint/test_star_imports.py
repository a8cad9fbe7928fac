"""Names that come by `from ... import *`, through several files."""

from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project


def _meaning(folder, files, expression):
    for name, text in files.items():
        (folder / name).write_text(text)
    path = folder / "user.py"
    module = Project([str(folder)]).module(sources.read(str(path), files["user.py"].encode()))
    return module.qualified_name(getattr(module.tree.body[-1], expression))


def test_a_name_is_followed_through_star_imports(tmp_path):
    files = {
        "base.py": "from jax import pmap as p\n",
        "all.py": "from base import *\n",
        "user.py": "from all import *\nq = p\n",
    }

    assert _meaning(tmp_path, files, "value") == "jax.pmap"


def test_of_jax_itself_all_comes_that_is_bound_nowhere_else(tmp_path):
    alone = "from jax import *\n"
    for text, meaning in {
        f"{alone}q = pmap\n": "jax.pmap",
        f"{alone}pmap = 1\nq = pmap\n": None,
        f"{alone}q = map\n": None,
        f"{alone}from mine import *\nq = pmap\n": None,
        "from jax.numpy import *\nq = pmap\n": None,
    }.items():
        assert _meaning(tmp_path, {"user.py": text}, "value") == meaning, text


def test_files_that_import_all_of_each_other(tmp_path):
    files = {
        "one.py": "from two import *\n# pmap\n",
        "two.py": "from one import *\n# pmap\n",
        "user.py": "from one import *\nq = missing\n",
    }

    assert _meaning(tmp_path, files, "value") is None
