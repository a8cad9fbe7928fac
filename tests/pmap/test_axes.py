"""in_axes and out_axes: prefixes, sizes, names."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_dist import errors
from jax_dist._pmap import axes

pytestmark = pytest.mark.mapping


@pytest.mark.parametrize(
    ("axis", "ndim", "spec"),
    [
        (None, 2, P()),
        (0, 1, P("i")),
        (1, 3, P(None, "i")),
        (-1, 3, P(None, None, "i")),
    ],
)
def test_spec_of_axis(axis, ndim, spec):
    assert axes.spec_of_axis(axis, ndim, "i") == spec


def test_one_axis_stands_for_all_leaves_below_it():
    args = ({"a": 1.0, "b": (2.0, 3.0)}, 4.0)

    assert axes.spread_in_axes((1, None), args, {}, "f") == (1, 1, 1, None)
    assert axes.spread_in_axes(({"a": 0, "b": (1, None)}, 2), args, {}, "f") == (0, 1, None, 2)


def test_keywords_are_mapped_over_their_leading_dimension():
    assert axes.spread_in_axes((None,), (1.0,), {"y": (2.0, 3.0)}, "f") == (None, 0, 0)


def test_a_list_of_axes_is_as_good_as_a_tuple():
    assert axes.spread_in_axes([0, None], (1.0, 2.0), {}, "f") == (0, None)


def test_none_as_argument_has_no_leaves():
    assert axes.spread_in_axes((0, None), (1.0, None), {}, "f") == (0,)


def test_negative_out_axes_count_from_the_end_of_the_result():
    assert axes.spread_out_axes((-1, None), (np.ones((2, 3)), 1.0), "f") == (2, None)
    with pytest.raises(errors.MappedAxisError, match="out of range"):
        axes.spread_out_axes(-4, np.ones((2, 3)), "f")


def test_argument_paths_use_the_names_of_the_parameters():
    def step(state, batch, *rest, scale):
        del state, batch, rest, scale

    args = ({"w": 1.0}, [2.0, 3.0], 4.0)

    paths = axes.argument_paths(step, args, {"scale": 5.0}, (0, 1, 2))
    assert paths == ["state['w']", "batch[0]", "batch[1]", "args[2]", "scale"]
    # A static argument between them leaves the names where they belong.
    assert axes.argument_paths(step, (1.0, 2.0), {}, (0, 2)) == ["state", "args[2]"]


def test_sizes_are_read_from_any_mapped_leaf():
    leaves = [np.ones((3, 8)), 1.0, jax.ShapeDtypeStruct((8,), np.float32)]

    assert axes.mapped_size(leaves, (1, None, -1), lambda: ["x", "y", "z"], "f") == 8
