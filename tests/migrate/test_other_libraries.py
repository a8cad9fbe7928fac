"""The pmaps of Equinox and of Flax NNX."""

import pathlib

import pytest
from migrated import migrate

_EQUINOX = """\
import equinox as eqx
from equinox import filter_pmap


@eqx.filter_pmap(in_axes=(None, 0))
def step(model, x):
    return model(x)


run = filter_pmap(step)
"""


def test_filter_pmap_of_equinox(package: pathlib.Path):
    (package / "train.py").write_text(_EQUINOX)

    (found,) = migrate("pkg/train.py")

    assert found.after.decode() == _EQUINOX.replace(
        "import equinox as eqx\nfrom equinox import filter_pmap\n", "import jax_dist\n"
    ).replace("eqx.filter_pmap", "filter_pmap").replace("filter_pmap", "jax_dist.filter_pmap")
    (left,) = migrate("pkg/train.py", to="jax")
    assert [place.status for place in left.outcomes] == ["left", "left"]


_NNX = """\
import functools

from flax import nnx


@nnx.pmap(axis_name="batch", in_axes=(nnx.StateAxes({...: None}), 0))
def step(model, x):
    return model(x)


@functools.partial(nnx.pmap, axis_name="batch")
def other(model, x):
    return model(x)
"""


def test_pmap_of_nnx(package: pathlib.Path):
    (package / "train.py").write_text(_NNX)

    (found,) = migrate("pkg/train.py")

    assert found.after.decode() == _NNX.replace("nnx.pmap", "jax_dist.nnx_pmap").replace(
        "from flax import nnx\n", "from flax import nnx\nimport jax_dist\n"
    )
    (left,) = migrate("pkg/train.py", to="jax")
    assert [place.status for place in left.outcomes] == ["left", "left"]
    assert "nnx.shard_map" in left.outcomes[0].by_hand


@pytest.mark.parametrize("option", ["transform_metadata={}", "graph=False", "graph_updates=True"])
def test_pmap_of_nnx_is_left_with_what_only_it_takes(package: pathlib.Path, option: str):
    (package / "train.py").write_text(f"from flax import nnx\n\nstep = nnx.pmap(abs, {option})\n")

    (found,) = migrate("pkg/train.py")

    assert not found.changed
    (place,) = found.outcomes
    assert (place.status, place.what) == ("left", "nnx.pmap")
    assert f"takes no {option.split('=')[0]}" in place.why
