"""What is said wrongly to `rewrite` and `explain` is named, with its value and a remedy."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_dist
from jax_dist import explain, rewrite
from jax_dist.errors import ArgumentError, RewriteError

pytestmark = pytest.mark.rewriting


def _message(**options) -> str:
    with pytest.raises(RewriteError) as caught:
        jax_dist.rewrite(options.pop("fun", lambda x: x), **options)
    return str(caught.value)


def test_a_choice_that_is_none():
    assert _message(captures="lit") == textwrap.dedent("""\
        rewrite got a wrong `captures`:
          * captures is 'lit'
        Because it is none of the choices.
        Choose one of 'lift', 'warn', 'allow', 'error'.""")


@pytest.mark.parametrize(
    ("options", "named", "remedy"),
    [
        ({"fun": 3}, "fun is 3", "Give a function."),
        ({"gathers": None}, "gathers is None", "Choose one of 'reduce', 'exact', 'keep'."),
        ({"partitioning": "on"}, "partitioning is 'on'", "Choose one of 'route', 'keep'."),
        ({"mesh": ("i",)}, "mesh is ('i',)", "Give a jax.sharding.Mesh."),
        (
            {"specs": ["op"]},
            "specs is ['op']",
            "Give {'name of the op': (in_specs, out_specs)}.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_argument(options, named, remedy):
    lines = _message(**options).splitlines()

    assert lines[1] == f"  * {named}"
    assert lines[-1] == remedy


def test_explain_says_the_same():
    with pytest.raises(RewriteError, match="gathers is 'no'"):
        jax_dist.explain(lambda x: x, np.ones(3), gathers="no")


def test_an_abstract_mesh_has_no_devices_to_move_to():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",)).abstract_mesh

    assert "mesh is AbstractMesh" in _message(mesh=mesh)


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
