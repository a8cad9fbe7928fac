"""What is said wrongly to `rewrite` and `explain` is named, with its value and a remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist import explain, rewrite
from jax_dist.errors import ArgumentError

pytestmark = pytest.mark.rewriting


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fun": 3}, "rewrite takes a function, not 3"),
        (
            {"captures": "lit"},
            "captures= of rewrite is one of 'lift', 'warn', 'allow', 'error', not",
        ),
        ({"gathers": None}, "gathers= of rewrite is one of 'reduce', 'exact', 'keep', not None"),
        ({"partitioning": "on"}, "partitioning= of rewrite is one of 'route', 'keep', not 'on'"),
        ({"mesh": ("i",)}, "mesh= of rewrite is a jax.sharding.Mesh, not ('i',)"),
        (
            {"specs": ["op"]},
            "specs= of rewrite is a dict {'name of the op': (in_specs, out_specs)}",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_argument(options, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rewrite(options.pop("fun", lambda x: x), **options)


def test_explain_says_the_same():
    with pytest.raises(ArgumentError, match="not 'no'"):
        jax_dist.explain(lambda x: x, np.ones(3), gathers="no")


def test_an_abstract_mesh_has_no_devices_to_move_to():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",)).abstract_mesh

    with pytest.raises(ArgumentError, match="not AbstractMesh"):
        rewrite(lambda x: x, mesh=mesh)


def test_the_text_of_a_rewritten_function_names_it():
    text = repr(rewrite(_double))

    assert text.startswith("<jax_dist.rewrite of _double at ")
    assert "test_arguments.py:" in text


def test_entering_a_mesh_inside_is_explained():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(x):
        with jax.set_mesh(mesh):
            return x + 1

    text = "'step' enters jax.set_mesh itself, .* Enter it around the call"
    with pytest.raises(ArgumentError, match=text):
        rewrite(step)(jnp.ones(8))
    with pytest.raises(ArgumentError, match=text):
        explain(step, jnp.ones(8))


def _double(x):
    return x * 2
