"""`agree` in three real processes: one error, the same on all, and the job goes on."""

import pathlib

import jax
import numpy as np
import pytest
from jobs import after_rank_0

from jax_dist import _compat, errors, multihost
from jax_dist.multihost.agreement import Fingerprint, differences
from jax_dist.multihost.ranks import name_ranks
from jax_dist.testing import run_processes


def rows(folder: str) -> dict[str, str]:
    """Runs in every process: what each call raises, after its class; or "agreed"."""
    rank = jax.process_index()
    calls = {
        "the same": lambda: multihost.agree("a", {"x": np.zeros((2, 4)), "n": None, "seed": 7}),
        "shapes": lambda: multihost.agree(
            "shapes", {"batch": {"x": np.zeros((2 + (rank == 1), 4))}, "mask": np.zeros(3)}
        ),
        "dtypes": lambda: multihost.agree("dtypes", np.zeros(2, [np.int32, np.float32][rank % 2])),
        "numbers": lambda: multihost.agree("numbers", {"seed": rank}),
        "trees": lambda: multihost.agree("trees", {"x": 1} if rank else {"x": 1, "y": 2}),
        "containers": lambda: multihost.agree("containers", [1, 2] if rank else (1, 2)),
        "order": lambda: multihost.agree("order-A" if rank == 0 else "order-B"),
        "values, not asked": lambda: multihost.agree("values", np.array([1.0, rank])),
        "values": lambda: multihost.agree("values", np.array([1.0, rank]), values=True),
        "NaN": lambda: multihost.agree("NaN", np.array([np.nan, 1.0]), values=True),
        "keys": lambda: multihost.agree("keys", jax.random.key(rank), values=True),
        "missing": lambda: _miss(rank, pathlib.Path(folder, "through")),
        "many leaves": lambda: multihost.agree(
            "many", {f"{n:04}": np.zeros(n + rank * (n % 100 == 0)) for n in range(4000)}
        ),
        "at last": lambda: multihost.agree("at last"),
    }
    return {name: _outcome(call) for name, call in calls.items()} | {"keys left": _keys_left()}


def _miss(rank: int, is_through: pathlib.Path) -> None:
    with after_rank_0(rank, is_through):
        multihost.agree("missing", timeout=1)


def _outcome(call) -> str:
    try:
        call()
    except errors.DisagreementError as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def _keys_left() -> str:
    """In the store of the service, after 14 calls in 3 processes; rank 0 deletes, and may count."""
    if jax.process_index() > 0:
        return "few"
    client = _compat.coordination_client()
    found = client.key_value_dir_get_bytes("jax_dist/meetings/")
    return "few" if len(found) <= 3 else f"{len(found)}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, str]:
    folder = str(tmp_path_factory.mktemp("job"))
    each = run_processes(rows, folder, processes=3, cpu_devices=1, timeout=120)
    assert [outcome.error for outcome in each] == [None] * 3
    first = each[0].value
    assert [outcome.value for outcome in each] == [first] * 3  # the same text everywhere
    return first


@pytest.mark.parametrize("row", ["the same", "values, not asked", "NaN", "at last"])
def test_what_is_the_same_is_agreed_upon(outcomes, row):
    assert outcomes[row] == "agreed"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ("shapes", "['batch']['x']: ranks 0 and 2 have float64[2,4], rank 1 has float64[3,4]"),
        ("dtypes", "the value: ranks 0 and 2 have int32[2], rank 1 has float32[2]"),
        ("numbers", "['seed']: rank 0 has int 0, rank 1 has int 1, rank 2 has int 2"),
        ("trees", "['y']: rank 0 has int 2, ranks 1-2 have nothing"),
        ("containers", "the containers: rank 0 has tuple(*,*), ranks 1-2 have list(*,*)"),
        ("order", "ranks 1-2 are at agree('order-B')"),
        ("order", "rank 0 is at agree('order-A')"),
        ("many leaves", "['0100']: rank 0 has float64[100], rank 1 has float64[101]"),
        ("many leaves", "and 20 more"),
    ],
)
def test_a_difference_is_one_error_for_all(outcomes, row, line):
    assert outcomes[row].startswith("DisagreementError: The processes ")
    assert f"\n  * {line}" in outcomes[row]


def test_values_are_shown_and_hashed(outcomes):
    assert "rank 0 has float64[2] = [1.0, 0.0] (sha256 " in outcomes["values"]
    assert "rank 2 has key<fry>[] = [0, 2] (sha256 " in outcomes["keys"]


def test_a_missing_rank_is_named_and_hears_the_same_when_it_comes(outcomes):
    assert outcomes["missing"].startswith("MissingRanksError: agree('missing') waited 1 s in vain:")
    assert "  * rank 0 came\n  * ranks 1-2 did not\n" in outcomes["missing"]


def test_the_keys_are_deleted(outcomes):
    assert outcomes["keys left"] == "few"  # of the last call: what the 3 gave


def test_in_one_process_everybody_agrees():
    multihost.agree("alone", {"x": np.zeros(3)}, values=True)


def test_a_missing_rank_is_a_disagreement_and_a_timeout():
    assert issubclass(errors.MissingRanksError, errors.DisagreementError)
    assert issubclass(errors.MissingRanksError, TimeoutError)


def _static_function() -> None:
    """A leaf whose repr has an address."""


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.zeros((2, 3), np.int8), "int8[2,3]"),
        (jax.ShapeDtypeStruct((4,), np.float32), "float32[4]"),
        (np.float32(1), "float32[]"),
        (True, "bool True"),
        ("adam", "str 'adam'"),
        (None, "None"),
        (_static_function, "function <function _static_function>"),
    ],
)
def test_a_leaf_in_words(leaf, text):
    assert Fingerprint.of(leaf).leaves == {"": text}


def test_a_weak_type_is_another_type():
    assert Fingerprint.of(jax.numpy.asarray(1.0)).leaves == {"": "float32[] weak"}


def test_differences_are_told_path_by_path():
    groups = [([0, 2], Fingerprint("*", {"x": "a"})), ([1], Fingerprint("*", {"x": "b", "y": "c"}))]

    assert differences(groups) == [
        "x: ranks 0 and 2 have a, rank 1 has b",
        "y: ranks 0 and 2 have nothing, rank 1 has c",
    ]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 2, 3, 4, 7], "ranks 0, 2-4 and 7")],
)
def test_ranks_in_words(ranks, name):
    assert name_ranks(ranks) == name
