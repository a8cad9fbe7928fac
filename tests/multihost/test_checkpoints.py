"""Checkpoints: what is saved comes back as it was, whatever happened to the newest one."""

import json
import pathlib
import subprocess
import sys
import textwrap

import checkpoint_jobs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.errors import CheckpointError, CheckpointWarning
from jax_dist.multihost import Checkpoints
from jax_dist.testing import run_processes


def placed(values, spec: P) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), "i")
    return jax.device_put(values, NamedSharding(mesh, spec))


def make_state(scale: float) -> dict:
    params = {
        "w": placed(scale * jnp.arange(8.0), P("i")),
        "b": placed(jnp.full((2, 2), scale, jnp.bfloat16), P()),
    }
    return {
        "params": params,
        "adam": optax.adam(0.1).init(params),
        "key": jax.random.key(int(scale)),
        "keys": placed(jax.random.split(jax.random.key(int(scale)), 8), P("i")),
        "loose": jnp.full(3, scale),
        "empty": jnp.zeros((0, 3)),
        "host": np.array([2**40 + int(scale)]),
        "scalar": np.float64(scale + 1e-12),
        "step": int(scale),
        "loss": float(scale),
        "flag": scale > 1,
        "none": None,
    }


def describe(leaf) -> object:
    """What must be the same besides the values."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
    return type(leaf), getattr(leaf, "dtype", None)


def values(tree) -> list:
    is_key = lambda leaf: jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    plain = [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(leaf).tolist() for leaf in plain]


def names_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".jax_dist.lock")


def damage(folder: pathlib.Path, how: str) -> None:
    if how == "an empty manifest":
        (folder / "jax_dist.json").write_bytes(b"")
        return
    files = [path for path in (folder / "default").rglob("d/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    if how == "a flipped bit":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif how == "cut short":
        largest.write_bytes(content[: len(content) // 2])
    else:
        largest.unlink()


def test_everything_comes_back_as_it_was_and_where_it_was(tmp_path):
    with Checkpoints(tmp_path, every=2) as checkpoints:
        _, start = checkpoints.restore(make_state(0))
        saved = [checkpoints.save(step, make_state(step)) for step in range(1, 8)]
    with Checkpoints(tmp_path) as checkpoints:
        state, step = checkpoints.restore(make_state(0))

    assert start == 0
    assert saved == [False, True, False, True, False, True, False]
    assert step == 6
    assert jax.tree.structure(state) == jax.tree.structure(make_state(6))
    assert [describe(leaf) for leaf in jax.tree.leaves(state)] == [
        describe(leaf) for leaf in jax.tree.leaves(make_state(6))
    ]
    assert values(state) == values(make_state(6))
    assert names_in(tmp_path) == ["4", "6"]


@pytest.mark.parametrize("how", ["an empty manifest", "a flipped bit", "cut short", "lost"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, how):
    state = {"w": placed(jnp.arange(800.0), P("i"))}
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, jax.tree.map(lambda x: 2 * x, state))
    damage(tmp_path / "2", how)

    with Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.warns(CheckpointWarning) as warned:
            restored, step = checkpoints.restore(state)
        assert checkpoints.save(2, jax.tree.map(lambda x: 3 * x, state))
    with Checkpoints(tmp_path) as checkpoints:
        again, newest = checkpoints.restore(state)

    assert step == 1
    assert restored["w"][799] == 799
    assert len(warned) == 1
    text = str(warned[0].message)
    assert text.startswith(f"the checkpoint {tmp_path / '2'} is damaged:\n  * ")
    assert f"{tmp_path / '1'} is restored instead." in text
    assert warned[0].filename == __file__
    assert newest == 2
    assert again["w"][799] == 3 * 799
    assert names_in(tmp_path) == ["1", "2", "2.damaged"]


def test_a_folder_that_got_the_name_of_another_step_is_damaged(tmp_path):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"w": np.full(3, 1.0)})
        checkpoints.save(2, {"w": np.full(3, 2.0)})
    (tmp_path / "2").rename(tmp_path / "9")

    with Checkpoints(tmp_path) as checkpoints, pytest.warns(CheckpointWarning, match="of this st"):
        restored, step = checkpoints.restore({"w": np.zeros(3)})

    assert (step, restored["w"].tolist()) == (1, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("kept", ["1/jax_dist.json", "1/default/_METADATA"])
def test_every_file_of_a_step_is_known(kept, tmp_path):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})
    manifest = json.loads((tmp_path / "1" / "jax_dist.json").read_text())
    there = {
        str(path.relative_to(tmp_path / "1"))
        for path in (tmp_path / "1").rglob("*")
        if path.is_file()
    }

    assert set(manifest["files"]) == there - {"jax_dist.json"}
    assert (tmp_path / kept).is_file()


def test_a_folder_may_be_named_from_the_one_above(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Checkpoints("../steps", every=1) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})

    with Checkpoints(tmp_path / "here" / ".." / "steps") as checkpoints:
        _, step = checkpoints.restore({"w": np.zeros(3)})
    assert step == 1
    assert names_in(tmp_path / "steps") == ["1"]


def test_with_nothing_whole_the_state_is_the_one_given(tmp_path):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3)})
    damage(tmp_path / "1", "an empty manifest")

    with Checkpoints(tmp_path) as checkpoints, pytest.warns(CheckpointWarning, match="No other"):
        state, step = checkpoints.restore({"w": np.zeros(3)})
    assert step == 0
    assert state["w"].tolist() == [0, 0, 0]


def test_a_state_that_does_not_fit_is_named_leaf_by_leaf(tmp_path):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(1, {"w": np.ones(3), "b": np.ones(2), "key": jax.random.key(0), "n": 1})
        other = {
            "w": np.ones(4),
            "c": np.ones(2),
            "key": jax.random.key(0, impl="rbg"),
            "n": 1.0,
        }

        with pytest.raises(CheckpointError) as raised:
            checkpoints.restore(other)

    assert str(raised.value) == textwrap.dedent(f"""\
        the checkpoint {tmp_path / "1"} does not fit the state:
          * ['b'] is float64[2], in the state not there
          * ['key'] is key<threefry2x32>[], in the state key<rbg>[]
          * ['n'] is int, in the state float
          * ['w'] is float64[3], in the state float64[4]
          * ['c'] is not there, in the state float64[2]
        Because another program wrote it, or this one was changed since.
        Give `restore` a state like the one that was saved, or use another folder.""")


class _Pair:
    """Two leaves with one path."""

    def __init__(self, first, second):
        self.both = first, second


jax.tree_util.register_pytree_with_keys(
    _Pair,
    lambda pair: ([(jax.tree_util.GetAttrKey("v"), each) for each in pair.both], None),
    lambda _, children: _Pair(*children),
)


class _Subclass(int):
    pass


def test_what_would_not_come_back_as_it_is_is_named(tmp_path):
    donated = jnp.ones(3)
    donated.delete()
    wrong = {
        "big": 2**63,
        "donated": donated,
        "endian": np.zeros(2, ">i8"),
        "int": _Subclass(3),
        "long": np.zeros(2, np.longdouble),
        "mask": np.ma.masked_array([1.0, 2.0], [0, 1]),
        "name": "run 7",
        "pair": _Pair(np.ones(2), np.zeros(2)),
        "raw": np.zeros(2, "V4"),
        "time": np.array(["2020"], "M8[s]"),
        "view": np.zeros(3).view(np.recarray),
        "w": np.ones(3),
    }
    with Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.raises(CheckpointError) as raised:
            checkpoints.save(1, wrong)
        with pytest.raises(CheckpointError, match=r"\['pair'\].v is the path of 2 leaves"):
            checkpoints.restore(wrong)
        assert checkpoints.save(1, {"w": np.ones(3)})

    assert str(raised.value) == textwrap.dedent(f"""\
        a checkpoint cannot hold all of the state:
          * ['big'] is a int
          * ['donated'] is an array that was donated or deleted
          * ['endian'] is a ndarray of >i8
          * ['int'] is a _Subclass
          * ['long'] is a ndarray of {np.dtype(np.longdouble)}
          * ['mask'] is a MaskedArray of float64
          * ['name'] is a str
          * ['raw'] is a ndarray of |V4
          * ['time'] is a ndarray of datetime64[s]
          * ['view'] is a recarray of float64
          * ['pair'].v is the path of 2 leaves
        Because only arrays of JAX and NumPy, numbers of 64 bits, and random keys are written, \
each under a path of its own.
        Leave these out of the state, and make them again when the program starts. Of a step with \
donation, take what it returned.""")


def test_newer_checkpoints_are_not_overwritten_in_passing(tmp_path):
    with Checkpoints(tmp_path, every=5) as checkpoints:
        checkpoints.save(5, {"n": 5})
        checkpoints.save(10, {"n": 10})

    with Checkpoints(tmp_path, every=1) as checkpoints, pytest.raises(CheckpointError) as raised:
        checkpoints.save(1, {"n": 1})

    assert str(raised.value) == textwrap.dedent(f"""\
        step 1 is not saved: {tmp_path} holds what was not restored:
          * step 5
          * step 10
        Because what is newer by number would be taken for the newest, and what another program \
made is never overwritten.
        Call `restore` first, move away what is not a checkpoint, or use another folder.""")


def test_force_saves_the_last_step(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.save(1, {"n": 1})
        assert checkpoints.save(2, {"n": 2}, force=True)
        assert not checkpoints.save(2, {"n": 2}, force=True)  # it is there
        assert checkpoints.restore({"n": 0}) == ({"n": 2}, 2)


def test_some_are_kept_for_good(tmp_path):
    with Checkpoints(tmp_path, every=1, keep=1, keep_period=3) as checkpoints:
        for step in range(1, 9):
            checkpoints.save(step, {"n": step})
    assert names_in(tmp_path) == ["3", "6", "8"]


@pytest.mark.parametrize("option", ["every", "keep", "keep_period"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_less_than_one_is_refused(tmp_path, option, value):
    refused = f"^Checkpoints: {option} must be an integer of at least 1, not {value}.$"
    with pytest.raises(ValueError, match=refused):
        Checkpoints(tmp_path, **{option: value})


def test_a_step_is_an_integer(tmp_path):
    """A folder 2.0 would never be found again."""
    with Checkpoints(tmp_path, every=1) as checkpoints:
        with pytest.raises(TypeError, match="step must be an integer, not 2.0"):
            checkpoints.save(2.0, {"n": 2})
        assert checkpoints.save(jnp.int32(2), {"n": 2})
    assert names_in(tmp_path) == ["2"]


def test_without_orbax_the_remedy_is_told(tmp_path):
    program = textwrap.dedent(f"""\
        import sys
        sys.modules["orbax"] = None
        from jax_dist.multihost import Checkpoints
        try:
            Checkpoints({str(tmp_path)!r})
        except ImportError as error:
            print(type(error).__name__, error.name)
            print(error)
        """)
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    ).stdout

    assert printed == textwrap.dedent("""\
        ImportError orbax
        Checkpoints needs a package that is not installed:
          * orbax-checkpoint
        Because Orbax writes the checkpoints.
        Run: pip install "orbax-checkpoint>=0.11.26"
        """)


_TAMPERED = {
    "empty": b"",
    "null": b"null",
    "deep": 200_000 * b"[",
    "not text": b"\xff\xfe" * 100,
    "nothing in it": b'{"leaves": {}, "files": {}, "digest": ""}',
    "lists": b'{"leaves": [1], "files": [1], "digest": ""}',
    "other types": b'{"leaves": {}, "files": {"a": 1}, "digest": ""}',
    "a large number": b'{"leaves": {}, "files": {"a": [1%s, 2]}, "digest": ""}' % (5000 * b"0"),
}


@pytest.mark.parametrize("how", [*_TAMPERED, "a folder", "a device", "another state's"])
def test_a_manifest_that_cannot_be_read_is_none(tmp_path, how):
    with Checkpoints(tmp_path, every=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": np.full(3, float(step))})
    manifest = tmp_path / "2" / "jax_dist.json"
    if how == "another state's":
        manifest.write_text(manifest.read_text().replace("float64[3]", "float64[4]"))
    else:
        manifest.unlink()
        if how in _TAMPERED:
            manifest.write_bytes(_TAMPERED[how])
        elif how == "a folder":
            manifest.mkdir()
        else:
            manifest.symlink_to("/dev/zero")

    with Checkpoints(tmp_path) as checkpoints, pytest.warns(CheckpointWarning) as warned:
        state, step = checkpoints.restore({"w": np.zeros(3)})

    assert (step, state["w"].tolist()) == (1, [1.0, 1.0, 1.0])
    assert "it has no jax_dist.json that can be read" in str(warned[0].message)


# ------------------------------------------------------------------------------ several processes


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> tuple[list[dict], list[dict]]:
    """What each rank of two processes found at a first and a second start; damage in between."""
    folder = tmp_path_factory.mktemp("several")
    first = run_processes(checkpoint_jobs.first_start, str(folder), timeout=180)
    damage(folder / "saved" / "4", "a flipped bit")
    save_as_with_pmap(folder / "from_pmap")
    second = run_processes(checkpoint_jobs.second_start, str(folder), timeout=180)
    for outcomes in (first, second):
        assert [outcome.error for outcome in outcomes] == [None, None]
    return [outcome.value for outcome in first], [outcome.value for outcome in second]


def save_as_with_pmap(folder: pathlib.Path) -> None:
    cut, own = np.arange(8.0, dtype=np.float32), np.full(2, 3, np.float32)
    state = {"cut": cut, "same": np.zeros(3, np.float32), "own": own, "keys": np.zeros(3)}
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, {**jax.tree.map(lambda x: np.stack([x] * 8), state), "step": 4})


def test_several_processes_save_and_restore_and_agree_on_damage(starts):
    first, second = ([each["saved"] for each in start] for start in starts)

    assert [each["start"] for each in first] == [0, 0]
    for rank, found in enumerate(second):
        assert found["start"] == 2
        assert found["saved"] == [False, True, False, True]
        assert found["specs"] == [("i",), ()]
        assert found["found"]["cut"] == [
            [4.0 * rank + 2, 4 * rank + 3],
            [4 * rank + 4, 4 * rank + 5],
        ]
        assert found["found"]["same"] == [2.0, 2.0, 2.0]
        assert found["found"]["own"] == [2.0, 2.0]
        assert found["found"]["step"] == 2
        assert len(found["warned"]) == 1
    all_keys = jax.random.key_data(jax.random.split(jax.random.key(2), 4)).tolist()
    assert sum([each["found"]["keys"] for each in second], []) == [[key] for key in all_keys]


def test_what_differs_between_processes_is_refused(starts):
    found, other = (each["differs"] for each in starts[0])

    assert found == other
    text, saved_then = found
    assert text.startswith("The processes disagree at Checkpoints.save:\n  * ['w']: rank 0 has ")
    assert "['b']" not in text
    assert saved_then


def test_what_goes_wrong_in_one_rank_is_told_in_all(starts):
    found, other = (each["troubles"] for each in starts[0])

    assert found == other
    assert found["in use"].startswith("CheckpointInUseError: another job saves its checkpoints in")
    lost = "CheckpointError: step 2 is not saved:\n  * ['cut']/0 is not there\n"
    assert found["lost"].startswith(lost)
    assert found["lost later"].startswith(lost)
    assert found["names"] == [".jax_dist.lock", "1"]
    assert "/1 cannot be read:\n  * MemoryError: no room\n" in found["unreadable"]
    assert found["then"] == (True, 2, [2.0, 2.0, 2.0])


def test_a_preempted_job_saves_and_is_taken_up_again(starts):
    first, second = ([each["trained"] for each in start] for start in starts)

    assert first[0] == first[1]
    assert second[0] == second[1]
    left = first[0]
    assert 40 < left["end"] < 300
    assert left["saved"]
    assert second[0] == {
        "start": left["end"],
        "end": 300,
        "saved": True,
        "sum": [45150.0, 45150.0],  # of 1 to 300
        "steps": 300,
    }


def test_several_processes_read_a_state_of_pmap_onto_the_devices_of_all(starts):
    for rank, each in enumerate(starts[1]):
        assert each["from pmap"] == {
            "start": 1,
            "whole": {"cut": True, "same": True},
            "cut": [[4.0 * rank, 4 * rank + 1], [4.0 * rank + 2, 4 * rank + 3]],
            "own": [3.0, 3.0],
        }
