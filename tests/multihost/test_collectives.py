"""JAX's multihost_utils, kept by name and made safe: exact values, and errors instead of hangs."""

import textwrap

import collective_jobs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dist import multihost
from jax_dist.errors import DisagreementError, MissingRanksError, UnequalError
from jax_dist.testing import run_processes

_SAME_IN_ALL = "Because what goes over devices must be the same in all processes."
_LOOK = "Look for a branch on the rank, or for data that is shared out unevenly."


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank found, by job; all jobs run in the same two processes, one after the other."""
    folder = str(tmp_path_factory.mktemp("job"))
    fun = collective_jobs.everything
    outcomes = run_processes(fun, folder, processes=2, cpu_devices=2, timeout=240)
    assert [outcome.error for outcome in outcomes] == [None, None]
    return [outcome.value for outcome in outcomes]


def disagreement(place: str, difference: str) -> tuple[str, str]:
    text = f"The processes disagree at {place}:\n  * {difference}\n{_SAME_IN_ALL}\n{_LOOK}"
    return "DisagreementError", text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int64", ("int64", 1099511627777)),
        ("float64", ("float64", 1.000000000001)),
        ("nan", [0x7FC12345]),
        ("bfloat16", ("bfloat16", [0.5, 0.5])),
        ("bool", [True, False]),
        ("key", [0, 7]),
        ("keys", (3,)),
        ("jax", [10, 11, 12]),
        ("text", "the first"),
        ("bytes", b"\0\xff\0"),
        ("int", 717897987691852588770249),
        ("float", float("-inf")),
        ("flag", True),
        ("none", None),
        ("empty", (0, 3)),
        ("large", ((100, 1000), 109951162777700000)),  # over the devices
    ],
)
def test_broadcast_is_exact(found, name, expected):
    assert [each["broadcast"][name] for each in found] == [expected, expected]


def test_any_rank_can_be_the_source(found):
    assert [each["broadcast_from_the_last"] for each in found] == [{"rank": 1}, {"rank": 1}]


def test_a_broadcast_that_cannot_be_is_an_error_in_every_rank(found):
    assert found[0]["broadcasts_that_fail"] == found[1]["broadcasts_that_fail"]
    shape, leaf, container, two, none, a_set, in_parts, other, whole, after = found[0][
        "broadcasts_that_fail"
    ]
    name = "broadcast_one_to_all"
    assert shape == disagreement(name, "['x']: rank 0 has float64[2], rank 1 has float64[3]")
    assert leaf == disagreement(name, "['y']: rank 0 has nothing, rank 1 has int")
    assert container == disagreement(
        name, "the containers: rank 0 has list(*,*), rank 1 has tuple(*,*)"
    )
    assert other == disagreement(name, "the value: rank 0 has int, rank 1 has object")
    assert whole == disagreement(
        name, "the value: rank 0 has float32[4], rank 1 has float32[4] over all processes"
    )
    assert two == (
        "DisagreementError",
        textwrap.dedent("""\
            broadcast_one_to_all: not exactly one process is the source:
              * ranks 0-1 say so
            Because all get the values of that one.
            Give `is_source=True` in one process, and `is_source=False` in all others."""),
    )
    assert "* none says so\n" in none[1]
    assert a_set == (
        "UnsupportedError",
        textwrap.dedent("""\
            broadcast_one_to_all got what it cannot send:
              * it is of the type set
            Because only arrays, random keys, numbers, strings and bytes are sent, bit for bit.
            Send it as bytes: `pickle.dumps(it)`."""),
    )
    assert in_parts[0] == "UnsupportedError"
    assert "* it is float32[4] over all processes\n" in in_parts[1]
    assert after == 5


def test_gather_stacks_or_joins_exactly(found):
    stacked, tiled = {"scalar": (2,), "int64": (2,), "key": (2,), "text": (2,), "bytes": (2,)}, {}
    stacked["whole"] = (4,)
    tiled = {**stacked, "array": (4, 2), "large": (200000,)}
    stacked |= {"array": (2, 2, 2), "large": (2, 100000)}
    for each in found:
        assert each["gather"]["shapes"] == [stacked, tiled]
        assert each["gather"]["tiled"] == {
            "array": [[0.0, 1.0], [2.0, 3.0], [10.0, 11.0], [12.0, 13.0]],
            "bytes": [b"\0", b"\0\0"],
            "int64": [1099511627776, 1099511627777],
            "key": [[0, 0], [0, 1]],
            "large": [1099511627776, 1099511627777],
            "scalar": [0.5, 1.5],
            "text": ["a", "bb"],
            "whole": [0.0, 1.0, 2.0, 3.0],
        }


def test_unequal_shapes_and_dtypes_are_no_longer_read_as_memory(found):
    assert found[0]["gathers_that_fail"] == found[1]["gathers_that_fail"]
    shape, dtype, anything, after = found[0]["gathers_that_fail"]
    name = "process_allgather"
    assert shape == disagreement(name, "['x']: rank 0 has float64[2], rank 1 has float64[3]")
    assert dtype == disagreement(name, "the value: rank 0 has int32[2], rank 1 has int64[2]")
    assert anything[0] == "UnsupportedError"
    assert after == [0, 1]


def test_other_calls_in_other_ranks_are_told_apart(found):
    expected = textwrap.dedent(f"""\
        The processes are at different places:
          * rank 0 is at broadcast_one_to_all
          * rank 1 is at process_allgather
        Because each of these needs all processes, in the same order.
        {_LOOK}""")
    for each in found:
        assert each["other_orders"] == [("DisagreementError", expected), [1, 1]]


def test_barriers_name_the_names_and_the_missing(found):
    names, missing = found[0]["barriers"]
    assert names[0] == "DisagreementError"
    assert "  * rank 0 is at sync_global_devices('load')\n" in names[1]
    assert "  * rank 1 is at sync_global_devices('save')\n" in names[1]
    assert missing[0] == "MissingRanksError"
    assert missing[1].startswith(
        "sync_global_devices('step 3') waited 1.5 s in vain:\n  * rank 0 came\n  * rank 1 did not\n"
    )
    assert found[1]["barriers"] == [names, missing]  # who comes too late hears the same


def test_assert_equal_never_crashes_and_takes_a_nan_as_a_nan(found):
    assert found[0]["equal"] == found[1]["equal"]
    shapes, values, scalars, containers, same = found[0]["equal"]
    assert same == ("no error", "")
    assert [each[0] for each in (shapes, values, scalars, containers)] == ["UnequalError"] * 4
    assert shapes[1].startswith(
        "The processes disagree at assert_equal('weights'):\n  * ['x']: rank 0 has float64[2] ="
    )
    assert "rank 0 has int64[2] = [0, 1] (sha" in values[1]
    assert "rank 1 has int64[2] = [1, 2] (sha" in values[1]
    assert "['y']" not in values[1]
    assert "  * the value: rank 0 has float 0.0, rank 1 has float 1.0\n" in scalars[1]


def test_local_arrays_become_global_and_come_back(found):
    for rank, each in enumerate(found):
        shape, back, key, total = each["convert"][:4]
        assert shape == (8,)
        assert back == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]][rank]
        assert key == [0, 1]
        assert total == 31.0


def test_what_does_not_go_together_is_found(found):
    assert found[0]["convert"][4:] == found[1]["convert"][4:]
    shapes, values, specs = found[0]["convert"][4:]
    name = "host_local_array_to_global_array"
    assert shapes == disagreement(
        name,
        "the value: rank 0 has float64[4] cut by P('i',), rank 1 has float64[8] cut by P('i',)",
    )
    assert values == (
        "DisagreementError",
        textwrap.dedent("""\
            host_local_array_to_global_array: processes have different values of the same part:
              * ['w'][:]: rank 0 has [1.0, 1.0], rank 1 has [2.0, 2.0]
            Because by these specs, each of these parts is on devices of several processes.
            Compute it in the same way everywhere, broadcast it with \
jax_dist.multihost.broadcast_one_to_all, or cut that dimension over the processes."""),
    )
    assert specs == disagreement(
        name, "the value: rank 0 has int64[3] cut by P(), rank 1 has int64[3] cut by P('i',)"
    )


def test_parts_that_several_processes_share_are_compared_one_by_one(found):
    for each in found:
        whole, error, unchecked = each["convert_partly_replicated"]
        assert whole == unchecked == (8,)
        assert error[0] == "DisagreementError"
        assert (
            "  * the array[4:8]: rank 0 has [4.0, 5.0, 6.0, 7.0], "
            "rank 1 has [4.0, 6.0, 6.0, 7.0]\n" in error[1]
        )


def test_it_is_checked_at_first_or_always(found):
    for each in found:
        first, again, always, bad = each["convert_and_change"][:4]
        assert first[0] == always[0] == "DisagreementError"
        assert again == ("no error", "")
        assert bad[0] == "ValueError"
        assert each["convert_and_change"][4][0] == "MissingRanksError"
        assert each["convert_and_change"][5] == [1, 1]


# ----------------------------------------------------------------------------------- one process


def test_one_process_gets_the_same_types():
    tree = {"x": np.int64(2**40), "key": jax.random.key(1), "text": "a", "n": 3, "none": None}

    sent = multihost.broadcast_one_to_all(tree)

    assert sent["x"].dtype == np.int64
    assert int(sent["x"]) == 2**40
    assert jax.random.key_data(sent["key"]).tolist() == [0, 1]
    assert (sent["text"], sent["n"], sent["none"]) == ("a", 3, None)


def test_one_process_gets_the_shapes_of_several():
    tree = [jnp.zeros((2, 3)), 1.5]

    stacked, tiled = (multihost.process_allgather(tree, tiled=tiled) for tiled in (False, True))

    assert [each.shape for each in stacked] == [(1, 2, 3), (1,)]
    assert [each.shape for each in tiled] == [(2, 3), (1,)]


def test_one_process_agrees_with_itself():
    multihost.sync_global_devices("alone", timeout=1)
    multihost.assert_equal({"x": np.array([np.nan])})


def test_errors_are_those_that_users_catch():
    assert issubclass(UnequalError, AssertionError)
    assert issubclass(UnequalError, DisagreementError)
    assert issubclass(MissingRanksError, TimeoutError)
