"""Wrong options are named with a remedy; arguments on other devices are put on the mesh."""

import re

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import explain, rewrite
from jax_dist.errors import ArgumentError

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
_MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _double(x):
    return x * 2


_CAPTURES = "'lift', 'warn', 'allow', 'error', not"
_SPECS = "{'name of the op': (in_specs, out_specs)}"
_WRONG = [
    ({"fun": 3}, "rewrite takes a function, not 3"),
    ({"captures": "lit"}, f"captures= of rewrite must be one of {_CAPTURES}"),
    ({"gathers": None}, "gathers= of rewrite must be one of 'reduce', 'exact', 'keep'"),
    ({"partitioning": "on"}, "partitioning= of rewrite must be one of"),
    ({"mesh": ("i",)}, "mesh= of rewrite must be a jax.sharding.Mesh, not ('i',)"),
    ({"mesh": _MESH.abstract_mesh}, "not AbstractMesh"),
    ({"specs": ["op"]}, f"specs= of rewrite must be a dict {_SPECS}"),
]


@pytest.mark.parametrize(("options", "message"), _WRONG)
def test_a_wrong_option_is_named(options, message):
    options = {"fun": _double, **options}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rewrite(**options)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        explain(options.pop("fun"), _X, **options)


_THREE = Mesh(np.array(jax.devices()[:3]), ("three",))
_ELSEWHERE = {
    "from a pmap outside": jax.pmap(lambda x: x * 1),
    "on one device": lambda x: jax.device_put(x, jax.devices()[5]),
    "over another axis": lambda x: jax.device_put(x, NamedSharding(_THREE, P(None, "three"))),
}


@pytest.mark.parametrize("name", _ELSEWHERE)
def test_arguments_elsewhere_are_put_on_the_mesh(name):
    mapped = jax.pmap(lambda x: x + lax.psum(x, "i"), "i")

    result = rewrite(lambda x: mapped(x), mesh=_MESH)(_ELSEWHERE[name](_X))

    np.testing.assert_allclose(result, _X + _X.sum(0))
    assert result.sharding.spec == P("data")
    assert result.sharding.device_set == set(jax.devices())


def test_other_errors_are_passed_on():
    def fails(x):
        raise ValueError("by the user")

    with pytest.raises(ValueError, match="^by the user"):
        rewrite(fails, mesh=_MESH)(jax.device_put(_X, NamedSharding(_MESH, P())))
    mapped = jax.pmap(lambda x: x + 1)
    with pytest.raises(ValueError, match="incompatible devices"):  # without a mesh
        rewrite(lambda x: mapped(x))(jax.device_put(_X, jax.devices()[5]))
