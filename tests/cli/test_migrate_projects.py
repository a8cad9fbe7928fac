"""`jax-dist migrate --write` on small projects: what they compute stays, whatever is around."""

import io
import json
import pathlib
import runpy
import sys
from typing import Any

import jax
import pytest

from jax_dist.cli.main import main

_TARGETS = pytest.mark.parametrize("to", ["jax_dist", "jax"])


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "_mapped", raising=False)
    return tmp_path


def _migrate(to: str, *paths: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    inside = ("--helpers", "full") if to == "jax" else ()  # however long they are
    code = main(("migrate", "--to", to, *inside, "--write", *paths), out=out, err=err)
    return code, out.getvalue() + err.getvalue()


def _result(path: str) -> Any:
    """What a program leaves in `result`; of its project, nothing stays imported."""
    known = set(sys.modules)
    try:
        return jax.device_get(runpy.run_path(path)["result"])
    finally:
        for name in set(sys.modules) - known:
            if not name.startswith(("jax", "flax")):
                del sys.modules[name]


@_TARGETS
def test_what_is_done_before_jax_is_imported_stays_before_it(folder: pathlib.Path, to: str):
    # Were anything moved up, jax would be imported by then, or the name be unknown.
    above = "import os\n\nos.environ['MARK'] = 'set'\n"
    (folder / "marked.py").write_text("import os\n\nmark = os.environ.pop('MARK')\n")
    text = f"{above}\nimport marked\nimport jax\nfrom jax import numpy as jnp\n\n"
    text += "result = jax.pmap(lambda x: x * 2)(jnp.ones(4)).tolist(), marked.mark\n"
    (folder / "a.py").write_text(text)

    assert _migrate(to, "a.py")[0] == 0

    after = (folder / "a.py").read_text()
    assert after.startswith(above)
    assert "jax.pmap" not in after
    assert _result("a.py") == ([2.0] * 4, "set")


@_TARGETS
@pytest.mark.parametrize(
    "head",
    [
        "try:\n    import no_such_module\nexcept ImportError:\n    pass\n\n",
        "import argparse\n\nparser = argparse.ArgumentParser()\n\n",
        "print\n",
        "__version__ = '1'\nimport sys\n\nsys.path.append('lib')\n",
    ],
    ids=["try", "argparse", "a statement", "sys.path"],
)
def test_files_that_begin_with_other_code_are_imported(folder: pathlib.Path, head: str, to: str):
    body = "import functools\nimport jax\nimport jax.numpy as jnp\n\n\n"
    body += "@functools.partial(jax.pmap, static_broadcasted_argnums=(1,))\n"
    body += "def f(x, n):\n    return x * n\n\n\nresult = f(jnp.ones((4, 2)), 3).sum()\n"
    (folder / "a.py").write_text(head + body)

    assert _migrate(to, "a.py")[0] == 0

    after = (folder / "a.py").read_text()
    assert after.startswith(head)
    assert "jax.pmap" not in after
    assert _result("a.py") == 24


@_TARGETS
def test_cells_run_from_above(folder: pathlib.Path, to: str):
    cells = [
        "%matplotlib inline\nimport numpy as np",
        "x = np.ones(4)",
        "import jax\nfrom functools import partial",
        "f = partial(jax.pmap, axis_name='i')(lambda x: jax.lax.psum(x, 'i'))",
        "result = f(x).tolist()",
    ]
    kinds = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    notebook = {"cells": [{**kinds, "source": cell} for cell in cells], "metadata": {}}
    text = json.dumps({**notebook, "nbformat": 4, "nbformat_minor": 4})
    (folder / "a.ipynb").write_text(text)

    assert _migrate(to, "a.ipynb")[0] == 0

    names: dict[str, Any] = {"__name__": "notebook"}
    found = json.loads((folder / "a.ipynb").read_text())["cells"]
    after = ["".join(cell["source"]) for cell in found]
    for cell in after:
        exec(cell.replace("%matplotlib inline\n", ""), names)
    assert names["result"] == [4.0] * 4
    assert not any("jax.pmap" in cell.partition("\n\n")[0] for cell in after[3:])
    if to == "jax":
        assert [cell for cell in after if "def mapped" not in cell][:3] == cells[:3]


@_TARGETS
def test_one_list_of_transforms_and_the_question_which_one_it_is(folder: pathlib.Path, to: str):
    text = "import jax\nimport jax.numpy as jnp\n\n\ndef run(x):\n    found = []\n"
    text += "    for transform in [jax.jit, jax.pmap]:\n"
    text += "        y = x[None] if transform == jax.pmap else x\n"
    text += "        found.append(transform(lambda v: v + 1)(y).shape)\n    return found\n\n\n"
    text += "result = run(jnp.ones(3))\n"
    (folder / "a.py").write_text(text)

    assert _migrate(to, "a.py")[0] == 0

    assert (folder / "a.py").read_text() != text
    assert _result("a.py") == [(3,), (1, 3)]


@_TARGETS
@pytest.mark.parametrize(
    "use",
    [
        "from common import *\n\nresult = jax.device_count(), p_mean(jnp.ones(4)).tolist()\n",
        "from common import jax, jnp, p_mean\n\n"
        "result = jax.device_count(), p_mean(jnp.ones(4)).tolist()\n",
        "import common\n\n"
        "result = common.jax.device_count(), common.p_mean(common.jnp.ones(4)).tolist()\n",
    ],
    ids=["star", "by name", "attribute"],
)
def test_imports_that_other_files_use_stay(folder: pathlib.Path, use: str, to: str):
    text = "import jax\nimport jax.numpy as jnp\n\np_mean = jax.pmap(lambda x: x + jnp.ones(()))\n"
    (folder / "common.py").write_text(text)
    (folder / "train.py").write_text(use)

    assert _migrate(to, ".")[0] == 0

    assert "jax.pmap" not in (folder / "common.py").read_text()
    assert _result("train.py") == (jax.device_count(), [2.0] * 4)


def test_a_launcher_in_another_file_keeps_one_mesh_for_all_away(folder: pathlib.Path):
    text = "import jax\nimport jax.numpy as jnp\n\n\ndef main():\n"
    text += "    step = jax.pmap(lambda x: x * 2)\n"
    text += "    return step(jnp.ones((jax.device_count(), 3)))\n\n\nresult = main()\n"
    (folder / "train.py").write_text(text)
    assert _migrate("jax", "train.py")[0] == 0
    assert "jax.shard_map" in (folder / "train.py").read_text()  # all facts are shown

    (folder / "train.py").write_text(text)
    launcher = "import jax\n\njax.distributed.initialize()\nimport train\n"
    (folder / "launch.py").write_text(launcher)
    code, said = _migrate("jax", "train.py")

    after = (folder / "train.py").read_text()
    assert code == 0
    assert "step = mapped(lambda x: x * 2)" in after
    assert "launch.py:3" in said
    assert _result("train.py").tolist() == [[2.0] * 3] * jax.device_count()


_SHIM = "import jax\n\njax.tree_map = jax.tree.map\nresult = jax.tree_map(abs, {'a': -1})\n"
_OWN = "import jax\n\ntree_map = jax.tree.map\n\n\ndef f(x):\n    return jax.tree_map(abs, x)\n"


@_TARGETS
def test_a_shim_is_what_it_was(folder: pathlib.Path, to: str):
    (folder / "a.py").write_text(_SHIM)
    (folder / "b.py").write_text(f"{_OWN}\n\nresult = f({{'a': -1}})\n")

    assert _migrate(to, ".")[0] == 0

    assert (folder / "a.py").read_text() == _SHIM
    assert (folder / "b.py").read_text().count("tree_map") == 1
    assert _result("b.py") == {"a": 1}


_LOOPS = {
    "attribute": "node = node.next\n",
    "function": "def depth(t):\n    return depth(t.left)\n\n\ny = depth(f)\n",
    "while": "def last(n):\n    while n.next is not None:\n        n = n.next\n    return f(n)\n",
    "argument": "def depth(t):\n    return depth(t.left)\n\n\ny = f(depth(f))\n",
    "two": "def a(t):\n    return b(t.x)\n\n\ndef b(t):\n    return a(t.y)\n\n\ny = f(a(1))\n",
    "sum": "def total(t):\n    return sum(map(total, t.all)) + total(t.left)\n\n\ntotal(f(1))\n",
}


@pytest.mark.parametrize("loop", _LOOPS)
def test_values_that_come_from_themselves_have_an_end(folder: pathlib.Path, loop: str):
    (folder / "a.py").write_text(f"import jax\n\nf = jax.pmap(lambda x: x)\n\n\n{_LOOPS[loop]}")
    (folder / "b.py").write_text("import jax\n\nf = jax.pmap(lambda x: x)\n")
    out, err = io.StringIO(), io.StringIO()

    promises = ("--one-process", "--all-devices")
    code = main(("migrate", "--to", "jax", *promises, "."), out=out, err=err)

    assert code == 0, err.getvalue()
    assert out.getvalue().count("-f = jax.pmap(lambda x: x)") == 2
    main(("lint", "."), out=out, err=err)
    assert "Found 2 findings in 2 files." in out.getvalue() + err.getvalue()


def test_a_file_that_cannot_be_read_does_not_stop_the_others(folder: pathlib.Path):
    (folder / "a.py").write_bytes(b"import jax\nf = jax.pmap(abs)\n\0\n")
    (folder / "b.py").write_text("import jax\n\nf = jax.pmap(abs)\n")
    (folder / "c.py").write_text("import jax\nf = jax.pmap(abs)\n", encoding="utf-16")
    (folder / "d.py").write_text("# coding: unicode_escape\nimport jax\nf = jax.pmap(abs)\n")
    (folder / "e.py").write_bytes(b"\xff\xfe\xd8\x00\xdc")

    code, said = _migrate("jax_dist", ".")

    assert code == 1
    assert "jax_dist.pmap" in (folder / "b.py").read_text()
    assert all(f"{name}.py" in said for name in "acde")


@_TARGETS
def test_comments_and_lines_stay_where_they_are(folder: pathlib.Path, to: str):
    text = "import jax\nimport jax.numpy as jnp\n\n\ndef f(batch, mask):\n"
    text += "  return ((batch, mask))\n\n\n"
    text += "g = (jax  # the module\n     .pmap(f))  # noqa: E501\n"
    text += "h = jax.pmap(  # by device\n  f, axis_name='i',  # type: ignore\n)\n"
    text += "result = [each.shape for each in h(*g(jnp.ones((2, 3)), jnp.ones(2)))]\n"
    (folder / "a.py").write_text(text)

    assert _migrate(to, "a.py")[0] == 0

    after = (folder / "a.py").read_text()
    for comment in ("# the module", "# noqa: E501", "# by device"):
        assert comment in after
    assert "  f, axis_name='i',  # type: ignore\n)" in after
    assert "return ((batch, mask))" in after
    assert _result("a.py") == [(2, 3), (2,)]
