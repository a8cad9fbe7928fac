"""A pmap without axis_name: the program finds no axis that it did not find before."""

import pathlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import Form

_PROMISED = Promises(one_process=True, all_devices=True)
_OPTIONS = {
    "direct": MigrationOptions(to="jax", promises=_PROMISED),
    "mapped": MigrationOptions(to="jax", promises=_PROMISED, plainest=Form.MAPPED),
    "full": MigrationOptions(to="jax", full_helpers=True),
}
_PROGRAM = """\
import jax
import numpy as np
from axes import AXIS


def mean_if_mapped(x):
    try:
        return jax.lax.pmean(x, AXIS)
    except NameError:  # not in a pmap with that axis
        return x


f = jax.pmap(lambda x: x - mean_if_mapped(x.mean()))


def result():
    return f(np.arange(24.0, dtype=np.float32).reshape(8, 3) ** 2)
"""


def _result(folder: pathlib.Path) -> np.ndarray:
    names: dict[str, Any] = {}
    with mock.patch.dict(sys.modules):  # those of this folder
        for name in ("axes", "_mapped"):
            sys.modules.pop(name, None)
        exec((folder / "asks.py").read_text(), names)
    return np.asarray(names["result"]())


@pytest.mark.parametrize("axis", ["devices", "mapped"])
@pytest.mark.parametrize("form", _OPTIONS)
def test_its_own_axis_is_found_by_nobody(
    form: str, axis: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "axes.py").write_text(f'AXIS = "{axis}"\n')
    (tmp_path / "asks.py").write_text(_PROGRAM)
    before = _result(tmp_path)
    files, _ = migration.migrate(["asks.py"], _OPTIONS[form])
    for file in files:
        (tmp_path / file.path).write_bytes(file.after)

    after = (tmp_path / "asks.py").read_text()
    assert ("jax.shard_map(" in after) == (form == "direct")
    assert ("mapped(lambda" in after) == (form != "direct")
    np.testing.assert_array_equal(_result(tmp_path), before)


def test_a_mesh_of_an_earlier_migration_does_not_count(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import jax\n\nf = jax.pmap(abs)\n")
    for _ in range(2):  # the second time, of what is appended
        files, _ = migration.migrate(["a.py"], _OPTIONS["direct"])
        for file in files:
            (tmp_path / file.path).write_bytes(file.after)
        text = (tmp_path / "a.py").read_text()
        (tmp_path / "a.py").write_text(text + "g = jax.pmap(abs)\n")

    assert (tmp_path / "a.py").read_text().count('Mesh(jax.devices(), ("devices",))') == 2
