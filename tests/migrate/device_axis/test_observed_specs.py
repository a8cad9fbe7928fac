"""Programs that decide by the spec of a sharding: on one device, plain JAX says P() of a result."""

import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import pytest
import recorded

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import FileMigration, Form

_PROMISED = MigrationOptions(to="jax", promises=Promises(one_process=True, all_devices=True))
_PROGRAM = """\
import jax
import jax.numpy as jnp

f = jax.pmap(lambda x: x + 1, axis_name="i", devices=jax.devices()[:1])
{other}

def result():
    return f(jnp.ones((1, 3)))


def is_stacked():
    return len(result().sharding.spec) > 0
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _migrated(folder: pathlib.Path, other: str = "") -> FileMigration:
    (folder / "asks.py").write_text(_PROGRAM.format(other=other))
    found = migration.migrate(["asks.py"], _PROMISED)[0]
    return next(each for each in found if each.outcomes)


@pytest.mark.skipif(not CAN_REWRITE, reason="pmap's results had a sharding of their own")
def test_results_keep_the_spec_on_one_device_too(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    after = _migrated(folder).after.decode()
    names: dict[str, Any] = {}
    for each in migration.migrate(["asks.py"], _PROMISED)[0]:
        (folder / each.path).write_bytes(each.after)
    monkeypatch.syspath_prepend(folder)

    with mock.patch.dict(sys.modules):  # the helpers of this folder
        sys.modules.pop("_mapped", None)
        exec(after, names)

    assert "out_shardings=jax.sharding.NamedSharding(" in after
    assert names["result"]().sharding.spec == jax.P("i")
    assert names["is_stacked"]()


def test_what_gives_several_specs_is_left(folder: pathlib.Path):
    found = _migrated(folder, 'g = jax.pmap(lambda x: (x, 1), "i", out_axes=(0, None))\n')

    assert [place.status for place in found.outcomes] == ["done", "left"]
    assert found.outcomes[1].reason.startswith("the program decides by the spec of an array's")


@pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")
def test_such_a_program_keeps_the_axis(tmp_path: pathlib.Path):
    text = _PROGRAM.format(other="")
    text = text.replace(", devices=jax.devices()[:1]", "").replace("(1, 3)", "(8, 3)")

    found = recorded.run(tmp_path, {"asks": text}).migrated("asks")

    (place,) = [each for each in found.outcomes if each.what == "jax.pmap"]
    assert place.form is Form.DIRECT
    assert "decides by the spec of a sharding" in place.reason
