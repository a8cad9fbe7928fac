"""Checkpoints with a leading device axis, read and converted: equal to the bit, or refused."""

import io
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as orbax
import pytest
from flax import jax_utils, serialization
from flax.training.train_state import TrainState

from jax_dist.commands.cli import main
from jax_dist.errors import CheckpointError
from jax_dist.multihost import Checkpoints


def make_state() -> TrainState:
    params = {
        "kernel": jnp.arange(6.0).reshape(3, 2).at[0, 0].set(jnp.nan),
        "bias": jnp.asarray([0.1, -0.0], jnp.bfloat16),
    }
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def replicated(state):
    """As a program with pmap has it."""
    return jax.device_get(jax_utils.replicate(state))


def with_statistics(state, statistics) -> dict:
    return {"train": state, "batch_stats": {"mean": np.asarray(statistics)}}


def bits(tree) -> list:
    return [(np.asarray(leaf).shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def saved(folder: pathlib.Path, state) -> pathlib.Path:
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.save(1, state)
    return folder


def restored(folder: pathlib.Path, state, **options):
    with Checkpoints(folder, every=1) as checkpoints:
        return checkpoints.restore(state, **options)


class TestRestore:
    def test_one_copy_is_read_to_the_bit(self, tmp_path):
        state = make_state()
        saved(tmp_path, replicated(state))

        found, step = restored(tmp_path, jax.tree.map(jnp.zeros_like, state), from_pmap=True)

        assert step == 1
        assert bits(found) == bits(jax.tree.map(jnp.asarray, state))

    def test_a_step_counter_is_a_python_integer_again(self, tmp_path):
        saved(tmp_path, {"step": np.full(8, 7, np.int32), "w": np.zeros((8, 3))})

        found, _ = restored(tmp_path, {"step": 0, "w": np.ones(3)}, from_pmap=True)

        assert type(found["step"]) is int
        assert found["step"] == 7

    def test_a_state_without_the_axis_is_read_as_ever(self, tmp_path):
        """What the new program itself has saved since."""
        saved(tmp_path, {"w": np.arange(8.0)})

        found, _ = restored(tmp_path, {"w": np.zeros(8)}, from_pmap=True)

        assert found["w"].tolist() == list(range(8))

    def test_it_lies_where_the_state_lies(self, tmp_path):
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
        cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        saved(tmp_path, {"w": np.stack([np.arange(16.0, dtype=np.float32)] * 8)})

        found, _ = restored(tmp_path, {"w": jax.device_put(jnp.zeros(16), cut)}, from_pmap=True)

        assert found["w"].sharding == cut
        assert found["w"].tolist() == list(range(16))

    def test_typed_keys(self, tmp_path):
        keys = jax.random.wrap_key_data(np.stack([np.array([1, 2], np.uint32)] * 8))
        saved(tmp_path, {"key": keys})

        found, _ = restored(tmp_path, {"key": jax.random.key(0)}, from_pmap=True)

        assert jax.random.key_data(found["key"]).tolist() == [1, 2]

    def test_without_the_option_it_does_not_fit(self, tmp_path):
        saved(tmp_path, {"w": np.zeros((8, 3))})

        with pytest.raises(CheckpointError, match=r"float64\[8,3\], in the state float64\[3\]"):
            restored(tmp_path, {"w": np.zeros(3)})

    @pytest.mark.parametrize(
        ("wrong", "given"),
        [
            (np.zeros((8, 4)), np.zeros(3)),
            (np.zeros((8, 3), np.float32), np.zeros(3)),
            (np.zeros((8, 1), np.int32), 0),
            (np.zeros(8), 0),
            (jax.random.split(jax.random.key(0), 8), 0),
            (jax.random.split(jax.random.key(0), 8), False),
        ],
    )
    def test_another_shape_or_dtype_does_not_fit(self, tmp_path, wrong, given):
        saved(tmp_path, {"w": wrong, "v": np.zeros((8, 2))})

        with pytest.raises(CheckpointError, match=r"\['w'\]"):
            restored(tmp_path, {"w": given, "v": np.zeros(2)}, from_pmap=True)

    def test_two_numbers_of_copies_do_not_fit(self, tmp_path):
        saved(tmp_path, {"w": np.zeros((8, 3)), "v": np.zeros((4, 3))})

        with pytest.raises(CheckpointError, match=r"\['v'\] has 4 copies\n.*\['w'\] has 8 copies"):
            restored(tmp_path, {"w": np.zeros(3), "v": np.zeros(3)}, from_pmap=True)

    def test_copies_that_differ_are_refused_by_name(self, tmp_path):
        saved(tmp_path, {"w": np.zeros((4, 3)), "stats": np.array([[0.0], [1.0], [0.0], [5.0]])})

        with pytest.raises(CheckpointError) as caught:
            restored(tmp_path, {"w": np.zeros(3), "stats": np.zeros(1)}, from_pmap=True)

        assert str(caught.value).splitlines()[1:3] == [
            "  * ['stats']: 2 of 4 copies are not like the first",
            "Because the program kept one value for each device, such as batch statistics that "
            "were never averaged, or a random key; one of them alone is another state.",
        ]

    @pytest.mark.parametrize(("choice", "value"), [("mean", 1.5), ("first", 0.0)])
    def test_or_chosen(self, tmp_path, choice, value):
        saved(tmp_path, {"w": np.ones((4, 3)), "stats": np.array([[0.0], [1.0], [0.0], [5.0]])})
        state = {"w": np.zeros(3), "stats": np.zeros(1)}

        found, _ = restored(tmp_path, state, from_pmap=True, differing={"stats": choice})

        assert found["stats"].tolist() == [value]
        assert found["w"].tolist() == [1, 1, 1]

    def test_integers_have_no_mean(self, tmp_path):
        saved(tmp_path, {"key": np.arange(8, dtype=np.uint32).reshape(4, 2)})

        with pytest.raises(CheckpointError, match=r"\['key'\]: 3 of 4"):
            restored(tmp_path, {"key": np.zeros(2, np.uint32)}, from_pmap=True, differing="mean")

    @pytest.mark.parametrize("differing", ["median", {"w": "last"}, {"stat": "mean"}])
    def test_a_choice_that_is_misspelt(self, tmp_path, differing):
        saved(tmp_path, {"w": np.zeros((4, 3))})

        with pytest.raises(ValueError, match="median|last|stat"):
            restored(tmp_path, {"w": np.zeros(3)}, from_pmap=True, differing=differing)


def convert(*arguments) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["checkpoint", "convert", *map(str, arguments)], out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def written_by_flax(folder: pathlib.Path, state) -> pathlib.Path:
    path = folder / "checkpoint_900"
    path.write_bytes(serialization.to_bytes(state))
    return path


def written_by_orbax(folder: pathlib.Path, state) -> pathlib.Path:
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "tree", args=orbax.args.PyTreeSave(state))
    return folder / "tree"


class TestConvert:
    def test_flax(self, tmp_path):
        state = jax.tree.map(jnp.asarray, make_state())
        path = written_by_flax(tmp_path, replicated(state))
        before = path.read_bytes()

        code, out, _ = convert(path, tmp_path / "new")

        assert code == 0
        assert "8 leaves, one copy of 8 each; 0 leaves" in out
        empty = jax.tree.map(jnp.zeros_like, state)
        assert bits(serialization.from_bytes(empty, (tmp_path / "new").read_bytes())) == bits(state)
        assert path.read_bytes() == before

    def test_orbax_for_a_state_of_flax(self, tmp_path):
        state = jax.tree.map(jnp.asarray, make_state())
        path = written_by_orbax(tmp_path, replicated(state))

        assert convert(path, tmp_path / "new")[0] == 0

        with orbax.StandardCheckpointer() as checkpointer:
            empty = jax.tree.map(jnp.zeros_like, state)
            found = checkpointer.restore(tmp_path / "new", empty)
        assert isinstance(found, TrainState)
        assert bits(found) == bits(state)

    def test_all_steps_of_a_manager_with_what_lies_beside(self, tmp_path):
        state = {"w": np.arange(3.0)}
        with orbax.CheckpointManager(tmp_path / "run") as manager:
            for step in (1, 2):
                tree = replicated({"w": state["w"] * step})
                items = {
                    "state": orbax.args.StandardSave(tree),
                    "note": orbax.args.JsonSave([step]),
                }
                manager.save(step, args=orbax.args.Composite(**items))

        assert convert(tmp_path / "run", tmp_path / "new")[0] == 0

        with orbax.CheckpointManager(tmp_path / "new") as manager:
            assert manager.all_steps() == [1, 2]
            how = {"state": orbax.args.StandardRestore(state), "note": orbax.args.JsonRestore()}
            found = manager.restore(2, args=orbax.args.Composite(**how))
        assert found.state["w"].tolist() == [0, 2, 4]
        assert found.note == [2]

    def test_copies_that_differ_write_nothing(self, tmp_path):
        state = with_statistics(replicated(make_state()), np.arange(8.0))
        path = written_by_flax(tmp_path, state)

        code, out, err = convert(path, tmp_path / "new")

        assert (code, out) == (1, "")
        assert "['batch_stats']['mean']: 7 of 8 copies" in err
        assert "--leaf PART=CHOICE" in err
        assert [each.name for each in tmp_path.iterdir()] == ["checkpoint_900"]

    def test_or_are_chosen(self, tmp_path):
        path = written_by_flax(tmp_path, {"a": np.arange(4.0), "b": np.arange(4)})

        assert convert("--leaf", "a=mean", "--leaf", "b=first", path, tmp_path / "new")[0] == 0

        found = serialization.msgpack_restore((tmp_path / "new").read_bytes())
        assert (found["a"], found["b"]) == (1.5, 0)

    def test_leaves_without_the_axis(self, tmp_path):
        tree = {"w": np.zeros((8, 3)), "v": np.zeros((8, 2)), "losses": np.zeros(100), "epoch": 3}
        path = written_by_flax(tmp_path, tree)

        code, _, err = convert(path, tmp_path / "new")
        assert code == 1
        assert "['losses'][100]" in err

        assert convert("--leaf", "losses=keep", path, tmp_path / "new")[0] == 0
        found = serialization.msgpack_restore((tmp_path / "new").read_bytes())
        shapes = jax.tree.map(np.shape, found)
        assert shapes == {"w": (3,), "v": (2,), "losses": (100,), "epoch": ()}

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_nothing_is_overwritten(self, tmp_path, kind):
        path, target = written_by_flax(tmp_path, {"w": np.zeros((8, 3))}), tmp_path / "new"
        {
            "file": lambda: target.write_text("mine"),
            "folder": target.mkdir,
            "link": lambda: target.symlink_to(tmp_path / "nowhere"),
        }[kind]()

        code, _, err = convert(path, target)

        assert code == 2
        assert "nothing is overwritten" in err
        assert target.is_symlink() or target.is_dir() or target.read_text() == "mine"

    @pytest.mark.parametrize("arguments", [["--leaf", "statz=mean"], []])
    def test_a_misspelt_choice_or_path(self, tmp_path, arguments):
        path = written_by_flax(tmp_path, {"stats": np.zeros((8, 3))})
        path = path if arguments else tmp_path / "nothing"

        code, _, err = convert(*arguments, path, tmp_path / "new")

        assert code == 2
        assert ("statz" if arguments else "nothing") in err
        assert not (tmp_path / "new").exists()

    def test_nothing_is_written_into_what_is_read(self, tmp_path):
        path = written_by_orbax(tmp_path, replicated(make_state()))
        (tmp_path / "link").symlink_to(path)
        before = sorted(path.rglob("*"))

        for inside in (path / "new", tmp_path / "link" / "new"):
            code, _, err = convert(path, inside)
            assert (code, "which stays as it is" in err) == (2, True)
        assert sorted(path.rglob("*")) == before

    def test_what_is_no_checkpoint(self, tmp_path):
        (tmp_path / "text").write_text("hello")
        (tmp_path / "folder").mkdir()

        for name in ("text", "folder"):
            code, _, err = convert(tmp_path / name, tmp_path / "new")
            assert code == 1
            assert "cannot be converted" in err

    def test_a_folder_of_checkpoints_of_ours_is_read_with_restore(self, tmp_path):
        saved(tmp_path / "run", {"w": np.zeros((8, 3))})

        code, _, err = convert(tmp_path / "run", tmp_path / "new")

        assert code == 1
        assert "from_pmap=True" in err

    def test_a_disk_that_fails_leaves_no_half_checkpoint(self, tmp_path, monkeypatch):
        path = written_by_orbax(tmp_path, {"w": np.zeros((8, 3))})
        monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no power")))

        code, _, err = convert(path, tmp_path / "new")

        assert code == 2
        assert "no power" in err
        assert [each.name for each in tmp_path.iterdir()] == ["tree"]
