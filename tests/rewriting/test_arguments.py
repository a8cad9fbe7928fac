"""Wrong options are named with a remedy; other errors are those of JAX."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import explain, rewrite
from jax_dist.errors import ArgumentError

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
_MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _double(x):
    return x * 2


_WRONG = {
    "no function": ({"fun": 3}, "rewrite takes a function, not 3"),
    "captures": (
        {"captures": "lit"},
        "captures= of rewrite must be one of 'lift', 'warn', 'allow', 'error', not",
    ),
    "gathers": (
        {"gathers": None},
        "gathers= of rewrite must be one of 'reduce', 'exact', 'keep'",
    ),
    "partitioning": (
        {"partitioning": "on"},
        "partitioning= of rewrite must be one of",
    ),
    "mesh": ({"mesh": ("i",)}, "mesh= of rewrite must be a jax.sharding.Mesh, not ('i',)"),
    "a mesh without devices": ({"mesh": _MESH.abstract_mesh}, "not AbstractMesh"),
    "specs": (
        {"specs": ["op"]},
        "specs= of rewrite must be a dict {'name of the op': (in_specs, out_specs)}",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_wrong_option_is_named(name):
    options, message = _WRONG[name]
    options = {"fun": _double, **options}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rewrite(**options)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        explain(options.pop("fun"), _X, **options)


def test_the_text_of_a_rewritten_function_names_it():
    assert re.match(
        r"<jax_dist.rewrite of _double at .*test_arguments.py:\d+", repr(rewrite(_double))
    )


def test_other_errors_are_passed_on():
    def fails(x):
        raise ValueError("by the user")

    with pytest.raises(ValueError, match="^by the user"):
        rewrite(fails, mesh=_MESH)(jax.device_put(_X, NamedSharding(_MESH, P())))
    mapped = jax.pmap(lambda x: x + 1)
    with pytest.raises(ValueError, match="incompatible devices"):  # without a mesh
        rewrite(lambda x: mapped(x))(jax.device_put(_X, jax.devices()[5]))
