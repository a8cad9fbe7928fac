"""Each mistake that a call can make: the type of the error, and its whole text."""

import functools
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import errors

pytestmark = pytest.mark.mapping

_EIGHT = np.arange(8.0)


def _fails(error, text, fun, *args, **kwargs):
    with pytest.raises(error) as caught:
        fun(*args, **kwargs)
    assert str(caught.value) == textwrap.dedent(text)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_unlike_sizes():
    def step(batch, mask):
        return batch["x"] + mask

    _fails(
        errors.MappedAxisError,
        """\
        pmap of 'step' got arguments of different sizes along the mapped axis:
          * batch['x'] has size 8
          * mask has size 7
        Because every device takes one slice of each mapped argument.
        Slice them alike, or give in_axes=None to what all devices share.""",
        jax_dist.pmap(step),
        {"x": _EIGHT},
        np.ones(7),
    )


def test_a_right_call_after_a_wrong_one_and_the_same_error_again():
    step = jax_dist.pmap(lambda x, y: x + y)

    for _ in range(2):
        with pytest.raises(errors.MappedAxisError):
            step(_EIGHT, np.ones(7))
        assert step(_EIGHT, _EIGHT).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


def test_more_slices_than_devices():
    _fails(
        errors.DeviceCountError,
        """\
        pmap of '<lambda>' needs 9 devices, but there are 8:
          * axis 'i' has size 9
          * 8 cpu devices
        Because each slice along the mapped axis runs on a device of its own.
        Map fewer slices, or give virtual=True to run several of them on each device.""",
        jax_dist.pmap(lambda x: x, "i"),
        np.ones(9),
    )


def test_nested_sizes_that_need_too_many_devices():
    inner = jax_dist.pmap(lambda y: y * 2, "j")

    _fails(
        errors.DeviceCountError,
        """\
        pmap of 'outer' needs 16 devices, but there are 8:
          * axis 'i' has size 8
          * axis 'j' has size 2
          * 8 cpu devices
        Because each slice along the mapped axis runs on a device of its own.
        Map fewer slices, or give virtual=True to run several of them on each device.""",
        jax_dist.pmap(_named(lambda x: inner(x), "outer"), "i"),
        np.ones((8, 2)),
    )


def test_nothing_mapped():
    _fails(
        errors.MappedAxisError,
        """\
        pmap of '<lambda>' requires at least one argument with a mapped axis:
          * x has in_axes=None
        Because the size of the mapped axis is read from the arguments.
        Map one argument, for example jax.numpy.arange(size) with in_axes=0.""",
        jax_dist.pmap(lambda x: x, in_axes=None),
        _EIGHT,
    )
    with pytest.raises(errors.MappedAxisError, match="there is no array argument"):
        jax_dist.pmap(lambda: 1)()


def test_in_axes_that_is_no_prefix():
    _fails(
        errors.AxesError,
        """\
        pmap of '<lambda>' got an in_axes that does not fit its positional arguments:
          * in_axes[0] is (0, 0, 0), but there stands a tuple of length 2
        Because in_axes must have the structure of the positional arguments, down to its integers and None.
        Make in_axes a tree prefix of the positional arguments: an integer or None stands for all below it.""",  # noqa: E501  # messages wrap only where they say so
        jax_dist.pmap(lambda x, y: x, in_axes=((0, 0, 0), 0)),
        (_EIGHT, _EIGHT),
        _EIGHT,
    )


def test_in_axes_when_arguments_came_by_keyword():
    with pytest.raises(errors.AxesError, match="each argument passed by keyword is mapped"):
        jax_dist.pmap(lambda x, y: x, in_axes=(0, 0))(x=_EIGHT, y=_EIGHT)


def test_in_axes_of_a_scalar():
    _fails(
        errors.AxesError,
        """\
        pmap of '<lambda>' got an in_axes that is out of range:
          * y['w'] has shape (), in_axes 0
        Because the mapped axis must be one of the dimensions of the array.
        Change in_axes, or give None to what is not mapped.""",
        jax_dist.pmap(lambda x, y: x),
        _EIGHT,
        {"w": 3.0},
    )


def test_out_axes_out_of_range():
    _fails(
        errors.AxesError,
        """\
        pmap of '<lambda>' got an out_axes that is out of range:
          * output['a'] has shape () on each device, out_axes 1
        Because the mapped axis must be one of the dimensions of the array.
        Change out_axes, or give None to what is not mapped.""",
        jax_dist.pmap(lambda x: {"a": x}, out_axes=1),
        _EIGHT,
    )


def test_out_axes_that_is_no_prefix():
    with pytest.raises(errors.AxesError) as caught:
        jax_dist.pmap(lambda x: ((x, x), x), out_axes=((0, 0, 0), 0))(_EIGHT)

    assert "* out_axes[0] is (0, 0, 0), but there stands a tuple of length 2" in str(caught.value)


def test_an_output_that_is_no_array():
    with pytest.raises(errors.ArgumentTypeError, match=r"output\[1\] is a str: 'done'"):
        jax_dist.pmap(lambda x: (x, "done"))(_EIGHT)


@pytest.mark.parametrize("argument", ["in_axes", "out_axes"])
def test_axes_of_the_wrong_type(argument):
    with pytest.raises(TypeError, match=f"pmap {argument} must be an int, None"):
        jax_dist.pmap(lambda x: x, **{argument: "i"})


def test_a_static_argument_that_cannot_be_hashed():
    _fails(
        errors.StaticArgumentError,
        """\
        Non-hashable static arguments are not supported by pmap of '<lambda>':
          * layers is a list: [3, 4]
        Because each new value of a static argument is compiled for, and found again by its hash.
        Pass a hashable value (a tuple for a list), or map it with in_axes=None.""",
        jax_dist.pmap(lambda x, layers: x, static_broadcasted_argnums=1),
        _EIGHT,
        [3, 4],
    )


def test_a_static_argument_passed_by_keyword():
    _fails(
        errors.StaticArgumentError,
        """\
        pmap of '<lambda>' was called without one of its static arguments:
          * static_broadcasted_argnums is (1,)
          * the call has 1 positional argument
        Because static arguments are found by their position.
        Pass them by position.""",
        jax_dist.pmap(lambda x, n: x, static_broadcasted_argnums=1),
        _EIGHT,
        n=3,
    )


def test_a_static_position_that_the_function_has_not():
    _fails(
        errors.StaticArgumentError,
        """\
        pmap of '<lambda>' was called without one of its static arguments:
          * static_broadcasted_argnums is (2,)
          * the call has 2 positional arguments
          * the function takes 2 positional arguments
        Because static arguments are found by their position.
        Count from 0: the last position is 1.""",
        jax_dist.pmap(lambda x, n: x, static_broadcasted_argnums=2),
        _EIGHT,
        3,
    )


def test_a_name_that_cannot_be_hashed():
    _fails(
        errors.ArgumentTypeError,
        """\
        'axis_name' argument to pmap must be hashable:
          * axis_name=['i'], of type list
        Because collectives find the axis by its name.
        Give one name, as in axis_name='i'.""",
        jax_dist.pmap,
        lambda x: x,
        ["i"],
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [("axis", "axis_name"), ("static_argnums", "static_broadcasted_argnums"), ("axes", "in_axes")],
)
def test_an_option_that_pmap_has_not(said, meant):
    with pytest.raises(TypeError, match=rf"keyword argument '{said}'[^@]*Did you mean {meant}\?"):
        jax_dist.pmap(lambda x: x, **{said: 0})


@pytest.mark.parametrize("argument", ["donate_argnums", "static_broadcasted_argnums"])
@pytest.mark.parametrize("value", [-1, (0, -2), "0", 1.5])
def test_argument_numbers_count_from_the_left(argument, value):
    with pytest.raises(ValueError, match=f"pmap {argument} must hold non-negative integers"):
        jax_dist.pmap(lambda x: x, **{argument: value})


def test_devices_of_another_length():
    _fails(
        errors.DeviceCountError,
        """\
        pmap of '<lambda>' got 8 devices for an axis of size 4:
          * the mapped axis needs 4
          * len(devices) is 8
        Because with devices= given, each of them runs one slice.
        Give 4 devices, or slice the arguments into 8.""",
        jax_dist.pmap(lambda x: x, devices=jax.devices()),
        np.ones(4),
    )


def test_no_devices():
    with pytest.raises(ValueError, match="'devices' argument to pmap must be non-empty, or None."):
        jax_dist.pmap(lambda x: x, devices=[])


def test_an_axis_size_that_is_not_kept():
    with pytest.raises(ValueError, match="was promised axis_size=8"):
        jax_dist.pmap(lambda x: x, axis_size=8)(np.ones(4))


def test_what_is_no_function():
    with pytest.raises(TypeError, match="pmap needs a function"):
        jax_dist.pmap("i")


def test_arrays_must_be_known():
    with pytest.raises(ValueError, match="arrays='whole'"):
        jax_dist.pmap(lambda x: x, arrays="whole")


def test_devices_belong_to_the_outermost_pmap():
    inner = jax_dist.pmap(lambda y: y, "j", devices=jax.devices()[:2])

    with pytest.raises(errors.NestingError, match="Give devices= to the outermost pmap only"):
        jax_dist.pmap(lambda x: inner(x), "i")(np.ones((2, 2)))


def test_inside_a_shard_map_that_is_not_ours():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    inner = jax_dist.pmap(lambda y: y, "j")
    outer = jax.shard_map(inner, mesh=mesh, in_specs=P("i"), out_specs=P("i"))

    with pytest.raises(errors.NestingError, match=r"its manual axes are \('i',\)"):
        jax.jit(outer)(np.ones((16, 2)))


@pytest.mark.parametrize(
    ("axis_name", "known"),
    [(None, "this pmap was given no axis_name"), ("btach", "axis_name='btach' is mapped")],
)
def test_an_unbound_axis_name(axis_name, known):
    with pytest.raises(NameError) as caught:
        jax_dist.pmap(lambda x: lax.psum(x, "batch"), axis_name)(np.ones(8))

    assert isinstance(caught.value, errors.UnboundAxisError)
    assert str(caught.value).splitlines()[:2] == [
        "Found an unbound axis name: batch, in pmap of '<lambda>':",
        f"  * {known}",
    ]
    assert "Give axis_name='batch' to pmap" in str(caught.value)


def test_an_unbound_axis_name_of_a_pmap_inside_lists_those_around():
    def outer(row):
        return jax_dist.pmap(lambda v: lax.psum(v, "k"), "j")(row)

    with pytest.raises(NameError, match=r"axis_name='i' is mapped\n.*axis_name='j' is mapped"):
        jax_dist.pmap(outer, "i")(np.ones((2, 4)))


def test_a_name_that_is_no_axis_keeps_its_error():
    with pytest.raises(NameError, match="name 'missing' is not defined"):
        jax_dist.pmap(lambda x: missing)(np.ones(8))  # noqa: F821


@pytest.mark.parametrize("devices", [8, [0, 1, 2], "cpu"])
def test_devices_that_are_none(devices):
    with pytest.raises(TypeError, match="must be a sequence of devices"):
        jax_dist.pmap(lambda x: x, devices=devices)


def test_an_empty_batch():
    with pytest.raises(errors.MappedAxisError, match="x has size 0 along its mapped axis"):
        jax_dist.pmap(lambda x: x)(np.ones((0, 3)))


def test_a_list_of_numbers():
    with pytest.raises(errors.AxesError, match="x\\['a'\\] is a list of 8 numbers"):
        jax_dist.pmap(lambda x: x)({"a": [1.0, 2, 3, 4, 5, 6, 7, 8]})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("train", "a str"),
        (object(), "a object"),
        (np.array(["a", "b"]), "an array of <U1"),
        (np.array([object()] * 8), "an array of object"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"an array of datetime64\[D\]"),
    ],
)
@pytest.mark.parametrize("axis", [0, None])
def test_an_argument_that_is_no_array(value, kind, axis):
    mapped = jax_dist.pmap(lambda x, how: x, in_axes=(0, axis))

    with pytest.raises(errors.ArgumentTypeError, match=f"how is {kind}"):
        mapped(np.ones(8), value)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1, 2, 3], [4, 5, 6, 6]]])
def test_groups_that_leave_some_out(groups):
    mapped = jax_dist.pmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), "i")

    with pytest.raises(ValueError, match=r"(test_messages.py:\d+|hold|cover|once)"):
        mapped(np.ones(8))


@pytest.mark.parametrize("error", [ValueError("mine"), TypeError("mine"), KeyError("mine")])
def test_errors_of_the_body_come_through_once(error):
    calls = []

    @functools.partial(jax_dist.pmap, axis_name="i")
    def body(x):
        calls.append(x.shape)
        raise error

    with pytest.raises(type(error), match="mine") as caught:
        body(_EIGHT)
    assert caught.value.__context__ is None
    assert calls == [()]


def test_a_misplaced_array_does_not_hide_an_error_of_the_body():
    def body(x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        jax_dist.pmap(body)(jax.device_put(jnp.arange(8.0), jax.devices()[3]))


def _named(fun, name):
    fun.__name__ = name
    return fun
