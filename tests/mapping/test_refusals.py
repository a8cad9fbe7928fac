"""The whole text of each message, as the user reads it."""

import inspect
import pickle
import textwrap

import pytest

from jax_dist.mapping import refusals

pytestmark = pytest.mark.mapping


def test_sizes_that_differ_are_named_one_by_one():
    error = refusals.mapped_sizes_differ("step", {"batch['x']": 8, "mask": 7})

    assert str(error) == textwrap.dedent("""\
        pmap of 'step' got arguments of different sizes along the mapped axis:
          * batch['x'] has size 8
          * mask has size 7
        Because every device takes one slice of each mapped argument.
        Slice them alike, or give in_axes=None to what all devices share.""")


def test_too_few_devices_lists_all_axes():
    error = refusals.too_few_devices("step", 16, 8, "cpu", {"i": 8, "j": 2})

    assert str(error) == textwrap.dedent("""\
        pmap of 'step' needs 16 devices, but there are 8:
          * axis 'i' has size 8
          * axis 'j' has size 2
          * 8 cpu devices
        Because each slice along the mapped axis runs on a device of its own.
        Map fewer slices, or give virtual=True to run several of them on each device.""")


_EXAMPLES = {
    "not_callable": (3,),
    "no_devices": (),
    "not_devices": (8,),
    "nothing_in_axis": ("f", ["x"]),
    "arguments_are_no_arrays": ("f", {"x": "train"}, {"x": "a str"}),
    "list_of_numbers": ("f", "x", 8),
    "unbound_axis": ("f", "i", ["j"]),
    "groups_leave_some_out": ("f", "train.py:12", ((0, 1), (2, 3)), 8),
    "unknown_choice": ("arrays", "whole", ("local", "global")),
    "mapped_sizes_differ": ("f", {"x": 1, "y": 2}),
    "nothing_mapped": ("f", ["x"]),
    "axis_out_of_range": ("f", ["x has shape (), in_axes 0"], "in_axes"),
    "output_is_no_array": ("f", "[1]", "text"),
    "axes_of_wrong_type": ("in_axes", "i", "i"),
    "too_few_devices": ("f", 9, 8, "cpu", {"i": 9}),
    "devices_of_another_length": ("f", 4, 8),
    "size_not_as_promised": ("f", 8, 4),
    "uneven_processes": ("f", {0: 4, 1: 2}, 7),
    "scattered_devices": ("f",),
    "inner_devices_given": ("f",),
    "inside_foreign_shard_map": ("f", ("i",)),
    "static_argument_missing": ("f", (1,), 1),
    "static_argument_unhashable": ("f", "n", [1]),
    "bad_argument_numbers": ("donate_argnums", -1),
    "no_virtual_size": ("f", 7, 2),
    "under_another_mesh": ("f", 3, 8),
    "no_permutation": (8, ((0, 1), (0, 2)), "train.py:12"),
    "collective_on_slices": ("f", "ragged_all_to_all", "train.py:12"),
    "neither_local_nor_global": ("f", "x", 3, 4, 8),
    "local_array_under_trace": ("f",),
    "shards_do_not_match": ("device_put_sharded", 1, 2),
    "shards_differ": ("['w']", ["float32[2]", "float32[3]"]),
    "not_replicated": ("tree['w']", "has shape ()"),
}


def _builders() -> dict:
    functions = inspect.getmembers(refusals, inspect.isfunction)
    return {name: each for name, each in functions if each.__module__ == refusals.__name__}


def test_every_builder_has_an_example():
    assert set(_EXAMPLES) | {"axes_not_a_prefix"} == set(_builders())


@pytest.mark.parametrize("name", sorted(_EXAMPLES))
def test_a_message_has_four_parts_and_the_error_can_travel(name):
    error = _builders()[name](*_EXAMPLES[name])
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)
    what, *which, why, do = str(error).splitlines()
    assert what.endswith(":")
    assert which
    assert all(line.startswith("  * ") for line in which)
    assert why.startswith("Because ")
    assert why.endswith(".")
    assert do.endswith(".")
